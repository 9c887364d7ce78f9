"""Find the pairs of runs that a branch may join, where two shards have many runs.

[Note: near rows]
Most pairs of runs of two shards have no label in common: with packed documents, a run touches a few documents
of hundreds. A run has an interval of labels (`Primitive.bounds`) and an interval of positions. A branch can
join two runs only if their intervals of labels overlap, and if the positions overlap after those of the
queries are moved by the band. Both sides are sorted once, and the overlapping intervals are found by binary
search. So time grows with the number of runs and of pairs that overlap, not with the product of both sides.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np

from ds_ring.masks.branches import Branch
from ds_ring.masks.slots import IntArray, repeat_rows
from ds_ring.masks.tiles import UNBOUNDED, Axis

Intervals = tuple[IntArray, IntArray]  # of each row, the ends included; empty where the first end is above


RowPairs = tuple[IntArray, IntArray]  # indices of query rows and of key rows, in the order of both


def find_near_rows(branches: Iterable[Branch], q: Axis, k: Axis) -> RowPairs | None:
    """Return the pairs of rows that some branch may join; None for all. See [Note: near rows]."""
    rows_by_key: dict[tuple[object, ...], IntArray] = {}
    count, total = 0, len(q.slot) * len(k.slot)
    for branch in branches:
        ranges = (branch.queries.first, branch.queries.end), (branch.keys.first, branch.keys.end)
        key = (branch.compared_labels, ranges, branch.least, branch.most)
        if key in rows_by_key:
            continue
        overlaps = list(_make_intervals(branch, q, k))
        if not overlaps:
            return None
        # the sides that fewest pairs have in common; the others are compared pair by pair
        counts = [_count_overlaps(*axes) for axes in overlaps]
        best = counts.index(min(counts))
        count += counts[best]
        if 2 * count > total:
            return None
        rows, columns = _find_overlaps(*overlaps.pop(best))
        for (q_least, q_most), (k_least, k_most) in overlaps:
            is_near = (q_least[rows] <= k_most[columns]) & (k_least[columns] <= q_most[rows])
            rows, columns = rows[is_near], columns[is_near]
        rows_by_key[key] = rows * len(k.slot) + columns
    pairs = np.unique(np.concatenate(list(rows_by_key.values())))
    return np.divmod(pairs, len(k.slot))


def _make_intervals(branch: Branch, q: Axis, k: Axis) -> Iterable[tuple[Intervals, Intervals]]:
    """Yield intervals of the query rows and of the key rows; a branch joins only rows where all overlap."""
    outside = []
    for axis, side in ((q, branch.queries), (k, branch.keys)):
        outside.append((axis.position >= side.end) | (axis.last_position < side.first))
    if branch.least > -UNBOUNDED or branch.most < UNBOUNDED or any(mask.any() for mask in outside):
        q_moved = q.position - branch.most, q.last_position - branch.least
        yield _clear_rows(*q_moved, outside[0]), _clear_rows(k.position, k.last_position, outside[1])
    for ours, theirs in branch.compared_labels:
        yield _clear_rows(*ours.bounds(q), outside[0]), _clear_rows(*theirs.bounds(k), outside[1])


def _clear_rows(least: IntArray, most: IntArray, rows: IntArray) -> Intervals:
    """Return the intervals, those of some rows empty."""
    return least, np.where(rows, least - 1, most)


def _count_overlaps(q: Intervals, k: Intervals) -> int:
    """Return how many pairs of rows have intervals that overlap."""
    (q_least, q_most), (k_least, k_most) = ((x[0][x[0] <= x[1]], x[1][x[0] <= x[1]]) for x in (q, k))
    before = np.searchsorted(np.sort(k_most), q_least, side="left")  # end before the interval begins
    begun = np.searchsorted(np.sort(k_least), q_most, side="right")
    return int((begun - before).sum())


def _find_overlaps(q: Intervals, k: Intervals) -> RowPairs:
    """Return the pairs of rows whose intervals overlap."""
    # Of two intervals that overlap, one begins inside the other; if both begin together, count them once.
    q_inside = _begin_inside(k, q, "right")
    k_inside = _begin_inside(q, k, "left")
    return np.concatenate([k_inside[0], q_inside[1]]), np.concatenate([k_inside[1], q_inside[0]])


def _begin_inside(outer: Intervals, inner: Intervals, side: Literal["left", "right"]) -> RowPairs:
    """Return (outer, inner) where the inner interval begins in the outer one; "right": after its start."""
    outers, inners = (np.flatnonzero(x[0] <= x[1]) for x in (outer, inner))
    inners = inners[np.argsort(inner[0][inners], kind="stable")]
    starts = inner[0][inners]
    first = np.searchsorted(starts, outer[0][outers], side=side)
    end = np.searchsorted(starts, outer[1][outers], side="right")
    row, which = repeat_rows(np.maximum(end - first, 0))
    return outers[row], inners[first[row] + which]
