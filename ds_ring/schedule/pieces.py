"""Layouts of pieces of any lengths, and layouts whose pieces are whole blocks of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from ds_ring.errors import RingLayoutError
from ds_ring.masks.slots import IntArray
from ds_ring.schedule.layout import Layout, split_pieces


@dataclass(frozen=True)
class PieceLayout(Layout):
    """Cut the sequence at any `boundaries`; each piece has an owner, which keeps its pieces in order."""

    boundaries: tuple[int, ...] = ()  # positions at which pieces begin, and T at the end; ascending
    owners: tuple[int, ...] = ()  # ring rank of each piece

    name = "balanced"

    def runs(self, ring_rank: int) -> IntArray:
        return self._runs[ring_rank]

    @cached_property
    def _runs(self) -> list[IntArray]:
        bounds, owners = np.array(self.boundaries, dtype=np.int64), np.array(self.owners, dtype=np.int64)
        return split_pieces(bounds[:-1], bounds[1:], owners, self.ring_size)

    @cached_property
    def longest_shard(self) -> int:
        lengths = np.diff(self.boundaries)
        return int(np.bincount(self.owners, weights=lengths, minlength=self.ring_size).max())

    def __str__(self) -> str:
        digest = hash((self.boundaries, self.owners)) & (2**64 - 1)  # ranks compare this text
        return f"{super().__str__()}, {len(self.owners)} pieces, digest {digest:016x}"


@lru_cache(maxsize=64)
def round_to_blocks(layout: Layout, size: int) -> Layout:
    """Return the layout with its borders moved to the nearest multiples of `size`.

    Raises:
        RingLayoutError: a shard has runs with a step above 1.
    """
    rows = []
    for ring_rank in range(layout.ring_size):
        for start, step, length in layout.runs(ring_rank).tolist():
            if step != 1 and length > 1:
                raise RingLayoutError(
                    f"{layout}: expected shards of consecutive positions for blocks of {size} tokens, got"
                    ' others; use the layout "zigzag", "contiguous" or "balanced"'
                )
            rows.append((start, ring_rank))
    starts, owners = zip(*sorted(rows), strict=True)
    borders = [min((start + size // 2) // size * size, layout.tokens) for start in starts]
    moved = PieceLayout(
        layout.tokens, layout.ring_size, layout.multiple_of, (*borders, layout.tokens), tuple(owners)
    )
    same = all(np.array_equal(moved.runs(r), layout.runs(r)) for r in range(layout.ring_size))
    return layout if same else moved


def whole_blocks(layout: Layout, size: int) -> Layout:
    """Return the layout if its runs begin at multiples of `size`, or raise RingLayoutError."""
    moved = round_to_blocks(layout, size)
    if moved is not layout:
        raise RingLayoutError(
            f"{layout}: expected runs that begin at multiples of {size} tokens (block_size), got others; use"
            f" ds_ring.schedule.pieces.round_to_blocks(layout, {size}), or another length"
        )
    return layout
