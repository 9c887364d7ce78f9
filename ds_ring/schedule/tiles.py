"""Tiles: rectangles (query run x key run) of the attention matrix, and how a diagonal cuts them.

A `Tiles` table is a struct of int64 columns, one row per tile, so that planning a million tokens is
vectorised arithmetic. Slots say where a tile's tokens lie in the local tensors, positions where they stand
in the sequence; both are arithmetic progressions. Empty tiles do not exist.

[Note: square triangles]
What a diagonal leaves of a rectangle is always a union of full rectangles and *square* triangles with the
diagonal inside (j <= i, or mirrored j >= i): rows and columns that see nothing are dropped first, which
also absorbs the strict diagonals of striped layouts. So a kernel needs one causal form, not a family.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import IntEnum

import numpy as np

IntArray = np.ndarray


class Kind(IntEnum):
    """What of a tile is attended; i and j count queries and keys inside the tile."""

    FULL = 0
    CAUSAL = 1  # square, j <= i
    ANTICAUSAL = 2  # square, j >= i: the lower edge of a sliding window
    PARTIAL = 3  # the pattern's mask, evaluated inside


@dataclass(frozen=True, eq=False)
class Axis:
    """One side of every tile: `length` tokens, at slot + i * slot_step, with position + i * position_step."""

    slot: IntArray
    slot_step: IntArray
    position: IntArray
    position_step: IntArray
    length: IntArray

    def take(self, first: IntArray | int, length: IntArray | int) -> Axis:
        """The part of every row that begins at index `first` and has `length` tokens."""
        return replace(
            self,
            slot=self.slot + first * self.slot_step,
            position=self.position + first * self.position_step,
            length=np.broadcast_to(np.asarray(length, dtype=np.int64), self.length.shape),
        )

    def rows(self, index: IntArray) -> Axis:
        """A selection of rows."""
        return Axis(*(getattr(self, f.name)[index] for f in fields(self)))

    @staticmethod
    def concat(parts: list[Axis]) -> Axis:
        """The rows of several axes, one after the other."""
        return Axis(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Axis)))

    @staticmethod
    def from_runs(runs: IntArray) -> Axis:
        """The runs (start, step, length) of a shard, laid out in its slots one after the other."""
        start, step, length = runs[:, 0], runs[:, 1], runs[:, 2]
        return Axis(np.cumsum(length) - length, np.ones_like(start), start, step, length)


@dataclass(frozen=True, eq=False)
class Tiles:
    """A table of tiles.

    Attributes:
        q, k: the query and the key side.
        kind: a `Kind` per row.
    """

    q: Axis
    k: Axis
    kind: IntArray

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def pairs(self) -> IntArray:
        """Attended (query, key) pairs per tile; of a PARTIAL tile the whole rectangle is counted."""
        rectangle = self.q.length * self.k.length
        triangle = self.q.length * (self.q.length + 1) // 2
        is_triangle = (self.kind == Kind.CAUSAL) | (self.kind == Kind.ANTICAUSAL)
        return np.where(is_triangle, triangle, rectangle)

    def rows(self, index: IntArray) -> Tiles:
        """A selection of rows (indices or a boolean mask)."""
        return Tiles(self.q.rows(index), self.k.rows(index), self.kind[index])

    def take(
        self,
        q_first: IntArray | int,
        q_length: IntArray | int,
        k_first: IntArray | int,
        k_length: IntArray | int,
    ) -> Tiles:
        """The sub-rectangle of every row; rows that become empty are dropped."""
        part = replace(self, q=self.q.take(q_first, q_length), k=self.k.take(k_first, k_length))
        return part.rows((part.q.length > 0) & (part.k.length > 0))

    def of_kind(self, kind: Kind) -> Tiles:
        """The same rectangles, declared to be of one kind."""
        return replace(self, kind=np.full(len(self), kind, dtype=np.int64))

    @staticmethod
    def concat(parts: list[Tiles]) -> Tiles:
        """The rows of several tables, one after the other."""
        return Tiles(
            Axis.concat([p.q for p in parts]),
            Axis.concat([p.k for p in parts]),
            np.concatenate([p.kind for p in parts]),
        )

    @staticmethod
    def rectangles(q_runs: IntArray, k_runs: IntArray) -> Tiles:
        """Every (query run x key run) rectangle of two shards, all FULL."""
        q, k = Axis.from_runs(q_runs), Axis.from_runs(k_runs)
        nq, nk = len(q_runs), len(k_runs)
        q_index, k_index = np.repeat(np.arange(nq), nk), np.tile(np.arange(nk), nq)
        return Tiles(q.rows(q_index), k.rows(k_index), np.zeros(nq * nk, dtype=np.int64))


UNBOUNDED = 1 << 60  # larger than any distance between positions, small enough not to overflow int64


def cut_by_distance(tiles: Tiles, least: int, most: int) -> Tiles:
    """Keep the pairs with least <= query position - key position <= most; see [Note: square triangles].

    Both sides of each (FULL) input tile must have the same position step.
    """
    assert (tiles.q.position_step == tiles.k.position_step).all(), "progressions with one common step"
    step = tiles.q.position_step
    gap = tiles.q.position - tiles.k.position
    low = -((gap - least) // step)  # ceil((least - gap) / step): i - j >= low
    high = (most - gap) // step  # i - j <= high
    tiles, low, high = _drop_empty(tiles, low, high)
    inner = high >= tiles.q.length - 1  # the upper bound cuts nothing: i - 0 <= high for every i
    outer = low <= -(tiles.k.length - 1)  # the lower bound cuts nothing
    parts = [
        tiles.rows(inner & outer),
        *_cut_causal(tiles.rows(inner & ~outer), low[inner & ~outer]),
        *_cut_anticausal(tiles.rows(~inner & outer), high[~inner & outer]),
    ]
    both = ~inner & ~outer
    if both.any():
        parts.append(_cut_band(tiles.rows(both), least, most, low[both], high[both]))
    return Tiles.concat(parts)


def _drop_empty(tiles: Tiles, low: IntArray, high: IntArray) -> tuple[Tiles, IntArray, IntArray]:
    """Drop tiles, then rows and columns, in which no pair has low <= i - j <= high."""
    q_first = np.maximum(0, low)
    q_end = np.minimum(tiles.q.length, tiles.k.length + high)
    k_first = np.maximum(0, -high)
    k_end = np.minimum(tiles.k.length, tiles.q.length - low)
    keep = (q_end > q_first) & (k_end > k_first) & (low <= high)
    shift = q_first - k_first
    part = replace(tiles, q=tiles.q.take(q_first, q_end - q_first), k=tiles.k.take(k_first, k_end - k_first))
    return part.rows(keep), (low - shift)[keep], (high - shift)[keep]


def _cut_causal(tiles: Tiles, low: IntArray) -> list[Tiles]:
    """j <= i - low with low <= 0 and no empty rows or columns."""
    nq, nk, left = tiles.q.length, tiles.k.length, -low
    side = nk - left
    return [
        tiles.take(0, nq, 0, left),
        tiles.take(0, side, left, side).of_kind(Kind.CAUSAL),
        tiles.take(side, nq - side, left, side),
    ]


def _cut_anticausal(tiles: Tiles, high: IntArray) -> list[Tiles]:
    """j >= i - high with high >= 0 and no empty rows or columns: `_cut_causal` turned by 180 degrees."""
    nq, nk = tiles.q.length, tiles.k.length
    side = nq - high
    return [
        tiles.take(0, nq, side, nk - side),
        tiles.take(nq - side, side, 0, side).of_kind(Kind.ANTICAUSAL),
        tiles.take(0, nq - side, 0, side),
    ]


def _cut_band(tiles: Tiles, least: int, most: int, low: IntArray, high: IntArray) -> Tiles:
    """Both bounds cut: strips of rows as high as the band is wide, where one bound cuts each column block.

    For a strip of `width` rows from row r on, columns below r - low are cut by the upper bound alone,
    and columns from r - low on by the lower bound alone.
    """
    width = high - low + 1
    strips = -(-tiles.q.length // width)
    row = np.repeat(np.arange(len(tiles)), strips)
    strip = np.arange(len(row)) - np.repeat(np.cumsum(strips) - strips, strips)
    tiles, low, high, width = tiles.rows(row), low[row], high[row], width[row]
    first = strip * width
    q = tiles.q.take(first, np.minimum(width, tiles.q.length - first))
    split = np.clip(first - low, 0, tiles.k.length)
    begin = np.clip(first - high, 0, tiles.k.length)
    left = replace(tiles, q=q, k=tiles.k.take(begin, split - begin))
    right = replace(tiles, q=q, k=tiles.k.take(split, np.minimum(width, tiles.k.length - split)))
    parts = [part.rows(part.k.length > 0) for part in (left, right)]
    return Tiles.concat(
        [cut_by_distance(parts[0], -UNBOUNDED, most), cut_by_distance(parts[1], least, UNBOUNDED)]
    )
