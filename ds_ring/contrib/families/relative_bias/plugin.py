"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.contrib.families.relative_bias.layers import RelativePositionBias
from ds_ring.plugin import Plugin

PLUGIN = Plugin(
    order=36,
    families={"RelativePositionBias": RelativePositionBias},
)
