"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.contrib.images.blocks import BlockRows
from ds_ring.contrib.images.model import ImageModels, ImagePart
from ds_ring.plugin import Plugin

PLUGIN = Plugin(
    order=10,
    model_parts={"images": ImagePart},
    row_kinds={"image_block_ids": BlockRows},
    families={"ImageModels": ImageModels},
)
