"""Slots: sets of indices into a rank's shard, as ranges. Plans and steps name tokens by them.

Most sets of a plan are one range, and numpy takes microseconds for any array: `item` reads such a set.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

IntArray = np.ndarray
SlotRanges = np.ndarray  # int64 [n, 2] of [start, end), ascending, disjoint, not touching


def no_slots() -> SlotRanges:
    """Return the empty set."""
    return np.empty((0, 2), dtype=np.int64)


def count_slots(ranges: SlotRanges) -> int:
    """Return number of slots in a set of ranges."""
    if len(ranges) == 1:
        return int(ranges.item(1) - ranges.item(0))
    return int((ranges[:, 1] - ranges[:, 0]).sum())


def expand_ranges(ranges: SlotRanges) -> IntArray:
    """Return every slot of a set, ascending; int64 [count]."""
    row, within = repeat_rows(ranges[:, 1] - ranges[:, 0])
    return ranges[row, 0] + within


def merge_progressions(rows: IntArray) -> SlotRanges:
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


def ranges_by_set(rows: IntArray, numbers: IntArray) -> dict[int, SlotRanges]:
    """Return the union of the progressions that have the same number: one set of slots for each number."""
    if not len(rows):
        return {}
    order = np.argsort(numbers, kind="stable")
    rows, numbers = rows[order], numbers[order]
    firsts = np.flatnonzero(np.append(True, numbers[1:] != numbers[:-1]))
    names = numbers[firsts].tolist()
    if ((rows[:, 1] == 1) | (rows[:, 2] == 1)).all():
        which = np.repeat(np.arange(len(firsts)), np.diff(firsts, append=len(rows)))
        width = int((rows[:, 0] + rows[:, 2]).max()) + 1
        rows = np.stack([rows[:, 0] + which * width, rows[:, 1], rows[:, 2]], axis=1)
        return dict(zip(names, split_sets(merge_progressions(rows), width, len(firsts)), strict=True))
    return dict(zip(names, map(merge_progressions, np.split(rows, firsts[1:])), strict=True))


def join_sets(sets: Sequence[SlotRanges], width: int) -> SlotRanges:
    """Return several sets as one: slot s of set i becomes i * width + s. `width` is above every slot."""
    lengths = [len(slots) for slots in sets]
    return np.concatenate([no_slots(), *sets]) + width * np.repeat(np.arange(len(sets)), lengths)[:, None]


def split_sets(ranges: SlotRanges, width: int, count: int) -> list[SlotRanges]:
    """Return the sets that `join_sets` joined."""
    number = ranges[:, 0] // width
    local_ranges = ranges - (number * width)[:, None]
    bounds = np.searchsorted(number, np.arange(count + 1)).tolist()
    return [local_ranges[slice(*pair)] for pair in itertools.pairwise(bounds)]


def count_sets(ranges: SlotRanges, width: int, count: int) -> IntArray:
    """Return the number of slots of each of the sets that `join_sets` joined; int64 [count]."""
    total = np.bincount(ranges[:, 0] // width, weights=ranges[:, 1] - ranges[:, 0], minlength=count)
    return total.astype(np.int64)


def intersect_slots(first: SlotRanges, second: SlotRanges) -> SlotRanges:
    """Return the slots that are in both sets."""
    if not len(first) or not len(second):
        return no_slots()
    if first is second or np.array_equal(first, second):
        return first
    # ends first where edges are equal
    edges = np.concatenate([first[:, 1], second[:, 1], first[:, 0], second[:, 0]])
    order = np.argsort(edges, kind="stable")
    # sets that are open at each edge; with both open, the next edge is an end
    depth = np.cumsum(np.where(order < len(first) + len(second), -1, 1))
    inside = np.flatnonzero(depth == 2)
    return np.stack([edges[order[inside]], edges[order[inside + 1]]], axis=1)


def subtract_slots(whole: SlotRanges, part: SlotRanges) -> SlotRanges:
    """Return the slots of `whole` that are not in `part`."""
    if not len(part):
        return whole
    if len(whole) == len(part) == 1:
        (start, end), (first, last) = whole.tolist()[0], part.tolist()[0]
        sides = (start, min(first, end)), (max(last, start), end)
        return np.array([side for side in sides if side[1] > side[0]], dtype=np.int64).reshape(-1, 2)
    # A slot of `whole` alone is between a start and an end; one of `part` alone between an end and a start.
    start = np.sort(np.concatenate([whole[:, 0], part[:, 1]]))
    end = np.sort(np.concatenate([part[:, 0], whole[:, 1]]))
    keep = end > start
    return np.stack([start[keep], end[keep]], axis=1)


def select_part(ranges: SlotRanges, number: int, parts: int) -> SlotRanges:
    """Return part `number` of a set of slots that is cut into `parts` equal parts."""
    if parts == 1:
        return ranges
    lengths = ranges[:, 1] - ranges[:, 0]
    count = int(lengths.sum())
    first, end = count * number // parts, count * (number + 1) // parts
    offset = np.cumsum(lengths) - lengths
    start = ranges[:, 0] + np.clip(first - offset, 0, lengths)
    stop = ranges[:, 0] + np.clip(end - offset, 0, lengths)
    return np.stack([start, stop], axis=1)[stop > start]


def locate_slots(slots: IntArray, within: SlotRanges) -> IntArray:
    """Return the index of each slot in the buffer into which the ranges `within` are packed."""
    starts, ends = within[:, 0], within[:, 1]
    row = np.searchsorted(starts, slots, side="right") - 1
    return slots + (np.cumsum(ends - starts) - ends)[row]


def locate_ranges(ranges: SlotRanges, within: SlotRanges) -> SlotRanges:
    """Do `locate_slots` for whole ranges, each of which is inside one range of `within`."""
    if len(within) == 1:
        return ranges - within.item(0)
    start = ranges[:, 0]
    return ranges + (locate_slots(start, within) - start)[:, None]


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


def repeat_rows(counts: IntArray) -> tuple[IntArray, IntArray]:
    """Return the row index and the number within the row, for rows that are repeated `counts` times."""
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
