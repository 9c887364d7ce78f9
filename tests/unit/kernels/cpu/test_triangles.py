"""A band as rectangles, square triangles and parallelograms: every attended pair exactly once."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ds_ring.kernels.cpu.triangles import triangulated
from ds_ring.masks.joins import within_distances
from ds_ring.masks.tiles import UNBOUNDED, Tiles
from tests.unit.masks.painting import paint
from tests.unit.masks.test_tiles import run


@given(
    q=run,
    k=run,
    step=st.sampled_from([1, 1, 2, 3, 8]),
    least=st.one_of(st.just(-UNBOUNDED), st.integers(-70, 70)),
    most=st.one_of(st.just(UNBOUNDED), st.integers(-70, 70)),
)
def test_triangles_cover_every_pair_once(
    q: tuple[int, int], k: tuple[int, int], step: int, least: int, most: int
) -> None:
    whole = Tiles.rectangles(np.array([[q[0], step, q[1]]]), np.array([[k[0], step, k[1]]]))
    gap = (q[0] + step * np.arange(q[1]))[:, None] - (k[0] + step * np.arange(k[1]))[None, :]
    cut = triangulated(within_distances(whole, least, most))
    np.testing.assert_array_equal(paint(cut, q[1], k[1]), (gap >= least) & (gap <= most))
    (low, high), rows, columns = cut.band, cut.q.length, cut.k.length
    assert (rows == columns)[cut.edges == 1].all() and ((low == 0) | (high == 0))[cut.edges == 1].all()
    assert ((high == 0) & (low == rows - columns))[cut.edges == 2].all()
