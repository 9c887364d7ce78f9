"""What the kernel "flex" allocates, by hand."""

from __future__ import annotations

import numpy as np

from ds_ring.kernels.workspace import HopShape, workspace_bytes
from ds_ring.masks.tiles import Tiles


def test_workspace_of_flex_has_the_tables_that_are_kept() -> None:
    tiles, shape = Tiles.rectangles(*(build_runs(n) for n in (8, 4))), HopShape(2, 1, 8, 4, 16, 2, 16)
    tables = (64 << 20) + 4 * (16 + 16) * 2  # and contiguous copies of K and V
    assert workspace_bytes("flex", tiles, shape, False) == tables + 2 * 8 * (16 * (2 + 4) + 24)
    assert workspace_bytes("flex", tiles, shape, True) == tables + (2 * 8 + 2 * 4) * 16 * 2 + 2 * 2 * 8 * 4


def build_runs(length: int) -> np.ndarray:
    return np.array([[0, 1, length]])
