"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.contrib.families.indexed_blocks.layers import IndexedBlocks
from ds_ring.plugin import Plugin

PLUGIN = Plugin(
    order=34,
    requires=("layers/selection", "layers/sparse"),
    families={"IndexedBlocks": IndexedBlocks},
)
