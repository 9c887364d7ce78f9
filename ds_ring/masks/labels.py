"""Labels: functions that give every token a label; only tokens with equal labels attend to one another.

Owns the primitives (`Segment`, `Residue`, `Remainder`, and `Table` of ids) and `Partition`, their conjunction
with a range of positions. Each primitive implements `labels` for single positions and `split` for whole runs
(arithmetic progressions of positions). A new primitive is one class here; `joins.py` needs no change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ds_ring.masks.slots import IntArray, repeat_rows
from ds_ring.masks.tiles import UNBOUNDED, Axis

LARGEST_LABEL = 1 << 31  # labels are int32 on a device
NO_LABEL = -1  # the label of a token that takes no part


class Pieces(NamedTuple):
    """The rows of an axis, cut into pieces of one label each; some pieces may be empty."""

    row: IntArray  # that each piece was cut from, ascending
    axis: Axis
    label: IntArray  # never `NO_LABEL`


class Primitive(ABC):
    """Base of the functions that label positions: frozen dataclasses, which compare and hash."""

    @abstractmethod
    def labels(self, positions: IntArray) -> IntArray:
        """Return the label of every position; `NO_LABEL` for tokens that take no part."""

    @abstractmethod
    def bounds(self, axis: Axis) -> tuple[IntArray, IntArray]:
        """Return the least and the greatest label that may occur in each row of the axis."""

    @abstractmethod
    def split(self, axis: Axis, least: IntArray, greatest: IntArray) -> Pieces:
        """Cut every row into pieces of one label; labels outside least .. greatest may be left out."""


def _each_number(first: IntArray, last: IntArray) -> tuple[IntArray, IntArray]:
    """Return (row, number) for each number from first to last of every row."""
    row, which = repeat_rows(np.maximum(last - first + 1, 0))
    return row, first[row] + which


@dataclass(frozen=True)
class Segment(Primitive):
    """Label consecutive segments of `length` positions: p // length."""

    length: int

    def labels(self, positions: IntArray) -> IntArray:
        return positions // self.length

    def bounds(self, axis: Axis) -> tuple[IntArray, IntArray]:
        return axis.position // self.length, axis.last_position // self.length

    def split(self, axis: Axis, least: IntArray, greatest: IntArray) -> Pieces:
        row, label = _each_number(least, greatest)
        start = label * self.length
        return Pieces(row, axis.rows(row).between(start, start + self.length), label)


@dataclass(frozen=True)
class Residue(Primitive):
    """Label every `rate`-th token of a segment, from `offset` on, by its segment: a dilation (LongNet).

    The label of position p is p // length if p % length % rate == offset; otherwise p takes no part.
    """

    length: int
    rate: int
    offset: int

    def labels(self, positions: IntArray) -> IntArray:
        held = positions % self.length % self.rate == self.offset
        return np.where(held, positions // self.length, NO_LABEL)

    def bounds(self, axis: Axis) -> tuple[IntArray, IntArray]:
        # These bounds may be too wide: not every segment of the row has a token with this residue.
        return Segment(self.length).bounds(axis)

    def split(self, axis: Axis, least: IntArray, greatest: IntArray) -> Pieces:
        row, inside, label = Segment(self.length).split(axis, least, greatest)
        first = label * self.length + self.offset
        return Pieces(row, inside.residue(first % self.rate, self.rate), label)


@dataclass(frozen=True)
class Remainder(Primitive):
    """Give the same label to tokens whose positions differ by a multiple of `rate`: p % rate."""

    rate: int

    def labels(self, positions: IntArray) -> IntArray:
        return positions % self.rate

    def bounds(self, axis: Axis) -> tuple[IntArray, IntArray]:
        first = axis.position % self.rate
        # A row whose step is a multiple of the rate has one label; any other row may have all labels.
        alike = (axis.position_step % self.rate == 0) | (axis.length == 1)
        return np.where(alike, first, 0), np.where(alike, first, self.rate - 1)

    def split(self, axis: Axis, least: IntArray, greatest: IntArray) -> Pieces:
        row, label = _each_number(least, greatest)
        return Pieces(row, axis.rows(row).residue(label, self.rate), label)


@dataclass(frozen=True)
class Table(Primitive):
    """Label every position of one sequence by a table of ids; tokens with a negative id take no part.

    The ids are the labels, so those of two tables may be compared. They may come in any order.
    """

    starts: tuple[int, ...]  # positions at which the id changes, ascending, the first 0
    ids: tuple[int, ...]  # the id from each start to the next, below `LARGEST_LABEL`; it may occur again
    tokens: int  # length T of the sequence, and the only one that a pattern with this table fits

    @cached_property
    def _stretches(self) -> tuple[IntArray, IntArray, IntArray, bool]:
        """Return start, end and label of every stretch of one id, and whether each label is its number."""
        starts, ids = np.array(self.starts, dtype=np.int64), np.array(self.ids, dtype=np.int64)
        numbered = bool(((ids == np.arange(len(ids))) | (ids < 0)).all())
        return starts, np.append(starts[1:], self.tokens), np.maximum(ids, NO_LABEL), numbered

    def labels(self, positions: IntArray) -> IntArray:
        starts, _, label, _ = self._stretches
        return label[np.searchsorted(starts, positions, side="right") - 1]

    def bounds(self, axis: Axis) -> tuple[IntArray, IntArray]:
        _, _, labels, numbered = self._stretches
        # An id that occurs twice may be anywhere in the sequence, so there are no useful bounds.
        if not numbered:
            return np.zeros_like(axis.position), np.full_like(axis.position, labels.max(initial=0))
        return self._stretch_of(axis.position), self._stretch_of(axis.last_position)

    def split(self, axis: Axis, least: IntArray, greatest: IntArray) -> Pieces:
        starts, ends, labels, numbered = self._stretches
        low, high = self._stretch_of(axis.position), self._stretch_of(axis.last_position)
        if numbered:  # cut each row only at the documents of interest, not at all that it spans
            low, high = np.maximum(low, least), np.minimum(high, greatest)
        row, stretch = _each_number(low, high)
        held = labels[stretch] >= 0
        row, stretch = row[held], stretch[held]
        return Pieces(row, axis.rows(row).between(starts[stretch], ends[stretch]), labels[stretch])

    def is_apart_from(self, other: Table) -> bool:
        """Return whether no token takes part in both tables, which have the same stretches."""
        mine, theirs = np.array(self.ids), np.array(other.ids)
        return self.starts == other.starts and not ((mine >= 0) & (theirs >= 0)).any()

    def _stretch_of(self, positions: IntArray) -> IntArray:
        return np.searchsorted(self._stretches[0], positions, side="right") - 1


@dataclass(frozen=True)
class Partition:
    """The positions first <= p < end, labelled by several primitives together.

    A token's label is the tuple of their labels; without a primitive all tokens in range have one label.
    """

    first: int = 0
    end: int = UNBOUNDED
    primitives: tuple[Primitive, ...] = ()

    @property
    def is_everywhere(self) -> bool:
        """Return whether the range includes every position."""
        return self.first <= 0 and self.end >= UNBOUNDED

    def __and__(self, other: Partition) -> Partition:
        first, end = max(self.first, other.first), min(self.end, other.end)
        return Partition(first, end, self.primitives + other.primitives)


ALL = Partition()
in_range = Partition  # in_range(first, end): one label for the tokens first <= p < end


def labelled(primitive: Primitive) -> Partition:
    """Return the partition of all tokens by the labels of one primitive."""
    return Partition(primitives=(primitive,))
