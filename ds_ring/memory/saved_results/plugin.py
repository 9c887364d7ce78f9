"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.memory.saved_results.keep_results import KeepResults
from ds_ring.plugin import Plugin

PLUGIN = Plugin(
    order=10,
    saved_tensors={"results": KeepResults},
)
