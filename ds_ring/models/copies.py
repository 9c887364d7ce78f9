"""Run the copy of a transformers model on one process, as the check of the first batch compares it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ds_ring.config.pattern_section import PatternConfig
from ds_ring.config.section import RingConfig
from ds_ring.data.batch import SHARDING
from ds_ring.data.batch_sharding import BatchSharding
from ds_ring.data.engine import is_transformers_model
from ds_ring.data.model_needs import ModelCopies
from ds_ring.errors import RingConfigError
from ds_ring.models.attention_name import NAME
from ds_ring.models.variants import attention_names
from ds_ring.patches import AppliedPatch

log = logging.getLogger(__name__)
_SAME = ("numbering", "latents")  # features of layers whose own code computes the same, whatever the pattern


class TransformersCopies(ModelCopies):
    """Give the copy its own attention where that is the JSON's pattern, else the ring's on one rank."""

    def refuse_pattern(self, model: nn.Module, config: RingConfig, changes: Sequence[AppliedPatch]) -> None:
        """Refuse a pattern that is not the model's own for layers that mix tokens by code beside attention.

        Their own code, which the copy runs, need not know documents or another window.

        Raises:
            RingConfigError: a scan, a convolution, a choice of keys or attention of its own is in the model.
        """
        part = next(filter(is_transformers_model, model.modules()), None)
        if part is None or _is_own_pattern(config, part.config):
            return
        layers = {id(layer): layer for layer in part.modules() if not is_transformers_model(layer)}
        for change in changes:
            feature = change.row.feature
            if id(change.owner) in layers and not feature.startswith(_SAME):
                raise RingConfigError.wrong(
                    "verify_first_batch",
                    "a pattern that the model's own code knows",
                    f"another one, and {type(layers[id(change.owner)]).__name__} ({feature})",
                    "leave it out; `ds-ring check-model` compares packed samples with each document alone",
                )

    def set_attention(self, copy: nn.Module, model: nn.Module, config: RingConfig) -> None:
        """Give the copy its own attention where that is what the JSON asks for, else the ring's.

        A function of the user's that the model was given after the ring's serves the copy, too.
        """
        is_set = False
        for name, part in model.named_modules():
            if is_transformers_model(part):
                implementation = getattr(part.config, "_attn_implementation", None)
                twin: Any = copy.get_submodule(name)
                if implementation not in (NAME, getattr(twin.config, "_attn_implementation", None)):
                    twin.set_attn_implementation(implementation)
                    is_set = True
        if is_set:
            log.info("verify_first_batch: attention is the user's function, so its mask is not compared")
        if is_set or not is_transformers_model(copy):
            return
        if not _is_own_pattern(config, copy.config):
            copy.set_attn_implementation(attention_names(copy, NAME))  # type: ignore[operator]
            log.info("verify_first_batch: the pattern is the JSON's own, so its mask is not compared")
        elif getattr(copy.config, "_attn_implementation", None) == NAME:
            copy.set_attn_implementation("eager")  # type: ignore[operator]

    def arguments(self, copy: nn.Module, kwargs: dict[str, Any], sharding: BatchSharding) -> dict[str, Any]:
        """Return the arguments of a call with all tokens at once."""
        if not is_transformers_model(copy):
            return kwargs
        positions = kwargs.get("position_ids")
        if positions is not None and bool(
            (positions == torch.arange(sharding.layout.tokens, device="cpu")).all()
        ):
            del kwargs["position_ids"]  # the model numbers tokens by itself
        if getattr(copy.config, "_attn_implementation", None) == NAME:
            kwargs[SHARDING] = sharding
        return kwargs | {"use_cache": False}


def _is_own_pattern(config: RingConfig, model: Any) -> bool:
    """Return whether a model with this configuration computes the section's pattern by itself."""
    # whether it is causal, and a window that is the model's, are what its own attention does
    rest = config.pattern.model_copy(update={"causal": True, "window": None})
    return rest == PatternConfig() and config.pattern.window in (None, getattr(model, "sliding_window", None))
