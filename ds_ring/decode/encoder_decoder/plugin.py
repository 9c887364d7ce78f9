"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.decode.encoder_decoder.generation import PairGeneration
from ds_ring.plugin import Plugin

PLUGIN = Plugin(
    order=50,
    requires=("decode", "contrib/encoder_decoder"),
    hooks={"PairGeneration": PairGeneration},
)
