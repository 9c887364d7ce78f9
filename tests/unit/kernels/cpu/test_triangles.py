"""A band as rectangles, square triangles and parallelograms: every attended pair exactly once."""

from __future__ import annotations

import numpy as np

from ds_ring.kernels.cpu.triangles import triangulated
from tests.unit.masks.painting import paint
from tests.unit.masks.test_tiles import Run, a_band, in_band


@a_band
def test_triangles_cover_every_pair_once(q: Run, k: Run, step: int, least: int, most: int) -> None:
    band, pairs = in_band(q, k, step, least, most)
    cut = triangulated(band)
    np.testing.assert_array_equal(paint(cut, q[1], k[1]), pairs)
    (low, high), rows, columns = cut.band, cut.q.length, cut.k.length
    assert (rows == columns)[cut.edges == 1].all() and ((low == 0) | (high == 0))[cut.edges == 1].all()
    assert ((high == 0) & (low == rows - columns))[cut.edges == 2].all()
