"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.checkpoint.engine import SealedCheckpoints
from ds_ring.plugin import Plugin

PLUGIN = Plugin(
    order=30,
    engine_parts={"checkpoint": SealedCheckpoints},
)
