"""Partitions: functions that give every token a label; only tokens with equal labels attend to one another.

Owns the primitives (`Segment`, `Residue`, `Remainder`, and `Table` of ids) and `Partition`, their conjunction
with a range of positions. Each primitive implements `labels` for single positions and `split` for whole runs
(arithmetic progressions of positions). A new primitive is one class here; `branches.py` and `joins.py` need
no change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ds_ring.masks.tiles import UNBOUNDED, Axis, IntArray, repeat_rows

NO_LABEL = -1  # the label of a token that takes no part


class Pieces(NamedTuple):
    """The rows of an axis, cut into pieces of one label each; some pieces may be empty.

    Attributes:
        row: index of the row that each piece was cut from, ascending.
        axis: the pieces.
        label: the label of each piece, never `NO_LABEL`.
    """

    row: IntArray
    axis: Axis
    label: IntArray


class Primitive(ABC):
    """Base of the functions that label positions.

    Subclasses are frozen dataclasses: they compare and hash.
    """

    @abstractmethod
    def labels(self, positions: IntArray) -> IntArray:
        """Return the label of every position; `NO_LABEL` for tokens that take no part."""

    @abstractmethod
    def bounds(self, axis: Axis) -> tuple[IntArray, IntArray]:
        """Return the least and the greatest label that may occur in each row of the axis."""

    @abstractmethod
    def split(self, axis: Axis, least: IntArray, greatest: IntArray) -> Pieces:
        """Cut every row into pieces of one label.

        Args:
            axis: the rows.
            least, greatest: range of labels of interest in each row; pieces outside it may be left out.
        """

    def shift_key(self, start: int, length: int) -> tuple[Any, ...] | None:
        """Return a key of a range of positions: where two are equal, a shift keeps equal labels equal.

        Two ranges of one length with equal keys have the same pairs of equally labelled tokens, relative to
        their starts. None: unknown.
        """
        return None

    @property
    def known_tokens(self) -> tuple[int, ...]:
        """Return the sequence length for which it was made; empty if it fits any length."""
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

    def shift_key(self, start: int, length: int) -> tuple[Any, ...] | None:
        # Inside one segment all tokens have one label, so the start does not matter.
        inside = start // self.length == (start + length - 1) // self.length
        return () if inside else (start % self.length,)


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

    def shift_key(self, start: int, length: int) -> tuple[Any, ...] | None:
        if start // self.length != (start + length - 1) // self.length:
            return (start % self.length,)
        # Inside one segment, only the index of the first token that takes part matters; -1 if there is none.
        # The key has two entries, so it never equals a key of the case above.
        first = (self.offset - start % self.length) % self.rate
        return -1, first if first < length else -1


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
        row, which = repeat_rows(np.maximum(greatest - least + 1, 0))
        label = least[row] + which
        return Pieces(row, axis.rows(row).residue(label, self.rate), label)

    def shift_key(self, start: int, length: int) -> tuple[Any, ...] | None:
        return ()  # a shift renames the labels; equal ones stay equal


@dataclass(frozen=True)
class Table(Primitive):
    """Label every position of one sequence by a table of ids; tokens with a negative id take no part.

    Attributes:
        starts: positions at which the id changes, ascending, the first 0.
        ids: the id from each start to the next; an id may occur several times.
        tokens: length T of the sequence.
    """

    starts: tuple[int, ...]
    ids: tuple[int, ...]
    tokens: int

    @cached_property
    def _stretches(self) -> tuple[IntArray, IntArray, IntArray, bool]:
        """Return start, end and label of every stretch of one id, and whether its label is its number."""
        starts, ids = np.array(self.starts, dtype=np.int64), np.array(self.ids, dtype=np.int64)
        # The label is the number of the id's first stretch: labels ascend as long as no id occurs twice.
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
        # An id that occurs twice may be anywhere in the sequence, so there are no useful bounds.
        if not ascending:
            return np.zeros_like(axis.position), np.full_like(axis.position, len(starts))
        return self._stretch_of(axis.position), self._stretch_of(axis.last_position)

    def split(self, axis: Axis, least: IntArray, greatest: IntArray) -> Pieces:
        starts, ends, labels, ascending = self._stretches
        low, high = self._stretch_of(axis.position), self._stretch_of(axis.last_position)
        if ascending:  # cut each row only at the documents of interest, not at all that it spans
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
    """The positions first <= p < end, labelled by several primitives together.

    Attributes:
        first, end: the range of positions that take part.
        primitives: a token's label is the tuple of their labels. None: all tokens in range have one label.
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

    def holds(self, positions: IntArray) -> IntArray:
        """Return which positions are in the range, bool."""
        return (positions >= self.first) & (positions < self.end)


ALL = Partition()


def in_range(first: int, end: int) -> Partition:
    """Return the partition that gives one label to the tokens first <= p < end."""
    return Partition(first, end)


def labelled(primitive: Primitive) -> Partition:
    """Return the partition of all tokens by the labels of one primitive."""
    return Partition(primitives=(primitive,))
