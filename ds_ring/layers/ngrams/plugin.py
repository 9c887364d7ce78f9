"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.layers.ngrams.sharded_tables import ShardedTables
from ds_ring.plugin import Plugin

PLUGIN = Plugin(
    order=40,
    requires=("layers/scan",),
    engine_parts={"sharded_tables": ShardedTables},
)
