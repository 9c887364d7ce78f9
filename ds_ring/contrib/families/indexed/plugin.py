"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.contrib.families.indexed.layers import IndexedKeys
from ds_ring.plugin import Plugin

PLUGIN = Plugin(
    order=33,
    requires=("layers/selection",),
    families={"IndexedKeys": IndexedKeys},
)
