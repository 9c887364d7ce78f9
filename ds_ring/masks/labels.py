"""Labels: functions that give every token a label; only tokens with equal labels attend to one another.

Owns the primitives (`Segment`, `Remainder`) and `Partition`, their conjunction with a range of positions.
Each primitive implements `labels` for single positions and `split` for whole runs (arithmetic progressions of
positions). A new primitive is one class, in any folder; `joins.py` needs no change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ds_ring.masks.slots import IntArray, repeat_rows
from ds_ring.masks.tiles import UNBOUNDED, Axis, Tiles

LARGEST_LABEL = 1 << 31  # labels are int32 on a device
NO_LABEL = -1  # the label of a token that takes no part


class Pieces(NamedTuple):
    """The rows of an axis, cut into pieces of one label each; some pieces may be empty."""

    row: IntArray  # that each piece was cut from, ascending
    axis: Axis
    label: IntArray  # never `NO_LABEL`


class Primitive(ABC):
    """Base of the functions that label positions: frozen dataclasses, which compare and hash.

    `labels`, `bounds` and `split` define a primitive. Some override what is below them.

    Attributes:
        tile_kind: rank and name of the kind of tiles by which rates of kernels are measured; of several
            primitives in a pattern the highest rank decides.
    """

    tile_kind: ClassVar[tuple[int, str]] = (0, "")

    @abstractmethod
    def labels(self, positions: IntArray) -> IntArray:
        """Return the label of every position; `NO_LABEL` for tokens that take no part."""

    @abstractmethod
    def bounds(self, axis: Axis) -> tuple[IntArray, IntArray]:
        """Return the least and the greatest label that may occur in each row of the axis."""

    @abstractmethod
    def split(self, axis: Axis, least: IntArray, greatest: IntArray) -> Pieces:
        """Cut every row into pieces of one label; labels outside least .. greatest may be left out."""

    @property
    def only_length(self) -> int | None:
        """Return the only sequence length for which it is defined; None for any."""
        return None

    def is_apart_from(self, other: Any) -> bool:
        """Return whether it is known that no token takes part in both."""
        return False

    @classmethod
    def refine_sum(cls, tiles: Tiles, alternatives: list[Any], causal: bool) -> Tiles | None:
        """Cut rectangles by a sum of primitives of this class that label queries and keys alike.

        None: as `joins.py` does, one alternative after the other. If `causal`, keys after their query may be
        left out: the band will drop them.
        """
        return None

    @classmethod
    def near_pairs(cls, joined: set[tuple[Joined, ...]], q_runs: IntArray, k_runs: IntArray) -> Pairs | None:
        """Return the pairs of runs (start, step, length) that some conjunction may join; None: all pairs."""
        return None


Joined = tuple[Primitive, Primitive]  # of queries and of keys: their labels are compared
Pairs = tuple[IntArray, IntArray]  # indices of query runs and of key runs, in the order of both


def each_number(first: IntArray, last: IntArray) -> tuple[IntArray, IntArray]:
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
        row, label = each_number(least, greatest)
        start = label * self.length
        return Pieces(row, axis.rows(row).between(start, start + self.length), label)


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
        row, label = each_number(least, greatest)
        return Pieces(row, axis.rows(row).residue(label, self.rate), label)


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
