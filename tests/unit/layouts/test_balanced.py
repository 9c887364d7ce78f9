"""Pieces of equal work."""

from __future__ import annotations

import numpy as np
import pytest

from ds_ring import RingLayoutError, make_layout
from ds_ring.layouts.balanced.pieces import _snake


def test_pieces_are_dealt_out_to_and_fro() -> None:
    work = np.arange(16)[::-1]
    assert np.bincount(_snake(work, 4), weights=work).tolist() == [30.0] * 4


def test_it_needs_the_pattern() -> None:
    with pytest.raises(RingLayoutError, match='layout "balanced" needs the pattern'):
        make_layout("balanced", tokens=8, ring_size=2)
