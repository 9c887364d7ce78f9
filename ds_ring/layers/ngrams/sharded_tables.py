"""Keep an engine's parameters out of tables whose rows are sharded over the ranks of a sequence.

DeepSpeed gives all ranks the parameters of rank 0, and each the mean of their gradients. A rank's shard of a
table is no such parameter (`layers/ngrams/sharded_rows.py`).
"""

from __future__ import annotations

from typing import Any

from ds_ring.data.engine_part import EnginePart, EngineStart
from ds_ring.layers.ngrams.sharded_rows import refuse_as_tables


class ShardedTables(EnginePart):
    """Refuse `sharded_rows` of a parameter that an engine trains."""

    def patches(self, start: EngineStart) -> list[Any]:
        """Note the engine's parameters; nothing of the engine is changed."""
        refuse_as_tables(start.engine.module.parameters())
        return []
