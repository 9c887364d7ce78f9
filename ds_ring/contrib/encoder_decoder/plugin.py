"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.contrib.encoder_decoder.variant import EncoderDecoder
from ds_ring.plugin import Plugin

PLUGIN = Plugin(
    order=25,
    families={"EncoderDecoder": EncoderDecoder},
)
