"""Tiles: rectangles of the attention matrix, each of a query run and a key run; selected, cut and counted.

A run is an arithmetic progression of tokens. A `Tiles` table is a struct of int64 columns with one row per
tile, so that planning a sequence of a million tokens is vectorised arithmetic. A slot is an index into the
local tensor; a position is an index into the global sequence. There are no empty tiles: a table refuses them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ds_ring.errors import RingPatternError

if TYPE_CHECKING:
    from ds_ring.masks.mask_mod import HeadMask
    from ds_ring.masks.pattern import BoundPattern

MaskFunction = Callable[[Any, Any, Any, Any], Any]  # FlexAttention's mask_mod(batch, head, q_pos, k_pos)
PairMask: TypeAlias = "HeadMask"  # a mask function of single pairs, for some heads; only its file needs torch
UNBOUNDED = 1 << 60  # larger than any distance between positions, small enough not to overflow int64
IntArray = np.ndarray
SlotRanges = np.ndarray  # int64 [n, 2] of [start, end), ascending, disjoint, not touching


def no_slots() -> SlotRanges:
    """Return the empty set."""
    return np.empty((0, 2), dtype=np.int64)


def count_slots(ranges: SlotRanges) -> int:
    """Return number of slots in a set of ranges."""
    return int((ranges[:, 1] - ranges[:, 0]).sum())


def expand_ranges(ranges: SlotRanges) -> IntArray:
    """Return every slot of a set, ascending; int64 [count]."""
    row, within = repeat_rows(ranges[:, 1] - ranges[:, 0])
    return ranges[row, 0] + within


def ranges_of_progressions(rows: IntArray) -> SlotRanges:
    """Return the union of progressions of slots, int64 [n, 3] of (slot, step, length), none of them empty."""
    slot, step, length = rows.T
    # without strides no slot has to be looked at by itself: a union of ranges, which may overlap or touch
    if ((step == 1) | (length == 1)).all():
        order = np.argsort(slot, kind="stable")
        start, farthest = slot[order], np.maximum.accumulate((slot + length)[order])
        begins = np.ones(len(start), dtype=bool)
        # strictly beyond all ends so far: ranges that touch become one
        begins[1:] = start[1:] > farthest[:-1]
        ends = np.append(begins[1:], True)[: len(begins)]
        return np.stack([start[begins], farthest[ends]], axis=1)
    first, last = int(slot.min()), int((slot + (length - 1) * step).max())
    member = np.zeros(last - first + 3, dtype=bool)  # a False on either side
    for start, every, count in np.unique(rows, axis=0).tolist():
        member[start - first + 1 : start - first + 2 + (count - 1) * every : every] = True
    # changes alternate between starts and ends
    return np.flatnonzero(member[1:] != member[:-1]).reshape(-1, 2) + first


def intersect_slots(one: SlotRanges, other: SlotRanges) -> SlotRanges:
    """Return the slots that are in both sets."""
    if not len(one) or not len(other):
        return no_slots()
    if np.array_equal(one, other):
        return one
    # ends first where edges are equal
    edges = np.concatenate([one[:, 1], other[:, 1], one[:, 0], other[:, 0]])
    order = np.argsort(edges, kind="stable")
    # sets that are open at each edge; with both open, the next edge is an end
    depth = np.cumsum(np.where(order < len(one) + len(other), -1, 1))
    inside = np.flatnonzero(depth == 2)
    return np.stack([edges[order[inside]], edges[order[inside + 1]]], axis=1)


def subtract_slots(whole: SlotRanges, part: SlotRanges) -> SlotRanges:
    """Return the slots of `whole` that are not in its subset `part`."""
    # `part` is inside `whole`, so the sorted starts and ends of the remaining ranges pair up
    start = np.sort(np.concatenate([whole[:, 0], part[:, 1]]))
    end = np.sort(np.concatenate([part[:, 0], whole[:, 1]]))
    keep = end > start
    return np.stack([start[keep], end[keep]], axis=1)


def part_of(ranges: SlotRanges, number: int, parts: int) -> SlotRanges:
    """Return part `number` of a set of slots that is cut into `parts` equal parts."""
    lengths = ranges[:, 1] - ranges[:, 0]
    count = int(lengths.sum())
    first, end = count * number // parts, count * (number + 1) // parts
    offset = np.cumsum(lengths) - lengths
    start = ranges[:, 0] + np.clip(first - offset, 0, lengths)
    stop = ranges[:, 0] + np.clip(end - offset, 0, lengths)
    return np.stack([start, stop], axis=1)[stop > start]


def locate_slots(slots: IntArray, within: SlotRanges) -> IntArray:
    """Return the index of each slot in the buffer into which the ranges `within` are packed."""
    lengths = within[:, 1] - within[:, 0]
    offset = np.cumsum(lengths) - lengths
    row = np.searchsorted(within[:, 0], slots, side="right") - 1
    return slots - within[row, 0] + offset[row]


def locate_ranges(ranges: SlotRanges, within: SlotRanges) -> SlotRanges:
    """Do `locate_slots` for whole ranges, each of which is inside one range of `within`."""
    start = locate_slots(ranges[:, 0], within)
    return np.stack([start, start + ranges[:, 1] - ranges[:, 0]], axis=1)


def progressions_at(runs: IntArray, slots: SlotRanges) -> IntArray:
    """Return the positions in some slots of a shard with these runs, as runs in slot order.

    Runs are int64 [n, 3] of (start, step, length), none empty.
    """
    if not len(slots) or not len(runs):
        return np.empty((0, 3), dtype=np.int64)
    ends = np.cumsum(runs[:, 2])
    first = np.searchsorted(ends, slots[:, 0], side="right")
    last = np.searchsorted(ends, slots[:, 1] - 1, side="right")
    count = last - first + 1
    piece, within = repeat_rows(count)
    row = first[piece] + within
    begins = ends[row] - runs[row, 2]
    low, high = np.maximum(slots[piece, 0], begins), np.minimum(slots[piece, 1], ends[row])
    return np.stack([runs[row, 0] + (low - begins) * runs[row, 1], runs[row, 1], high - low], axis=1)


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

    def rows(self, index: IntArray) -> Axis:
        """Return a selection of rows (indices or a boolean mask)."""
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
    a tile, both sides have the same position step. A tile with a mask function has no band of its own: the
    function includes it. `rule` is the pattern, bound to its heads: it describes the same pairs and the same
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
    rule: BoundPattern | None = None  # the pattern that the tiles were cut from, if known

    def __post_init__(self) -> None:
        # A kernel divides by the lengths of a tile: aten ends the process at one of no tokens (SIGFPE).
        for side, length in (("queries", self.q.length), ("keys", self.k.length)):
            if len(length) and length.min() < 1:
                row = int(length.argmin())
                raise RingPatternError(
                    f"tiles: expected at least one token on each side, got {length[row]} {side} in tile {row}"
                    f" of {len(length)}; drop empty tiles, as Tiles.sides does"
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
        """Return the number of attended pairs of each tile; with a mask function, of the whole rectangle."""
        low, high = self.band
        sides = self.q.length, self.k.length
        return _pairs_up_to(*sides, high) - _pairs_up_to(*sides, low - 1)

    def rows(self, index: IntArray) -> Tiles:
        """Return a selection of rows (indices or a boolean mask)."""
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

    def times(self, multiplicity: IntArray | int) -> Tiles:
        """Return the same tiles with the multiplicity of every pair multiplied by a number."""
        return replace(self, multiplicity=self.multiplicity * multiplicity)

    def weighted(self, weights: Weights) -> Tiles:
        """Return the same tiles with the multiplicity of every pair multiplied by `weights` of the pair."""
        assert (self.weight < 0).all(), "expected tiles without weights, got tiles that have some"
        q, k = self.q, self.k
        # a step that is a multiple of the period stays in its residue class
        stays = [(x.position_step % weights.period == 0) | (x.length <= 1) for x in (q, k)]
        varies = ~(stays[0] & stays[1])
        # Where m is constant inside a tile, put it into the multiplicity: the kernel then evaluates no
        # function.
        constant = np.where(varies, 1, weights(q.position, k.position))
        return replace(self.times(constant), weight=np.where(varies, 0, -1), weights=(weights,))

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


def _pairs_up_to(queries: IntArray, keys: IntArray, most: IntArray) -> IntArray:
    """Count pairs of 0 <= i < queries and 0 <= j < keys with i - j <= most."""
    # row i has keys - max(i - most, 0) of them, if that is positive
    whole = np.clip(most + 1, 0, queries)
    last = np.clip(most + keys, whole, queries)
    rows = last - whole
    first = keys - (whole - most)
    return whole * keys + rows * first - rows * (rows - 1) // 2


def repeat_rows(counts: IntArray) -> tuple[IntArray, IntArray]:
    """Return the row index and the number within the row, for rows that are repeated `counts` times."""
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)


@dataclass(frozen=True)
class MaskInside:
    """The mask inside a tile: mask functions of single pairs, within a band of distances."""

    masks: tuple[PairMask, ...]
    least: int
    most: int

    def __call__(self, samples: int, q: Any, k: Any) -> Any:
        """Return bool [len(q), len(k)], with leading batch and head dimensions if they matter."""
        gap = q[:, None] - k[None, :]
        visible = (gap >= self.least) & (gap <= self.most)
        for mask in self.masks:
            visible = visible & mask(samples, q, k)
        return visible
