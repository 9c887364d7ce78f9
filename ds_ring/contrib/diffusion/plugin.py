"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.contrib.diffusion.batch import DiffusionRows, diffusion_batch
from ds_ring.contrib.diffusion.gemma import DiffusionGemma
from ds_ring.plugin import Plugin

PLUGIN = Plugin(
    order=28,
    requires=("patterns/private",),
    row_kinds={"diffusion_blocks": DiffusionRows},
    session_methods={"diffusion_batch": diffusion_batch},
    families={"DiffusionGemma": DiffusionGemma},
)
