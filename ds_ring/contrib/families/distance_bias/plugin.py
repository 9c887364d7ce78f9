"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.contrib.families.distance_bias.layers import DistanceBias
from ds_ring.plugin import Plugin

PLUGIN = Plugin(
    order=37,
    requires=("layers/distance_bias",),
    families={"DistanceBias": DistanceBias},
)
