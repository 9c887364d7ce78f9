"""Tiles: rectangles of the attention matrix, each of a query run and a key run; selected, cut and counted.

A run is an arithmetic progression of tokens. A `Tiles` table is a struct of int64 columns with one row per
tile, so that planning a sequence of a million tokens is vectorised arithmetic. A slot is an index into the
local tensor; a position is an index into the global sequence. There are no empty tiles: a table refuses them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ds_ring.errors import RingPatternError
from ds_ring.masks.slots import IntArray

if TYPE_CHECKING:
    from ds_ring.masks.pair_masks import MaskInside

MAX_PAIRS = 1 << 62  # of a table, in int64
UNBOUNDED = 1 << 60  # larger than any distance between positions, small enough not to overflow int64


@dataclass(frozen=True)
class Weights:
    """The multiplicity m of a pair: the number of residue classes that contain both of its positions.

    Attributes:
        classes: (residue, modulus) of every class; each modulus is a multiple of the one before it.
    """

    classes: tuple[tuple[int, int], ...]

    @property
    def period(self) -> int:
        """Return the shift of positions after which m repeats: the last modulus, which all others divide."""
        return self.classes[-1][1]

    def __call__(self, q: Any, k: Any) -> Any:
        """Return m, broadcast over query and key positions (arrays or tensors of int64)."""
        return sum(((q % m == r) & (k % m == r)) * 1 for r, m in self.classes)


@dataclass(frozen=True, eq=False)
class Axis:
    """One side of all tiles. Token i of a row has slot + i * slot_step and position + i * position_step."""

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
        return Axis(
            self.slot + first * self.slot_step,
            self.slot_step * step,
            self.position + first * self.position_step,
            self.position_step * step,
            length if isinstance(length, np.ndarray) else np.full(len(self.length), length),
        )

    def rows(self, index: IntArray | slice) -> Axis:
        """Return a selection of rows (indices, a boolean mask or a slice)."""
        return Axis(
            self.slot[index],
            self.slot_step[index],
            self.position[index],
            self.position_step[index],
            self.length[index],
        )

    def between(self, low: IntArray | int, high: IntArray | int) -> Axis:
        """Return the tokens of every row at positions low <= p < high; a length may become 0."""
        # ceiling division: index of the first token at or after each bound
        first = np.clip(-((self.position - low) // self.position_step), 0, self.length)
        end = np.clip(-((self.position - high) // self.position_step), first, self.length)
        return self.take(first, end - first)

    def cut(self, slot: int) -> tuple[Axis, Axis]:
        """Return the tokens of every row before a slot, and those from it on; lengths may become 0."""
        count = np.clip(-((self.slot - slot) // self.slot_step), 0, self.length)
        return self.take(0, count), self.take(count, self.length - count)

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
        return Axis(*(np.concatenate([getattr(p, name) for p in parts]) for name in _SIDES))

    @staticmethod
    def from_runs(runs: IntArray) -> Axis:
        """Return the runs (start, step, length) of a shard, which fill its slots one after the other."""
        start, step, length = runs[:, 0], runs[:, 1], runs[:, 2]
        return Axis(np.cumsum(length) - length, np.ones_like(start), start, step, length)


_SIDES = ("slot", "slot_step", "position", "position_step", "length")  # of `Axis`
_COLUMNS = ("least", "most", "head_in_group", "multiplicity", "weight", "mask")  # of `Tiles`


@dataclass(frozen=True, eq=False)
class Tiles:
    """A table of tiles, one row per tile: a query run, a key run and a band of distances.

    A query attends to a key of its tile if least <= query position - key position <= most. Where a bound cuts
    a tile, both sides have the same position step. If a tile has a mask function, the function also applies
    the band. `rule` is the pattern, bound to its heads: it describes the same pairs and the same
    multiplicities. A kernel may use it instead of the tiles, for example to find a window.

    Raises:
        RingPatternError: a tile without queries or without keys.
    """

    q: Axis
    k: Axis
    least: IntArray  # least and most: the band; +-UNBOUNDED for none
    most: IntArray
    head_in_group: IntArray  # the query head, among those of a K/V head, that the row is for; -1 for all
    multiplicity: IntArray  # m: how many branches attend to each pair; log m is added to the scores
    weight: IntArray  # index into `weights` of the function that multiplies m pair by pair; -1 for none
    mask: IntArray  # index into `masks` of the function that selects the attended pairs; -1 for none
    weights: tuple[Weights, ...] = ()  # functions of query and key positions
    masks: tuple[MaskInside, ...] = ()  # functions of batch size, query positions and key positions
    rule: Any = None  # the `BoundPattern` that the tiles were cut from; None if unknown

    def __post_init__(self) -> None:
        # A kernel divides by the lengths of a tile: aten ends the process at one of no tokens (SIGFPE).
        for side, length in (("queries", self.q.length), ("keys", self.k.length)):
            if len(length) and length.min() < 1:
                row = int(length.argmin())
                raise RingPatternError(
                    f"tiles: expected tokens on each side, got {length[row]} {side} in tile {row} of"
                    f" {len(length)}; drop empty tiles, as Tiles.sides does"
                )

    def __len__(self) -> int:
        return len(self.least)

    @property
    def is_masked(self) -> np.ndarray:
        """Return whether a mask function decides inside each tile."""
        return self.mask >= 0

    @property
    def distances(self) -> tuple[IntArray, IntArray]:
        """Return the least and the greatest distance of a pair of each rectangle, attended or not."""
        return self.q.position - self.k.last_position, self.q.last_position - self.k.position

    @property
    def band(self) -> tuple[IntArray, IntArray]:
        """Return (low, high) of each tile: query i attends to key j inside it if low <= i - j <= high.

        A bound that cuts nothing is 1 - keys, or queries - 1.
        """
        nearest, farthest = self.distances
        first, step = self.q.position - self.k.position, self.q.position_step
        # ceil((least - first) / step); what no bound cuts may have sides of different steps
        low, high = -((first - self.least) // step), (self.most - first) // step
        whole = (nearest >= self.least) & (farthest <= self.most)
        low = np.where(whole, -UNBOUNDED, low)
        high = np.where(whole, UNBOUNDED, high)
        return np.maximum(low, 1 - self.k.length), np.minimum(high, self.q.length - 1)

    @property
    def edges(self) -> IntArray:
        """Return how many bounds of its band cut each tile: 0, 1 or 2."""
        low, high = self.band
        return (low > 1 - self.k.length) * 1 + (high < self.q.length - 1)

    @property
    def pairs(self) -> IntArray:
        """Return the number of attended pairs of each tile; with a mask function, of the whole rectangle.

        int64 while the sum fits; above that Python's integers, in an array of objects.
        """
        (low, high), sides = self.band, (self.q.length, self.k.length)
        if self.q.length.astype(np.float64) @ self.k.length >= MAX_PAIRS:
            low, high = low.astype(object), high.astype(object)
            sides = self.q.length.astype(object), self.k.length.astype(object)
        return _count_pairs_up_to(*sides, high) - _count_pairs_up_to(*sides, low - 1)

    def rows(self, index: IntArray | slice) -> Tiles:
        """Return a selection of rows (indices, a boolean mask or a slice)."""
        columns = {name: getattr(self, name)[index] for name in _COLUMNS}
        return replace(self, q=self.q.rows(index), k=self.k.rows(index), **columns)

    def sides(self, q: Axis, k: Axis) -> Tiles:
        """Return the same rows with other sides, without the rows that are empty now."""
        keep = (q.length > 0) & (k.length > 0)
        if keep.all():
            return replace(self, q=q, k=k)
        return replace(self.rows(keep), q=q.rows(keep), k=k.rows(keep))

    def take(
        self,
        q_first: IntArray | int,
        q_length: IntArray | int,
        k_first: IntArray | int,
        k_length: IntArray | int,
    ) -> Tiles:
        """Return a sub-rectangle of every row, without the rows that are empty now."""
        return self.sides(self.q.take(q_first, q_length), self.k.take(k_first, k_length))

    def for_head(self, head_in_group: int) -> Tiles:
        """Return the tiles of one query head of each group (-1: the tiles unchanged)."""
        if head_in_group < 0:
            return self
        concerned = (self.head_in_group < 0) | (self.head_in_group == head_in_group)
        part = self if concerned.all() else self.rows(concerned)
        return replace(part, head_in_group=np.full(len(part), head_in_group, dtype=np.int64))

    @staticmethod
    def concat(parts: list[Tiles]) -> Tiles:
        """Return the rows of several tables, one after the other."""
        weights = tuple(dict.fromkeys(w for p in parts for w in p.weights))
        masks = tuple(dict.fromkeys(m for p in parts for m in p.masks))
        # Number the functions anew. Index -1 (none) finds the last entry, which is -1.
        weight = [np.array([*map(weights.index, p.weights), -1])[p.weight] for p in parts]
        mask = [np.array([*map(masks.index, p.masks), -1])[p.mask] for p in parts]
        columns = {name: np.concatenate([getattr(p, name) for p in parts]) for name in _COLUMNS}
        columns |= {"weight": np.concatenate(weight), "mask": np.concatenate(mask)}
        q, k = Axis.concat([p.q for p in parts]), Axis.concat([p.k for p in parts])
        rule = next((p.rule for p in parts if p.rule is not None), None)
        return Tiles(q, k, **columns, weights=weights, masks=masks, rule=rule)

    @staticmethod
    def rectangles(
        q_runs: IntArray, k_runs: IntArray, pairs: tuple[IntArray, IntArray] | None = None
    ) -> Tiles:
        """Return whole rectangles (query run x key run) of two shards.

        `pairs` are the indices of the query run and of the key run of each; None for all combinations.
        """
        q, k = Axis.from_runs(q_runs), Axis.from_runs(k_runs)
        nq, nk = len(q_runs), len(k_runs)
        q_index, k_index = pairs or (np.repeat(np.arange(nq), nk), np.tile(np.arange(nk), nq))
        return Tiles.whole(q.rows(q_index), k.rows(k_index))

    @staticmethod
    def whole(q: Axis, k: Axis) -> Tiles:
        """Return rectangles for all heads of the group, in which every pair is attended once."""
        zeros = np.zeros(len(q.slot), dtype=np.int64)
        return Tiles(q, k, zeros - UNBOUNDED, zeros + UNBOUNDED, zeros - 1, zeros + 1, zeros - 1, zeros - 1)


def _count_pairs_up_to(queries: IntArray, keys: IntArray, most: IntArray) -> IntArray:
    """Count pairs of 0 <= i < queries and 0 <= j < keys with i - j <= most."""
    # row i has keys - max(i - most, 0) of them, if that is positive
    whole = np.clip(most + 1, 0, queries)
    last = np.clip(most + keys, whole, queries)
    rows = last - whole
    first = keys - (whole - most)
    return whole * keys + rows * first - rows * (rows - 1) // 2
