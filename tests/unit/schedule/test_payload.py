"""Packed payloads: tiles over what travels are the tiles over the shard, whatever was left out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_ring import Causal, Full, RingPatternError, SlidingWindow
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.slots import no_slots
from ds_ring.masks.tiles import Tiles
from ds_ring.schedule.head_class import find_reads, tiles_of_payload
from ds_ring.schedule.layout import expand_runs
from ds_ring.schedule.plan import head_classes
from tests.cases import rows_of
from tests.unit.masks.painting import in_order, paint, runs
from tests.unit.masks.test_slot_ranges import as_ranges

PATTERNS: list[Pattern] = [
    Full(),
    Causal(),
    SlidingWindow(9),
    *rows_of(
        "Dilated",
        lambda dilated: {
            "nested": dilated((8, 16, 64), (1, 2, 4)),
            "not nested": dilated((7, 30), (2, 3), False, "zero"),
            "in a window": dilated((32, 128), (2, 4), True, "zero") & SlidingWindow(20),
        },
    ).values(),
]


@given(
    pattern=st.sampled_from(PATTERNS),
    q=runs,
    k=runs,
    more=st.sets(st.integers(0, 47)),
    head=st.integers(0, 3),
)
def test_packing_changes_no_pair(
    pattern: Pattern, q: list[tuple[int, int, int]], k: list[tuple[int, int, int]], more: set[int], head: int
) -> None:
    """Held is what the tiles read and some slots more, which others read."""
    q_runs, k_runs = in_order(q), in_order(k)
    queries, keys = len(expand_runs(q_runs)), len(expand_runs(k_runs))
    for _, bound in head_classes(pattern, 4, 4)[head % 2 :]:
        tiles = bound.tiles(q_runs, k_runs)
        want = paint(tiles, queries, keys)
        held = set(np.flatnonzero(want.any(0)).tolist()) | {slot for slot in more if slot < keys}
        if not held:
            continue
        packed = tiles_of_payload(tiles, as_ranges(held))
        np.testing.assert_array_equal(paint(packed, queries, len(held)), want[:, sorted(held)])


@pytest.mark.parametrize(
    ("run", "held"),
    [
        ((4, 1, 6), [[0, 8]]), ((4, 1, 6), [[5, 20]]), ((0, 1, 9), [[0, 4], [6, 9]]),
        ((0, 3, 3), [[0, 3], [4, 9]]), ((0, 1, 1), np.empty((0, 2))),
    ],
)  # fmt: skip
def test_a_tile_of_keys_that_do_not_travel_is_refused(
    run: tuple[int, int, int], held: list[list[int]]
) -> None:
    """A kernel would get a view of other keys, or of none."""
    first, step, length = run
    tiles = Tiles.rectangles(np.array([[0, 1, 5]]), np.array([[0, 1, 30]]))
    tiles = tiles.sides(tiles.q, tiles.k.take(first, np.array([length]), step))
    with pytest.raises(RingPatternError, match=r"tiles: expected keys among the \d+ slots of the payload"):
        tiles_of_payload(tiles, np.array(held, dtype=np.int64))


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_reads_are_those_of_the_mask(pattern: Pattern) -> None:
    origin = np.array([[3, 2, 20], [60, 1, 25]])
    readers = [np.array([[50 * hop, 1, 30], [50 * hop + 31, 3, 6]]) for hop in range(4)]
    no_runs = np.empty((0, 3), dtype=np.int64)
    valid = len(expand_runs(origin))
    for _, bound in head_classes(pattern, 2, 2):
        reads = find_reads(bound, readers, [no_runs, origin])
        for number, reader in enumerate(readers):
            seen = paint(bound.tiles(reader, origin), len(expand_runs(reader)), valid)
            read = set(np.flatnonzero(seen.any(0)).tolist())
            np.testing.assert_array_equal(reads.get((number, 1), no_slots()), as_ranges(read))
        assert all(shard == 1 for _, shard in reads)
