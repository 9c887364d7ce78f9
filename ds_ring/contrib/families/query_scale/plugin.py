"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.contrib.families.query_scale.layers import TemperatureTuning
from ds_ring.plugin import Plugin

PLUGIN = Plugin(
    order=41,
    families={"TemperatureTuning": TemperatureTuning},
)
