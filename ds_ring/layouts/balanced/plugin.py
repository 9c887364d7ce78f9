"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.layouts.balanced.pieces import even_pieces, make_balanced
from ds_ring.plugin import LayoutRow, Plugin

PLUGIN = Plugin(
    order=15,
    layouts={"balanced": LayoutRow(home=make_balanced, if_uneven=even_pieces)},
)
