"""The base class of an operand beside q, k and v, with what an attention layer defines for it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from ds_ring.kernels.interface import Kernel, Operands
from ds_ring.ops.passes import Results

if TYPE_CHECKING:
    from ds_ring.ops.context import RingContext
    from ds_ring.schedule.plan import Plan


class ExtraOperand:
    """An operand of a call in addition to q, k, v, and its changes to a pass; this base changes nothing.

    Attributes:
        name: the argument of the public function.
        tensor: its value.
        allows_other_key_dim: k and v are expanded on arrival, so that k may have another head_dim than q.
    """

    name: ClassVar[str]
    allows_other_key_dim: ClassVar[bool] = False

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @property
    def description(self) -> Hashable:
        """Return what a prepared pass depends on."""
        return self.name, self.tensor.shape, self.tensor.dtype, self.tensor.device

    def check(self, context: RingContext, operands: Operands, parts: int) -> None:
        """Raise RingError for a tensor that does not fit; arguments as of `prepare.check`."""

    def fields(self, k: Tensor) -> dict[str, object]:
        """Return what ranks compare, by the name for the message."""
        return {self.name: self.tensor.dtype}

    def wrap_kernel(self, kernel: Kernel, context: RingContext, plan: Plan, operands: Operands) -> Kernel:
        """Return the kernel that runs, for passes of this description."""
        return kernel

    def bind_operand(self, kernel: Kernel, context: RingContext, operands: Operands) -> Kernel:
        """Return the kernel of one pass: what `wrap_kernel` returned, with this tensor."""
        return kernel

    def finish(self, context: RingContext, results: Results) -> Results:
        """Return (out, lse) of a forward pass with this tensor, which may be changed in place."""
        return results
