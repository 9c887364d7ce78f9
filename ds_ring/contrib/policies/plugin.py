"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.contrib.policies.trees import TreeRows, tree_batch
from ds_ring.plugin import Plugin

PLUGIN = Plugin(
    order=5,
    row_kinds={"tree_ends": TreeRows},
    session_methods={"tree_batch": tree_batch},
)
