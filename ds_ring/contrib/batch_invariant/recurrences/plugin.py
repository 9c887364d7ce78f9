"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.contrib.batch_invariant.recurrences.steps import in_steps
from ds_ring.plugin import Plugin

PLUGIN = Plugin(
    order=50,
    requires=("contrib/batch_invariant", "layers/serial", "contrib/families/recurrent"),
    invariant_parts={"recurrences": in_steps},
)
