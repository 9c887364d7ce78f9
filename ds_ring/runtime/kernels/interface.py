"""What a kernel is: the attention of one hop, tile by tile, forward and backward, always with the lse.

A kernel sees local tensors and a `Tiles` table, and yields partial results; it neither merges nor
accumulates nor communicates. The ring pass adds the parts up, in float32, in one place for all kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from torch import Tensor

from ds_ring.schedule.tiles import Tiles


class PartialOut(NamedTuple):
    """Attention of some queries over some keys.

    Attributes:
        q_slots: the query slots concerned.
        out_BHSD: normalised over these keys alone, [batch, query heads, len(q_slots), head_dim].
        lse_BHS: natural-log log-sum-exp over these keys, float32 (float64 for float64 inputs).
    """

    q_slots: slice
    out_BHSD: Tensor
    lse_BHS: Tensor


class PartialGrads(NamedTuple):
    """What one tile adds to the gradients; dk and dv are already summed over the query heads of a group."""

    q_slots: slice
    k_slots: slice
    dq_BHSD: Tensor
    dk_BGSD: Tensor
    dv_BGSD: Tensor


class Kernel(Protocol):
    """One hop's attention. q [B, H, S, D]; k, v [B, G, n, D] (the payload); H a multiple of G."""

    name: str

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> Iterator[PartialOut]:
        """Partial results; together the parts cover every attended pair exactly once."""
        ...

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        tiles: Tiles,
        scale: float,
    ) -> Iterator[PartialGrads]:
        """Partial gradients, exact and additive because `out` and `lse` are the global ones (DESIGN, 4)."""
        ...

    def executed_pairs(self, tiles: Tiles) -> int:
        """(query, key) pairs per head that the kernel really multiplies for these tiles, waste included."""
        ...
