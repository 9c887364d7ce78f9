"""Cutting rectangles by a diagonal: every attended pair exactly once, by painting them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_ring import RingPatternError
from ds_ring.masks.joins import within_distances
from ds_ring.masks.tiles import UNBOUNDED, Tiles
from tests.unit.masks.painting import paint

Run = tuple[int, int]  # first position and length

run = st.tuples(st.integers(0, 60), st.integers(1, 40))
a_band = given(
    q=run,
    k=run,
    step=st.sampled_from([1, 1, 2, 3, 8]),
    least=st.one_of(st.just(-UNBOUNDED), st.integers(-70, 70)),
    most=st.one_of(st.just(UNBOUNDED), st.integers(-70, 70)),
)


def in_band(q: Run, k: Run, step: int, least: int, most: int) -> tuple[Tiles, np.ndarray]:
    """The band of two runs of positions as tiles, and the pairs in it by its definition."""
    whole = Tiles.rectangles(np.array([[q[0], step, q[1]]]), np.array([[k[0], step, k[1]]]))
    gap = (q[0] + step * np.arange(q[1]))[:, None] - (k[0] + step * np.arange(k[1]))[None, :]
    return within_distances(whole, least, most), (gap >= least) & (gap <= most)


@a_band
def test_a_band_covers_every_pair_once(q: Run, k: Run, step: int, least: int, most: int) -> None:
    tiles, pairs = in_band(q, k, step, least, most)
    np.testing.assert_array_equal(paint(tiles, q[1], k[1]), pairs)
    assert len(tiles) <= 1, "a band is one tile"


def test_several_runs_are_cut_at_once() -> None:
    q_runs, k_runs = np.array([[0, 1, 5], [20, 1, 7]]), np.array([[3, 1, 9], [12, 1, 9]])
    tiles = within_distances(Tiles.rectangles(q_runs, k_runs), 0, UNBOUNDED)
    q, k = np.r_[0:5, 20:27], np.r_[3:12, 12:21]
    np.testing.assert_array_equal(paint(tiles, 12, 18), k[None, :] <= q[:, None])


@pytest.mark.situation("masks", "a tree whose tile has no queries or no keys")
@pytest.mark.parametrize("side", ["q", "k"])
def test_an_empty_tile_is_refused_where_it_is_made(side: str) -> None:
    """aten ended the process at a tile of no tokens (SIGFPE)."""
    tiles = Tiles.rectangles(np.array([[0, 1, 5], [20, 1, 7]]), np.array([[3, 1, 9]]))
    axis = getattr(tiles, side)
    with pytest.raises(RingPatternError, match=r"tokens on each side, got 0 .* in tile 1 of 2"):
        replace(tiles, **{side: replace(axis, length=axis.length * [1, 0])})
