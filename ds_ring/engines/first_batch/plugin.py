"""The rows of this folder: the key of the comparison of the first step."""

from __future__ import annotations

from ds_ring.engines.first_batch.keys import FirstBatchKeys
from ds_ring.plugin import Plugin

PLUGIN = Plugin(order=70, json_keys={"FirstBatchKeys": FirstBatchKeys})
