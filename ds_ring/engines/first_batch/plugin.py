"""The rows of this folder: the comparison of the first step, and its key."""

from __future__ import annotations

from ds_ring.engines.first_batch.first_batch import FirstBatch
from ds_ring.engines.first_batch.keys import FirstBatchKeys
from ds_ring.plugin import Plugin

PLUGIN = Plugin(
    order=70,
    needs={"deepspeed": ""},
    json_keys={"FirstBatchKeys": FirstBatchKeys},
    hooks={"FirstBatch": FirstBatch},
)
