"""Partitions: what gives every token a label, so that tokens of one label may attend to one another.

Owns the primitives (segments, residues, remainders, tables of ids) and their conjunction with a range of
positions. Each primitive answers twice: `labels` for single tokens and `split` for whole runs, by arithmetic.
A new primitive is one class here; what is derived from it is in `branches.py` and `joins.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ds_ring.masks.slot_ranges import IntArray
from ds_ring.masks.tiles import UNBOUNDED, Axis, repeat_rows

NO_LABEL = -1  # of a token that takes no part


class Pieces(NamedTuple):
    """Hold rows of an axis cut into runs of one label; some may be empty.

    Attributes:
        row: which row each piece was cut from, ascending.
        axis: the pieces.
        label: of each piece, never `NO_LABEL`.
    """

    row: IntArray
    axis: Axis
    label: IntArray


class Primitive(ABC):
    """Label positions by one rule. Subclasses are frozen dataclasses: values that compare and hash."""

    @abstractmethod
    def labels(self, positions: IntArray) -> IntArray:
        """Return the label of every position; `NO_LABEL` for tokens that take no part."""

    @abstractmethod
    def bounds(self, axis: Axis) -> tuple[IntArray, IntArray]:
        """Return the least and the greatest label that may occur in each row."""

    @abstractmethod
    def split(self, axis: Axis, least: IntArray, greatest: IntArray) -> Pieces:
        """Cut every row into runs of one label.

        Args:
            axis: the rows.
            least, greatest: labels of interest in each row; pieces of others may be left out.
        """

    def phase(self, start: int, length: int) -> tuple[Any, ...] | None:
        """Return what the labels of positions start .. start + length - 1 owe to where they begin.

        Two stretches of one length with equal phases have the same tokens with equal labels. None: unknown.
        """
        return None

    @property
    def known_tokens(self) -> tuple[int, ...]:
        """Return the length of sequence that it was made from; empty where it goes with any."""
        return ()


@dataclass(frozen=True)
class Segment(Primitive):
    """Label consecutive segments of `length` positions: p // length."""

    length: int

    def labels(self, positions: IntArray) -> IntArray:
        return positions // self.length

    def bounds(self, axis: Axis) -> tuple[IntArray, IntArray]:
        return axis.position // self.length, axis.last_position // self.length

    def split(self, axis: Axis, least: IntArray, greatest: IntArray) -> Pieces:
        row, which = repeat_rows(np.maximum(greatest - least + 1, 0))
        label = least[row] + which
        start = label * self.length
        return Pieces(row, axis.rows(row).between(start, start + self.length), label)

    def phase(self, start: int, length: int) -> tuple[Any, ...] | None:
        # inside one segment all tokens have one label, wherever it begins
        inside = start // self.length == (start + length - 1) // self.length
        return () if inside else (start % self.length,)


