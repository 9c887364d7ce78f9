"""What a kernel is: the attention of one hop, tile by tile, forward and backward, always with the lse.

A kernel sees local tensors and a `Tiles` table, and yields partial results; it neither merges nor
accumulates nor communicates. The ring pass adds the parts up, in float32, in one place for all kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from torch import Tensor

from ds_ring.schedule.tiles import Kind, Tiles


class Tile(NamedTuple):
    """One row of a `Tiles` table as Python objects.

    Attributes:
        q_slots, k_slots: query and key slots.
        kind: what of the rectangle is attended.
        member: which query head of each K/V head's group; -1 for all.
        bias: log m, added to every score (0 for ordinary patterns).
    """

    q_slots: slice
    k_slots: slice
    kind: Kind
    member: int
    bias: float

    def heads(self, group: int) -> slice:
        """The query heads concerned, if `group` of them share a K/V head."""
        return slice(None) if self.member < 0 else slice(self.member, None, group)


def each_tile(tiles: Tiles) -> Iterator[Tile]:
    """The rows of a table, one by one."""
    columns = (
        tiles.q.slot, tiles.q.slot_step, tiles.q.length, tiles.k.slot, tiles.k.slot_step, tiles.k.length,
        tiles.kind, tiles.member, tiles.multiplicity,
    )  # fmt: skip
    for q0, q_step, q_n, k0, k_step, k_n, kind, member, times in zip(
        *(c.tolist() for c in columns), strict=True
    ):
        q_slots = slice(q0, q0 + (q_n - 1) * q_step + 1, q_step)
        k_slots = slice(k0, k0 + (k_n - 1) * k_step + 1, k_step)
        yield Tile(q_slots, k_slots, Kind(kind), member, math.log(times))


class PartialOut(NamedTuple):
    """Attention of some queries over some keys.

    Attributes:
        heads: the query heads concerned.
        q_slots: the query slots concerned.
        out_BHSD: normalised over these keys alone, [batch, len(heads), len(q_slots), head_dim].
        lse_BHS: natural-log log-sum-exp over these keys, float32 (float64 for float64 inputs).
    """

    heads: slice
    q_slots: slice
    out_BHSD: Tensor
    lse_BHS: Tensor


class PartialGrads(NamedTuple):
    """What one tile adds to the gradients; dk and dv are of all K/V heads, summed over the query heads."""

    heads: slice
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
