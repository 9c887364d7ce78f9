"""The rows of this folder: the key of rings of several sizes."""

from __future__ import annotations

from ds_ring.data.dynamic_ring.keys import DynamicRingKeys
from ds_ring.plugin import Plugin

PLUGIN = Plugin(order=65, json_keys={"DynamicRingKeys": DynamicRingKeys})
