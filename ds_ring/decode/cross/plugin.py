"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.decode.cross.few_queries import FewCrossQueries, make_query_blocks
from ds_ring.plugin import Plugin

PLUGIN = Plugin(
    order=50,
    requires=("decode", "layers/cross"),
    hooks={"FewCrossQueries": FewCrossQueries, "make_query_blocks": make_query_blocks},
)
