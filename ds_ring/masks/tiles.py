"""Tiles: rectangles of the attention matrix, each of a query run and a key run; selected, cut and counted.

A run is an arithmetic progression of tokens. A `Tiles` table is a struct of int64 columns with one row per
tile, so that planning a sequence of a million tokens is vectorised arithmetic. A slot is an index into the
local tensor; a position is an index into the global sequence. There are no empty tiles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from ds_ring.masks.key_multiplicity import Weights
from ds_ring.masks.slot_ranges import IntArray

if TYPE_CHECKING:
    from ds_ring.masks.pair_mask import MaskInside
    from ds_ring.masks.pattern import BoundPattern


class Kind(IntEnum):
    """Which pairs of a tile are attended; i is the index of a query and j of a key inside the tile."""

    FULL = 0
    CAUSAL = 1  # square, j <= i
    INVERSE_CAUSAL = 2  # square, j >= i: the lower edge of a sliding window
    PARTIAL = 3  # the pattern's mask function says which pairs
    BI_CAUSAL = 4  # wider than high: i <= j <= i + (keys - queries), whole rows of a window


@dataclass(frozen=True, eq=False)
class Axis:
    """One side of all tiles: row tokens i < length, at slot + i * slot_step, position + i * position_step."""

    slot: IntArray
    slot_step: IntArray
    position: IntArray
    position_step: IntArray
    length: IntArray

    @property
    def last_position(self) -> IntArray:
        """Return the position of the last token of every row."""
        return self.position + (self.length - 1) * self.position_step

    def take(self, first: IntArray | int, length: IntArray | int, step: IntArray | int = 1) -> Axis:
        """Return `length` tokens of every row, starting at index `first`, every `step`-th token."""
        return replace(
            self,
            slot=self.slot + first * self.slot_step,
            slot_step=self.slot_step * step,
            position=self.position + first * self.position_step,
            position_step=self.position_step * step,
            length=np.broadcast_to(np.asarray(length, dtype=np.int64), self.length.shape),
        )

    def rows(self, index: IntArray) -> Axis:
        """Return a selection of rows (indices or a boolean mask)."""
        return Axis(*(getattr(self, f.name)[index] for f in fields(self)))

    def between(self, low: IntArray | int, high: IntArray | int) -> Axis:
        """Return the tokens of every row at positions low <= p < high; a length may become 0."""
        # ceiling division: index of the first token at or after each bound
        first = np.clip(-((self.position - low) // self.position_step), 0, self.length)
        end = np.clip(-((self.position - high) // self.position_step), first, self.length)
        return self.take(first, end - first)

    def residue(self, residue: IntArray | int, modulus: int) -> Axis:
        """Return the tokens of every row at positions p = residue (mod modulus); a length may become 0."""
        if modulus == 1:
            return self
        # The least i >= 0 with position + i * position_step = residue (mod modulus), by a modular inverse.
        # Rows have few different steps, so one inverse serves many rows.
        first, step = np.zeros_like(self.slot), np.ones_like(self.slot)
        exists = np.ones(len(self.slot), dtype=bool)
        for position_step in np.unique(self.position_step).tolist():
            rows = self.position_step == position_step
            common = math.gcd(position_step, modulus)
            reduced = modulus // common
            gap = (residue if isinstance(residue, int) else residue[rows]) - self.position[rows]
            # There is a solution only if the greatest common divisor divides the gap.
            exists[rows] = gap % common == 0
            inverse = pow(position_step // common, -1, reduced) if reduced > 1 else 0
            first[rows], step[rows] = gap // common * inverse % reduced, reduced
        count = np.where(exists, np.maximum(-((first - self.length) // step), 0), 0)
        return self.take(first, count, step)

    @staticmethod
    def concat(parts: list[Axis]) -> Axis:
        """Return the rows of several axes, one after the other."""
        return Axis(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Axis)))

    @staticmethod
    def from_runs(runs: IntArray) -> Axis:
        """Return the runs (start, step, length) of a shard, which fill its slots one after the other."""
        start, step, length = runs[:, 0], runs[:, 1], runs[:, 2]
        return Axis(np.cumsum(length) - length, np.ones_like(start), start, step, length)


@dataclass(frozen=True, eq=False)
class Tiles:
    """A table of tiles, one row per tile.

    Attributes:
        q, k: the query side and the key side.
        kind: a `Kind` per row.
        head_in_group: the query head, within the group of a K/V head, that the row is for; -1 for all.
        multiplicity: m of every pair of the row, the number of branches that attend to it; log m is added to
            the scores.
        weight: index into `weights` of the function that multiplies m pair by pair; -1 for none.
        weights: functions of query and key positions, for an m that varies inside a tile.
        mask: index into `masks` of the function that decides inside a PARTIAL tile; -1 for the other kinds.
        masks: functions of batch size, query positions and key positions.
        rule: the pattern that the tiles were cut from, if known. It describes the same pairs with the same m.
    """

    q: Axis
    k: Axis
    kind: IntArray
    head_in_group: IntArray
    multiplicity: IntArray
    weight: IntArray
    mask: IntArray
    weights: tuple[Weights, ...] = ()
    masks: tuple[MaskInside, ...] = ()
    rule: BoundPattern | None = None

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def pairs(self) -> IntArray:
        """Return the number of attended pairs of each tile; for a PARTIAL tile, of the whole rectangle."""
        rectangle = self.q.length * self.k.length
        triangle = self.q.length * (self.q.length + 1) // 2
        is_triangle = (self.kind == Kind.CAUSAL) | (self.kind == Kind.INVERSE_CAUSAL)
        band = self.q.length * (self.k.length - self.q.length + 1)
        return np.where(is_triangle, triangle, np.where(self.kind == Kind.BI_CAUSAL, band, rectangle))

    def rows(self, index: IntArray) -> Tiles:
        """Return a selection of rows (indices or a boolean mask)."""
        return replace(
            self,
            q=self.q.rows(index),
            k=self.k.rows(index),
            kind=self.kind[index],
            head_in_group=self.head_in_group[index],
            multiplicity=self.multiplicity[index],
            weight=self.weight[index],
            mask=self.mask[index],
        )

    def sides(self, q: Axis, k: Axis) -> Tiles:
        """Return the same rows with other sides, without the rows that are empty now."""
        part = replace(self, q=q, k=k)
        keep = (q.length > 0) & (k.length > 0)
        return part if keep.all() else part.rows(keep)

    def take(
        self,
        q_first: IntArray | int,
        q_length: IntArray | int,
        k_first: IntArray | int,
        k_length: IntArray | int,
    ) -> Tiles:
        """Return a sub-rectangle of every row, without the rows that are empty now."""
        return self.sides(self.q.take(q_first, q_length), self.k.take(k_first, k_length))

    def of_kind(self, kind: Kind) -> Tiles:
        """Return the same rectangles with this kind in every row."""
        return replace(self, kind=np.full(len(self), kind, dtype=np.int64))

    def masked(self, mask: MaskInside) -> Tiles:
        """Return the same rectangles as PARTIAL tiles with this mask."""
        return replace(self.of_kind(Kind.PARTIAL), mask=np.zeros(len(self), dtype=np.int64), masks=(mask,))

    def for_head(self, head_in_group: int) -> Tiles:
        """Return the tiles of one query head of each group (-1: the tiles unchanged)."""
        if head_in_group < 0:
            return self
        concerned = (self.head_in_group < 0) | (self.head_in_group == head_in_group)
        part = self if concerned.all() else self.rows(concerned)
        return replace(part, head_in_group=np.full(len(part), head_in_group, dtype=np.int64))

    def times(self, multiplicity: IntArray | int) -> Tiles:
        """Return the same tiles with the multiplicity of every pair multiplied by a number."""
        return replace(self, multiplicity=self.multiplicity * multiplicity)

    def weighted(self, weights: Weights) -> Tiles:
        """Return the same tiles with the multiplicity of every pair multiplied by `weights` of the pair."""
        assert (self.weight < 0).all(), "expected tiles without weights, got tiles that have some"
        q, k = self.q, self.k
        varies = weights.varies(q.position_step, q.length) | weights.varies(k.position_step, k.length)
        # Where m is constant inside a tile, put it into the multiplicity: the kernel then evaluates no
        # function.
        constant = np.where(varies, 1, weights(q.position, k.position))
        return replace(self.times(constant), weight=np.where(varies, 0, -1), weights=(weights,))

    @staticmethod
    def concat(parts: list[Tiles]) -> Tiles:
        """Return the rows of several tables, one after the other."""
        weights = tuple(dict.fromkeys(w for p in parts for w in p.weights))
        masks = tuple(dict.fromkeys(m for p in parts for m in p.masks))
        # Index -1 (none) finds the last entry, which is -1.
        weight_places = [np.array([*map(weights.index, p.weights), -1]) for p in parts]
        mask_places = [np.array([*map(masks.index, p.masks), -1]) for p in parts]
        return Tiles(
            Axis.concat([p.q for p in parts]),
            Axis.concat([p.k for p in parts]),
            np.concatenate([p.kind for p in parts]),
            np.concatenate([p.head_in_group for p in parts]),
            np.concatenate([p.multiplicity for p in parts]),
            np.concatenate([place[p.weight] for p, place in zip(parts, weight_places, strict=True)]),
            np.concatenate([place[p.mask] for p, place in zip(parts, mask_places, strict=True)]),
            weights,
            masks,
            next((p.rule for p in parts if p.rule is not None), None),
        )

    def in_blocks(self, side: int) -> Tiles:
        """Cut every rectangle into blocks of at most side x side."""
        q_parts, k_parts = -(-self.q.length // side), -(-self.k.length // side)
        row, which = repeat_rows(q_parts * k_parts)
        q_first, k_first = which // k_parts[row] * side, which % k_parts[row] * side
        cut = self.rows(row)
        q = cut.q.take(q_first, np.minimum(side, cut.q.length - q_first))
        return cut.sides(q, cut.k.take(k_first, np.minimum(side, cut.k.length - k_first)))

    @staticmethod
    def rectangles(
        q_runs: IntArray, k_runs: IntArray, pairs: tuple[IntArray, IntArray] | None = None
    ) -> Tiles:
        """Return FULL rectangles (query run x key run) of two shards.

        Args:
            q_runs, k_runs: runs (start, step, length) of each shard.
            pairs: indices of the query run and of the key run of each rectangle; None for all combinations.
        """
        q, k = Axis.from_runs(q_runs), Axis.from_runs(k_runs)
        nq, nk = len(q_runs), len(k_runs)
        q_index, k_index = pairs or (np.repeat(np.arange(nq), nk), np.tile(np.arange(nk), nq))
        zeros, ones = (make(len(q_index), dtype=np.int64) for make in (np.zeros, np.ones))
        # FULL, for all heads of the group, m = 1, without weight and mask
        return Tiles(q.rows(q_index), k.rows(k_index), zeros, zeros - 1, ones, zeros - 1, zeros - 1)


UNBOUNDED = 1 << 60  # larger than any distance between positions, small enough not to overflow int64


def repeat_rows(counts: IntArray) -> tuple[IntArray, IntArray]:
    """Return the row index and the number within the row, for rows that are repeated `counts` times."""
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
