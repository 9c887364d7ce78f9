"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.engines.trainers.accelerate import enable_accelerate
from ds_ring.engines.trainers.transformers import enable_trainer_config
from ds_ring.plugin import Plugin

PLUGIN = Plugin(
    order=50,
    trainers={"accelerate": enable_accelerate, "transformers": enable_trainer_config},
)
