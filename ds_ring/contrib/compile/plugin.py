"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.contrib.compile.engine import CompiledEngine
from ds_ring.plugin import Plugin

PLUGIN = Plugin(
    order=10,
    engine_parts={"compile": CompiledEngine},
)
