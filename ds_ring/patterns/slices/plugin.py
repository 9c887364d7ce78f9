"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.patterns.slices.keys import SliceKeys
from ds_ring.plugin import Plugin

PLUGIN = Plugin(
    order=20,
    pattern_keys={"slices": SliceKeys},
)
