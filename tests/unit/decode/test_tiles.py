"""Positions of replicated queries, and their runs."""

from __future__ import annotations

import numpy as np
import pytest

from ds_ring import Causal, Dilated, Documents, Full, RingShapeError, SlidingWindow, make_layout
from ds_ring.decode.tiles import query_positions, query_runs, replicated_tiles
from ds_ring.masks.pattern import Pattern
from ds_ring.schedule.layout import expand_runs
from tests.unit.masks.painting import paint

LAYOUT = make_layout("zigzag", tokens=40, ring_size=4)


@pytest.mark.parametrize(
    ("positions", "runs"),
    [
        (range(5, 25), [(5, 1, 20)]),
        (range(0, 30, 3), [(0, 3, 10)]),
        ([7], [(7, 1, 1)]),
        ([3, 30], [(3, 1, 1), (30, 1, 1)]),  # two far apart are no progression worth having
        ([0, 20, 21, 22], [(0, 1, 1), (20, 1, 3)]),
        ([5, 5, 4], [(5, 1, 1), (5, 1, 1), (4, 1, 1)]),
    ],
)
def test_runs(positions: list[int], runs: list[tuple[int, int, int]]) -> None:
    assert query_runs(np.array(positions)).tolist() == [list(run) for run in runs]


def test_runs_are_the_positions_in_their_order() -> None:
    generator = np.random.default_rng(0)
    for _ in range(200):
        pieces = [np.arange(*generator.integers([0, 1, 1], [30, 40, 6])) for _ in range(3)]
        positions = np.concatenate([*pieces, generator.integers(0, 40, 5)])
        assert np.array_equal(expand_runs(query_runs(positions)), positions)


def test_positions_that_are_not_given() -> None:
    assert query_positions(Causal(), LAYOUT, 3, None).tolist() == [37, 38, 39]
    assert len(query_positions(Full(), LAYOUT, 100, None)) == 100
    with pytest.raises(RingShapeError, match=r"at most 40 queries .*got 41"):
        query_positions(SlidingWindow(3), LAYOUT, 41, None)


@pytest.mark.parametrize(
    "pattern", [Causal(), SlidingWindow(7), Documents([0] * 15 + [1] * 25), Dilated((8, 16), (1, 2))], ids=str
)
def test_the_tiles_of_all_ranks_are_the_mask(pattern: Pattern) -> None:
    positions = np.array([39, 3, 4, 5, 6, 20, 20, 11])
    for rank in range(4):
        keys = LAYOUT.positions(rank)
        keys = keys[keys >= 0]
        for heads, kv_heads, tiles in replicated_tiles(pattern, LAYOUT, rank, positions.tobytes(), 4, 2):
            for head_in_group in range(2):
                head = range(4)[heads][0] + head_in_group
                q, k = positions[:, None], keys[None, :]
                want = pattern.multiplicity(head, 4, 2, q, k)
                got = paint(tiles, len(positions), len(keys), head_in_group)
                assert np.array_equal(got, want), (rank, kv_heads, head_in_group)


def test_the_last_position_is_that_before_the_number_of_tokens() -> None:
    assert query_positions(Causal(), LAYOUT, 2, np.array([0, 39])).tolist() == [0, 39]
    for outside in (-1, 40):
        with pytest.raises(RingShapeError, match=f"expected 0 to 39, got {outside}"):
            query_positions(Causal(), LAYOUT, 2, np.array([0, outside]))
