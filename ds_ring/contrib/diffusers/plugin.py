"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.plugin import Plugin

PLUGIN = Plugin(
    order=50,
    requires=("layers/cross", "contrib/ring_flash_attn"),
    needs={"diffusers": ""},
)
