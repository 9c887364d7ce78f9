"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.patterns.private.private_layout import candidates, make_private
from ds_ring.plugin import LayoutRow, Plugin

PLUGIN = Plugin(
    order=40,
    layouts={"private": LayoutRow(home=make_private, always=candidates)},
)
