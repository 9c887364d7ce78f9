"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.contrib.sound.model import SoundModels, SoundPart
from ds_ring.plugin import Plugin

PLUGIN = Plugin(
    order=20,
    requires=("contrib/images",),
    model_parts={"sound": SoundPart},
    families={"SoundModels": SoundModels},
)
