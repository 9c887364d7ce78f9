"""Check what a kernel returns at each hop of a pass, for the option `check_finite`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ds_ring.kernels.interface import Kernel, PartialGrads, PartialOut
from ds_ring.masks.tiles import Tiles
from ds_ring.ops.checks import check_finite
from ds_ring.schedule.lowering import get_kernel_calls
from ds_ring.schedule.rank_plan import RankPlan


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
