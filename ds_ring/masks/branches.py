"""Branches: the data that every pattern consists of, the labels of positions, and the algebra of branches.

[Note: sum of branches]
A pattern is a sum of branches. A branch gives labels to query positions and to key positions; the number of a
document may be a label. A position without a label is in no pair of the branch. A branch also has a band,
from least to most. Query position q and key position k are a pair of the branch if their labels are equal,
least <= q - k <= most, and all mask functions of the branch (most branches have none) return True. `Causal`
has one branch, with least = 0 and the same label for all positions. The multiplicity m(q, k) is the number
of branches that contain the pair. Kernels add log m to the pair's score, so a pair with m = 0 is masked. In
`Dilated` (LongNet), some pairs have m > 1.

The pattern `a & b` has one branch for each combination of a branch of a and a branch of b. The pattern
`a | b` has the branches of both, after the common pairs are removed from a or from b: no pair counts twice.
Common pairs can be removed only if ranges of positions and bands describe them, and no pair has m > 1. In
other cases `a | b` raises RingPatternError.

A pattern has no other description than its branches. Tiles, multiplicity, the mask in FlexAttention and the
tokens that a rank reads are computed from the branches, for all patterns by the same functions. So a pattern
cannot be right with one kernel and wrong with another.

A primitive is a function that gives labels to positions. A primitive implements `labels` for single
positions, and `bounds` and `split` for whole runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from ds_ring.masks.slots import IntArray, repeat_rows
from ds_ring.masks.tiles import UNBOUNDED, Axis, Tiles

if TYPE_CHECKING:
    from ds_ring.masks.pair_masks import PairMask

LARGEST_LABEL = 1 << 31  # labels are int32 on a device
NO_LABEL = -1  # the label of a token that takes no part


class Pieces(NamedTuple):
    """The rows of an axis, cut into pieces of one label each; some pieces may be empty."""

    row: IntArray  # index of the row from which each piece was cut, ascending
    axis: Axis
    label: IntArray  # never `NO_LABEL`


class Primitive(ABC):
    """Base of the functions that label positions: frozen dataclasses, which compare and hash.

    `labels`, `bounds` and `split` define a primitive. A class may override the other methods, too.

    Attributes:
        tile_kind: (priority, name). Rates of kernels are measured for each kind of tile. The primitive with
            the highest priority names the kind of a pattern.
    """

    tile_kind: ClassVar[tuple[int, str]] = (0, "")

    @abstractmethod
    def labels(self, positions: IntArray) -> IntArray:
        """Return the label of every position; `NO_LABEL` for tokens that take no part."""

    @abstractmethod
    def bounds(self, axis: Axis) -> tuple[IntArray, IntArray]:
        """Return the least and the greatest label that may occur in each row.

        For a row without labels, least may exceed greatest.
        """

    @abstractmethod
    def split(self, axis: Axis, least: IntArray, greatest: IntArray) -> Pieces:
        """Cut every row into pieces of one label; labels outside least .. greatest may be left out."""

    @property
    def only_length(self) -> int | None:
        """Return the only sequence length for which this primitive is defined; None for any."""
        return None

    def is_apart_from(self, primitive: Any) -> bool:
        """Return whether it is known that no token has a label in both primitives."""
        return False

    @classmethod
    def refine_sum(cls, tiles: Tiles, alternatives: list[Any], causal: bool) -> Tiles | None:
        """Cut rectangles by several branches at once. Each branch has one primitive, of this class.

        Each primitive (`alternatives`) labels queries and keys alike. If this method returns None, `joins.py`
        cuts by one branch after the other. If `causal`, the method may already leave out keys after their
        query. The band would drop them anyway.
        """
        return None


Joined = tuple[Primitive, Primitive]  # of queries and of keys: their labels are compared


def each_number(first: IntArray, last: IntArray) -> tuple[IntArray, IntArray]:
    """Return (row, number) for each number from first to last of every row."""
    row, which = repeat_rows(np.maximum(last - first + 1, 0))
    return row, first[row] + which


@dataclass(frozen=True)
class Segment(Primitive):
    """Give position p the label p // length: segments of `length` positions have the same label."""

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
    """A label for each position first <= p < end; other positions have no label.

    The label is the tuple of the labels that the primitives give. Without primitives, all positions in the
    range have the same label.
    """

    first: int = 0
    end: int = UNBOUNDED
    primitives: tuple[Primitive, ...] = ()

    @property
    def is_everywhere(self) -> bool:
        """Return whether the range includes every position."""
        return self.first <= 0 and self.end >= UNBOUNDED

    def __and__(self, partition: Partition) -> Partition:
        first, end = max(self.first, partition.first), min(self.end, partition.end)
        return Partition(first, end, self.primitives + partition.primitives)


