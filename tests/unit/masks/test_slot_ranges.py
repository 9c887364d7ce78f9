"""Sets of slots as ranges, against sets of numbers."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ds_ring.masks.slots import (
    count_slots,
    expand_ranges,
    intersect_slots,
    locate_ranges,
    locate_slots,
    merge_progressions,
    no_slots,
    progressions_at,
    subtract_slots,
)


def as_ranges(slots: set[int]) -> np.ndarray:
    """The maximal ranges of a set, one by one."""
    starts = sorted(s for s in slots if s - 1 not in slots)
    ends = sorted(s + 1 for s in slots if s + 1 not in slots)
    return np.array(list(zip(starts, ends, strict=True)), dtype=np.int64).reshape(-1, 2)


def test_slot_arithmetic() -> None:
    whole = np.array([[0, 10], [20, 30]])
    np.testing.assert_array_equal(
        subtract_slots(whole, np.array([[3, 5], [20, 25]])), [[0, 3], [5, 10], [25, 30]]
    )
    np.testing.assert_array_equal(subtract_slots(whole, whole), np.empty((0, 2)))
    np.testing.assert_array_equal(locate_slots(np.array([0, 9, 20, 29]), whole), [0, 9, 10, 19])
    assert count_slots(whole) == 20
    assert count_slots(no_slots()) == 0 and len(expand_ranges(no_slots())) == 0


@given(whole=st.sets(st.integers(0, 40)), part=st.sets(st.integers(0, 40)))
def test_ranges_are_sets(whole: set[int], part: set[int]) -> None:
    np.testing.assert_array_equal(subtract_slots(as_ranges(whole), as_ranges(part)), as_ranges(whole - part))
    part &= whole
    ranges, inside = as_ranges(whole), as_ranges(part)
    assert expand_ranges(ranges).tolist() == sorted(whole) and count_slots(ranges) == len(whole)
    np.testing.assert_array_equal(subtract_slots(ranges, inside), as_ranges(whole - part))
    if whole:
        packed = locate_slots(np.array(sorted(part), dtype=np.int64), ranges)
        assert packed.tolist() == [sorted(whole).index(slot) for slot in sorted(part)]
        np.testing.assert_array_equal(expand_ranges(locate_ranges(inside, ranges)), packed)


def test_one_range_and_one() -> None:
    whole = np.array([[3, 7]])
    assert count_slots(whole) == 4
    for first, end in itertools.combinations(range(10), 2):
        part = np.array([[first, end]])
        left = as_ranges({3, 4, 5, 6} - set(range(first, end)))
        np.testing.assert_array_equal(subtract_slots(whole, part), left)
        if first >= 3 and end <= 7:
            np.testing.assert_array_equal(locate_ranges(part, whole), part - 3)


@given(one=st.sets(st.integers(0, 40)), other=st.sets(st.integers(0, 40)))
def test_intersections(one: set[int], other: set[int]) -> None:
    found = intersect_slots(as_ranges(one), as_ranges(other))
    np.testing.assert_array_equal(found, as_ranges(one & other))


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 4), st.integers(1, 9)), max_size=6), st.booleans()
)
def test_unions_of_progressions(rows: list[tuple[int, int, int]], stretches: bool) -> None:
    rows = [(slot, 1, length) for slot, _, length in rows] if stretches else rows
    members = {slot + step * index for slot, step, length in rows for index in range(length)}
    found = merge_progressions(np.array(rows, dtype=np.int64).reshape(-1, 3))
    np.testing.assert_array_equal(found, as_ranges(members))


def test_no_slots_and_an_empty_shard_have_no_positions() -> None:
    runs, slots = np.array([[3, 2, 4]]), np.array([[1, 3]])
    assert progressions_at(runs, slots).tolist() == [[5, 2, 2]]
    assert progressions_at(runs[:0], slots).shape == progressions_at(runs, slots[:0]).shape == (0, 3)
