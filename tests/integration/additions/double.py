"""Compute every tile in float64, whatever the tensors are."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ds_ring.kernels.interface import PartialGrads, PartialOut
from ds_ring.kernels.reference import ReferenceKernel
from ds_ring.masks.tiles import Tiles
from ds_ring.plugin import KernelRow, Plugin


class DoubleKernel:
    """Lend the reference kernel tensors of float64, and round its results."""

    name = "double"
    passes = 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> Iterator[PartialOut]:
        DoubleKernel.passes += 1
        for part in ReferenceKernel().forward(q.double(), k.double(), v.double(), tiles, scale):
            yield part._replace(out_BHSD=part.out_BHSD.float(), lse_BHS=part.lse_BHS.float())

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tiles: Tiles,
        scale: float, grad_lse: Tensor | None = None,
    ) -> Iterator[PartialGrads]:  # fmt: skip
        DoubleKernel.passes += 1
        wide = (x.double() for x in (grad_out, q, k, v, out, lse))
        for part in ReferenceKernel().backward(*wide, tiles, scale, grad_lse):
            yield part._replace(dq=part.dq.float(), dk=part.dk.float(), dv=part.dv.float())

    def select_heads(self, heads: slice) -> DoubleKernel:
        return self

    def count_executed_pairs(self, tiles: Tiles, backward: bool = False) -> int:
        return ReferenceKernel().count_executed_pairs(tiles, backward)


PLUGIN = Plugin(kernels={"double": KernelRow(DoubleKernel)})
