"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.decode.cross.few_queries import FewCrossQueries, block_of_queries
from ds_ring.plugin import Plugin

PLUGIN = Plugin(
    order=50,
    requires=("decode", "layers/cross"),
    hooks={"FewCrossQueries": FewCrossQueries, "block_of_queries": block_of_queries},
)
