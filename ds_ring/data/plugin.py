"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.data.random_draws import RandomDraws
from ds_ring.plugin import Plugin

PLUGIN = Plugin(
    order=60,
    engine_parts={"random_draws": RandomDraws},
)