@dataclass(frozen=True)
class Residue(Primitive):
    """Label each `rate`-th token of a segment from `offset`: p // length if p % length % rate == offset."""

    length: int
    rate: int
    offset: int

    def labels(self, positions: IntArray) -> IntArray:
        held = positions % self.length % self.rate == self.offset
        return np.where(held, positions // self.length, NO_LABEL)

    def bounds(self, axis: Axis) -> tuple[IntArray, IntArray]:
        # bounds may be too wide: not every segment has a token of the residue in the row
        return Segment(self.length).bounds(axis)

    def split(self, axis: Axis, least: IntArray, greatest: IntArray) -> Pieces:
        row, inside, label = Segment(self.length).split(axis, least, greatest)
        first = label * self.length + self.offset
        return Pieces(row, inside.residue(first % self.rate, self.rate), label)

    def phase(self, start: int, length: int) -> tuple[Any, ...] | None:
        """Return where its segments begin; inside one segment, where its first token is."""
        if start // self.length != (start + length - 1) // self.length:
            return (start % self.length,)
        # index of the first token that takes part, -1 for none; two entries, so never equal to the case above
        first = (self.offset - start % self.length) % self.rate
        return -1, first if first < length else -1


@dataclass(frozen=True)
class Remainder(Primitive):
    """Label alike tokens that stand a multiple of `rate` apart: p % rate."""

    rate: int

    def labels(self, positions: IntArray) -> IntArray:
        return positions % self.rate

    def bounds(self, axis: Axis) -> tuple[IntArray, IntArray]:
        first = axis.position % self.rate
        # such a row has one label; any other may have all of them
        alike = (axis.position_step % self.rate == 0) | (axis.length == 1)
        return np.where(alike, first, 0), np.where(alike, first, self.rate - 1)

    def split(self, axis: Axis, least: IntArray, greatest: IntArray) -> Pieces:
        row, which = repeat_rows(np.maximum(greatest - least + 1, 0))
        label = least[row] + which
        return Pieces(row, axis.rows(row).residue(label, self.rate), label)

    def phase(self, start: int, length: int) -> tuple[Any, ...] | None:
        return ()  # a shift renames the labels and parts no two tokens


@dataclass(frozen=True)
class Table(Primitive):
    """Hold an id for every position of one sequence, as stretches of equal ids; negative ids take no part.

    Attributes:
        starts: positions at which an id begins, ascending, the first 0.
        ids: id of each of these stretches; one id may have several.
        tokens: length T of the sequence.
    """

    starts: tuple[int, ...]
    ids: tuple[int, ...]
    tokens: int

    @cached_property
    def _stretches(self) -> tuple[IntArray, IntArray, IntArray, bool]:
        """Return start, end and label of every stretch; True if the label is the stretch's number for all."""
        starts, ids = np.array(self.starts, dtype=np.int64), np.array(self.ids, dtype=np.int64)
        # An id is named after its first stretch, so that labels ascend wherever no id comes back.
        _, first, number = np.unique(ids, return_index=True, return_inverse=True)
        label = first[number]
        ascending = bool((label == np.arange(len(label))).all())
        return starts, np.append(starts[1:], self.tokens), np.where(ids < 0, NO_LABEL, label), ascending

    @property
    def known_tokens(self) -> tuple[int, ...]:
        return (self.tokens,)

    def labels(self, positions: IntArray) -> IntArray:
        starts, _, label, _ = self._stretches
        return label[np.searchsorted(starts, positions, side="right") - 1]

    def bounds(self, axis: Axis) -> tuple[IntArray, IntArray]:
        starts, _, _, ascending = self._stretches
        # an id that comes back may be anywhere: no bounds are known
        if not ascending:
            return np.zeros_like(axis.position), np.full_like(axis.position, len(starts))
        return self._stretch_of(axis.position), self._stretch_of(axis.last_position)

    def split(self, axis: Axis, least: IntArray, greatest: IntArray) -> Pieces:
        starts, ends, labels, ascending = self._stretches
        low, high = self._stretch_of(axis.position), self._stretch_of(axis.last_position)
        if ascending:  # or every row would be cut at all documents that it spans
            low, high = np.maximum(low, least), np.minimum(high, greatest)
        row, which = repeat_rows(np.maximum(high - low + 1, 0))
        stretch = low[row] + which
        held = labels[stretch] >= 0
        row, stretch = row[held], stretch[held]
        return Pieces(row, axis.rows(row).between(starts[stretch], ends[stretch]), labels[stretch])

    def _stretch_of(self, positions: IntArray) -> IntArray:
        return np.searchsorted(self._stretches[0], positions, side="right") - 1


@dataclass(frozen=True)
class Partition:
    """Hold a conjunction: the positions first <= p < end, labelled by all primitives together.

    Attributes:
        first, end: the range of positions that take part.
        primitives: their labels, together, are a token's label; none: all tokens in range have the same.
    """

    first: int = 0
    end: int = UNBOUNDED
    primitives: tuple[Primitive, ...] = ()

    @property
    def is_everywhere(self) -> bool:
        """Return whether no position is out of range."""
        return self.first <= 0 and self.end >= UNBOUNDED

    def __and__(self, other: Partition) -> Partition:
        first, end = max(self.first, other.first), min(self.end, other.end)
        return Partition(first, end, self.primitives + other.primitives)

    def holds(self, positions: IntArray) -> IntArray:
        """Return which positions are in range, bool."""
        return (positions >= self.first) & (positions < self.end)


ALL = Partition()


def in_range(first: int, end: int) -> Partition:
    """Return the partition of the tokens first <= p < end, all with the same label."""
    return Partition(first, end)


def labelled(primitive: Primitive) -> Partition:
    """Return the partition of all tokens by one primitive."""
    return Partition(primitives=(primitive,))
