"""What a pass is: one way to attend over the keys of all ranks, forward and backward.

`plugin.PASSES` has a row for each. Its `home` is a function like `MakePass`, in the file of the pass.
`ExtraOperand` is what an attention layer with more operands than q, k and v is made of.
`SavedTensors` keeps tensors of a pass for its gradient: this one as they are; `plugin.SAVED_TENSORS` names
others. `FiniteKernel` checks what a kernel returns.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

from ds_ring.kernels.interface import Kernel, PartialGrads, PartialOut
from ds_ring.kernels.interface import Operands as Operands
from ds_ring.masks.tiles import Tiles
from ds_ring.ops.checks import check_finite
from ds_ring.ring.buffers import HeadSource, Saved
from ds_ring.schedule.lowering import get_kernel_calls
from ds_ring.schedule.rank_plan import RankPlan
from ds_ring.schedule.steps import HeadChunk

if TYPE_CHECKING:
    from ds_ring.ops.context import RingContext
    from ds_ring.ops.prepare import Prepared
    from ds_ring.schedule.plan import Plan

Results = tuple[Tensor, Tensor]  # out and lse


class Pass(Protocol):
    """The attention of this rank's queries over the keys of all ranks; shapes as in `RingPass`."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return (out, lse)."""
        ...

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        grad_lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return (dq, dk, dv)."""
        ...


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


class SavedTensors:
    """Do what the strategy inside does; without one, run every pass and save its tensors as they are."""

    def __init__(self, inner: SavedTensors | None = None) -> None:
        self.inner = inner

    def run(
        self, context: RingContext, run: Callable[[RingContext], Results], q: Tensor, call: tuple[Any, ...]
    ) -> Results:
        """Return (out, lse) of `run(context)`; `call` is equal for equal calls of a context."""
        return run(context) if self.inner is None else self.inner.run(context, run, q, call)

    def save(self, context: RingContext, saved: Saved) -> Saved:
        """Return what autograd saves in place of q, k, v, out and lse."""
        return saved if self.inner is None else self.inner.save(context, saved)

    def load_heads(
        self, context: RingContext, saved: Saved, chunks: Sequence[HeadChunk], device: torch.device
    ) -> HeadSource:
        """Return what gives the heads of one chunk after the other, for tensors that were saved elsewhere."""
        assert self.inner is not None, "no strategy saves elsewhere"
        return self.inner.load_heads(context, saved, chunks, device)


_forward_passes_so_far = 0


def count_forward_pass() -> None:
    """Count a forward pass of ring attention, or a scan or halo that reads tokens of other ranks."""
    global _forward_passes_so_far
    _forward_passes_so_far += 1


def get_forward_passes() -> int:
    """Return the number of forward passes of the ring in this process so far, on all of its meshes.

    It counts per process, since a model may use a mesh of its own. A compiled graph counts when it runs.
    """
    return _forward_passes_so_far


# The last argument finishes the header check; None: it is finished.
MakePass = Callable[["RingContext", "Prepared", Operands, Callable[[], None] | None], Pass]


class FiniteKernel:
    """Check what a kernel returns at each hop of a pass; a `Kernel`.

    Args:
        kernel: computes the attention.
        plan: this rank's part of the plan, which knows the hop of a table of tiles.
    """

    def __init__(self, kernel: Kernel, plan: RankPlan) -> None:
        self._kernel, self._plan = kernel, plan
        calls = (
            get_kernel_calls(head_class, backward)
            for head_class in plan.classes
            for backward in (False, True)
        )
        self._hops = {id(step.tiles): step.hop for steps in calls for step in steps}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def select_heads(self, heads: slice) -> FiniteKernel:
        kernel = self._kernel.select_heads(heads)
        return self if kernel is self._kernel else FiniteKernel(kernel, self._plan)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> Iterator[PartialOut]:
        for part in self._kernel.forward(q, k, v, tiles, scale):
            self._check(tiles, out=part.out_BHSD, lse=part.lse_BHS)
            yield part
            del part  # else it stays alive while the kernel computes the next one

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tiles: Tiles,
        scale: float, grad_lse: Tensor | None = None,
    ) -> Iterator[PartialGrads]:  # fmt: skip
        for part in self._kernel.backward(grad_out, q, k, v, out, lse, tiles, scale, grad_lse):
            self._check(tiles, dq=part.dq, dk=part.dk, dv=part.dv)
            yield part
            del part

    def _check(self, tiles: Tiles, **tensors: Tensor) -> None:
        kernel = " ".join(filter(None, (self._kernel.name, getattr(self._kernel, "running", ""))))
        check_finite(self._plan.ring_rank, self._hops[id(tiles)], kernel, **tensors)
