"""The attention variants of transformers models, which capabilities add (`families` in `plugin.py`).

Delete a variant's folder, and models that need it are refused; all others run as before.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from ds_ring.data.engine import is_transformers_model
from ds_ring.plugin import FAMILIES, load_available

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from ds_ring.models.variant import Variant


@functools.cache
def variants() -> tuple[Variant, ...]:
    """Return one instance of each row. Imports their files, which import transformers."""
    return tuple(variant() for variant in load_available(FAMILIES))


def own_attention(model: nn.Module) -> list[PreTrainedModel]:
    """Return the models inside a model that keep their own attention."""
    return [part for variant in variants() for part in variant.own_attention(model)]


def encoder_modules(model: nn.Module) -> set[int]:
    """Return the identities of the modules inside `model` whose outputs are no shards of the sequence."""
    parts = [part for part in model.modules() if is_transformers_model(part)]
    return {id(module) for part in parts for variant in variants() for module in variant.apart(part)}


def attention_names(model: Any, name: str) -> str | dict[str, str]:
    """Return what to set as a model's attention, so that all of it but `own_attention` gets `name`."""
    choices = (variant.attention_names(model, name) for variant in variants())
    return next((names for names in choices if names is not None), name)
