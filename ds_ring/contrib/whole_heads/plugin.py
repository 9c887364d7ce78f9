"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.contrib.whole_heads.by_heads import states_by_heads
from ds_ring.plugin import Plugin

PLUGIN = Plugin(
    order=50,
    requires=("layers/scan", "contrib/families/recurrent"),
    session_methods={"states_by_heads": states_by_heads},
)
