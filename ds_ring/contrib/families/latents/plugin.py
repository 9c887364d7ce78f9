"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.contrib.families.latents.keys import LatentKeys
from ds_ring.contrib.families.latents.layers import LatentLayers
from ds_ring.plugin import Plugin

PLUGIN = Plugin(
    order=35,
    requires=("layers/latents",),
    families={"LatentLayers": LatentLayers},
    json_keys={"LatentKeys": LatentKeys},
)
