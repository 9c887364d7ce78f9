"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.decode.generation import Generation
from ds_ring.plugin import Plugin

PLUGIN = Plugin(
    order=50,
    model_parts={"generation": Generation},
)