ALL = Partition()
in_range = Partition  # in_range(first, end): one label for the tokens first <= p < end


def labelled(primitive: Primitive) -> Partition:
    """Return the partition of all tokens by the labels of one primitive."""
    return Partition(primitives=(primitive,))


@dataclass(frozen=True)
class Branch:
    """The pairs with equal labels, a distance in the band, and all `masks`; see [Note: sum of branches].

    `queries` and `keys` have the same number of primitives. The n-th primitive of `queries` labels queries;
    the n-th primitive of `keys` labels keys. A pair has equal labels if the two labels are equal for every n.
    """

    queries: Partition = ALL
    keys: Partition = ALL
    least: int = -UNBOUNDED  # bounds of query position - key position; +-UNBOUNDED for no bound
    most: int = UNBOUNDED
    masks: tuple[PairMask, ...] = ()  # functions of a pair; a pair is in the branch only if all return True

    def __post_init__(self) -> None:
        assert len(self.queries.primitives) == len(self.keys.primitives), (
            f"{len(self.queries.primitives)} query and {len(self.keys.primitives)} key primitives: {self}"
        )

    @property
    def compared_labels(self) -> tuple[Joined, ...]:
        """Return the pairs (primitive of the queries, primitive of the keys) whose labels are compared."""
        return tuple(zip(self.queries.primitives, self.keys.primitives, strict=True))

    @property
    def distance(self) -> tuple[int, int]:
        """Return the minimum and maximum distance that the band and the ranges allow."""
        least, most = self.least, self.most
        # q - k is smallest for the first query and the last key, largest for the last query and the first key
        if self.keys.end < UNBOUNDED:
            least = max(least, self.queries.first - self.keys.end + 1)
        if self.queries.end < UNBOUNDED:
            most = min(most, self.queries.end - 1 - self.keys.first)
        return least, most

    @property
    def is_empty(self) -> bool:
        """Return whether the ranges and the band leave no pair."""
        least, most = self.distance
        # The ranges need a check of their own: the band of distances of an empty range may be non-empty.
        return least > most or self.queries.first >= self.queries.end or self.keys.first >= self.keys.end

    @property
    def is_causal(self) -> bool:
        """Return whether no query attends to a key after itself."""
        return self.distance[0] >= 0 or any(mask.is_known_causal for mask in self.masks)

    def labels(self, q: IntArray, k: IntArray) -> tuple[IntArray, IntArray]:
        """Return the labels of query positions q and key positions k, int64 [n] and [m].

        Labels of different calls cannot be compared: they are renumbered in each call.
        """
        split = len(q)
        # Renumber both sides in one array, so that equal labels get the same number on both sides.
        inside = [(x >= side.first) & (x < side.end) for x, side in ((q, self.queries), (k, self.keys))]
        both = np.where(np.concatenate(inside), 0, NO_LABEL)
        for ours, theirs in self.compared_labels:
            labels = np.concatenate([ours.labels(q), theirs.labels(k)])
            # mixed radix: two numbers are equal only if the labels of all primitives so far are equal
            base = int(labels.max(initial=0)) + 1
            both = np.where((both >= 0) & (labels >= 0), both * base + labels, NO_LABEL)
            if both.max(initial=0) >= LARGEST_LABEL:
                numbers = np.unique(both, return_inverse=True)[1].reshape(both.shape)
                both = np.where(both < 0, NO_LABEL, numbers)
        return both[:split], both[split:]


def match_labels(primitive: Primitive, least: int = -UNBOUNDED, most: int = UNBOUNDED) -> Branch:
    """Return the branch of the pairs with equal labels by one primitive and a distance in the band."""
    return Branch(labelled(primitive), labelled(primitive), least, most)
