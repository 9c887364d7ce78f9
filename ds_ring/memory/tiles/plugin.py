"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.memory.tiles.keys import TileKeys
from ds_ring.memory.tiles.models_head import TiledLoss
from ds_ring.memory.tiles.models_layers import TiledMLPs
from ds_ring.plugin import Plugin

PLUGIN = Plugin(
    order=30,
    needs={"transformers": ""},
    model_parts={"tiled_loss": TiledLoss, "tiled_mlp": TiledMLPs},
    part_keys={"long_sequence.tiles": TileKeys},
)
