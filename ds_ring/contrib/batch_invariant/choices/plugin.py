"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.contrib.batch_invariant.choices.chosen import query_by_query
from ds_ring.plugin import Plugin

PLUGIN = Plugin(
    order=51,
    requires=("contrib/batch_invariant", "layers/selection"),
    invariant_parts={"choices": query_by_query},
)
