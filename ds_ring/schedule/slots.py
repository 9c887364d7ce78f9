"""Sets of slots as ranges: count, subtract, locate in a packed payload. Nothing of attention."""

from __future__ import annotations

import numpy as np

IntArray = np.ndarray
SlotRanges = np.ndarray  # int64 [n, 2] of [start, end), ascending, disjoint, not touching


def no_slots() -> SlotRanges:
    """The empty set."""
    return np.empty((0, 2), dtype=np.int64)


def count_slots(ranges: SlotRanges) -> int:
    """Number of slots in a set of ranges."""
    return int((ranges[:, 1] - ranges[:, 0]).sum())


def expand_ranges(ranges: SlotRanges) -> IntArray:
    """Every slot of a set, ascending; int64 [count]."""
    lengths = ranges[:, 1] - ranges[:, 0]
    first = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) - np.repeat(first - ranges[:, 0], lengths)


def subtract_slots(whole: SlotRanges, part: SlotRanges) -> SlotRanges:
    """The slots of `whole` that are not in its subset `part`."""
    start = np.sort(np.concatenate([whole[:, 0], part[:, 1]]))
    end = np.sort(np.concatenate([part[:, 0], whole[:, 1]]))
    keep = end > start
    return np.stack([start[keep], end[keep]], axis=1)


def locate_slots(slots: IntArray, within: SlotRanges) -> IntArray:
    """Where slots lie once the ranges `within` are packed one after the other."""
    lengths = within[:, 1] - within[:, 0]
    offset = np.cumsum(lengths) - lengths
    row = np.searchsorted(within[:, 0], slots, side="right") - 1
    return slots - within[row, 0] + offset[row]


def locate_ranges(ranges: SlotRanges, within: SlotRanges) -> SlotRanges:
    """`locate_slots` for whole ranges, each of which lies inside one range of `within`."""
    start = locate_slots(ranges[:, 0], within)
    return np.stack([start, start + ranges[:, 1] - ranges[:, 0]], axis=1)
