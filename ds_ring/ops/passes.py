"""What a pass is: one way to attend over the keys of all ranks, forward and backward.

`registry.PASSES` has a row for each. Its `home` is a function like `MakePass`, in the file of the pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from ds_ring.comm.messages import Transport
from ds_ring.kernels.interface import Kernel, Operands

if TYPE_CHECKING:
    from ds_ring.ops.context import Prepared, RingContext


class Pass(Protocol):
    """The attention of this rank's queries over the keys of all ranks; shapes as in `RingPass`."""

    @property
    def kernel(self) -> Kernel: ...

    @property
    def exchange(self) -> Transport | None: ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (out, lse)."""
        ...

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        grad_lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return (dq, dk, dv)."""
        ...


# The last argument finishes the header check; None: it is finished.
MakePass = Callable[["RingContext", "Prepared", Operands, Callable[[], None] | None], Pass]
