"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.contrib.families.prompt.layers import LearnedPrompt
from ds_ring.plugin import Plugin

PLUGIN = Plugin(
    order=39,
    requires=("layers/distance_bias",),
    families={"LearnedPrompt": LearnedPrompt},
)
