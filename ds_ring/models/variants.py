"""The table of attention variants: each row is a class, and each variant is a file or a folder.

Delete a variant's file and its row, and models that need it are refused; all others run as before. A row of
another folder is a whole name. Rows are tried in this order: a variant that chooses which sequence a layer
reads comes before those that attend.
"""

from __future__ import annotations

import functools
import pkgutil
from typing import TYPE_CHECKING, Any

from ds_ring.data.engine import is_of_transformers

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from ds_ring.models.variant import Variant

TABLE = (
    "ds_ring.contrib.images.model.ImageModels",
    "ds_ring.contrib.sound.model.SoundModels",
    "ds_ring.contrib.encoder_decoder.variant.EncoderDecoder",
    "ds_ring.contrib.diffusion.gemma.DiffusionGemma",
    "ds_ring.contrib.families.eager_attention.layers.EagerVariant",
    "ds_ring.contrib.families.recurrent.layers.Recurrent",
    "ds_ring.contrib.families.compressed.layers.CompressedAttention",
    "ds_ring.contrib.families.indexed.layers.IndexedKeys",
    "ds_ring.contrib.families.indexed_blocks.layers.IndexedBlocks",
    "ds_ring.contrib.families.latents.layers.LatentLayers",
    "ds_ring.contrib.families.relative_bias.layers.RelativePositionBias",
    "ds_ring.contrib.families.distance_bias.layers.DistanceBias",
    "ds_ring.contrib.families.relative_keys.layers.RelativeKeys",
    "ds_ring.contrib.families.prompt.layers.LearnedPrompt",
    "ds_ring.contrib.families.key_terms.layers.DynamicMask",
    "ds_ring.contrib.families.query_scale.layers.TemperatureTuning",
)


@functools.cache
def variants() -> tuple[Variant, ...]:
    """Return one instance of each row. Imports their files, which import transformers."""
    return tuple(pkgutil.resolve_name(home)() for home in TABLE)


def own_attention(model: nn.Module) -> list[PreTrainedModel]:
    """Return the models inside a model that keep their own attention."""
    return [part for variant in variants() for part in variant.own_attention(model)]


def encoder_modules(model: nn.Module) -> set[int]:
    """Return the identities of the modules inside `model` whose outputs are no shards of the sequence."""
    parts = [part for part in model.modules() if is_of_transformers(part)]
    return {id(module) for part in parts for variant in variants() for module in variant.apart(part)}


def attention_names(model: Any, name: str) -> str | dict[str, str]:
    """Return what to set as a model's attention, so that all of it but `own_attention` gets `name`."""
    found = (variant.attention_names(model, name) for variant in variants())
    return next((names for names in found if names is not None), name)
