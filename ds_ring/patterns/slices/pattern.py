"""Slices of the attention matrix: rectangles of queries and keys, each full or cut by diagonals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ds_ring.errors import RingPatternError, check_whole_number, shown
from ds_ring.masks.branches import Branch, in_range
from ds_ring.masks.compose import overlapping
from ds_ring.masks.pattern import Pattern, QueryHead
from ds_ring.masks.tiles import UNBOUNDED

SLICE_KINDS = ("full", "causal", "inverse-causal", "bi-causal")
_FORM = '((q_start, q_end), (k_start, k_end), kind), such as ((0, 8), (0, 8), "causal")'
Slice = tuple[tuple[int, int], tuple[int, int], str]


@dataclass(frozen=True)
class Slices(Pattern):
    """Attend to the keys of the slices that a query is in (MagiAttention's q_ranges, k_ranges, types).

    A slice is ((q_start, q_end), (k_start, k_end), kind), ends excluded. Of its rectangle, "full" attends to
    all pairs, "causal" to those on and left of the diagonal through the lower right corner, "inverse-causal"
    to those on and right of the diagonal through the upper left corner, "bi-causal" to those of both.

    Attributes:
        slices: no pair of positions in two of them.

    Raises:
        RingPatternError: none, one of another form, an empty range, an unknown kind, or two that overlap.
    """

    slices: tuple[Slice, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.slices, (list, tuple)) or not self.slices:
            raise RingPatternError(f"Slices: expected a list of {_FORM}, got {shown(self.slices)}")
        checked = tuple(_checked(number, part) for number, part in enumerate(self.slices))
        object.__setattr__(self, "slices", checked)
        branches = self.branches(QueryHead())
        first, second = np.nonzero(np.triu(overlapping(branches, branches), 1))
        if len(first):
            left, right = self.slices[first[0]], self.slices[second[0]]
            raise RingPatternError(
                f"Slices: expected slices without a common pair of positions, got {list(left)} and"
                f" {list(right)}, which overlap; cut one of them"
            )

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        branches = []
        for queries, keys, kind in self.slices:
            # q - k on the diagonal through the lower right corner, and through the upper left one
            least = queries[1] - keys[1] if kind in ("causal", "bi-causal") else -UNBOUNDED
            most = queries[0] - keys[0] if kind in ("inverse-causal", "bi-causal") else UNBOUNDED
            branches.append(Branch(in_range(*queries), in_range(*keys), least, most))
        return tuple(branches)


def _checked(number: int, value: Any) -> Slice:
    """Return a slice of Python ints, or raise RingPatternError."""
    where = f"Slices: slice {number}"
    if not isinstance(value, (list, tuple)) or len(value) != 3:
        raise RingPatternError(f"{where}: expected {_FORM}, got {shown(value)}")
    *ranges, kind = value
    if not isinstance(kind, str) or kind not in SLICE_KINDS:
        raise RingPatternError(f"{where}: kind: expected one of {', '.join(SLICE_KINDS)}, got {shown(kind)}")
    pairs = []
    for name, pair in zip((f"{where}: q_range", f"{where}: k_range"), ranges, strict=True):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise RingPatternError(f"{name}: expected (start, end), got {shown(pair)}")
        start, end = pair
        # a range may begin at 0, which `check_whole_number` refuses
        if not (isinstance(start, int) and not isinstance(start, bool) and start == 0):
            start = check_whole_number(start, f"{name}: start", RingPatternError)
        end = check_whole_number(end, f"{name}: end", RingPatternError)
        if start >= end:
            raise RingPatternError(f"{name}: expected start below end, got {start} and {end}")
        pairs.append((start, end))
    return pairs[0], pairs[1], kind
