"""Decide by class and configuration which transformers models a ring can run at all.

Owns what is known before any call: every reason here holds for each batch. What a call may not ask for is in
checks.py. A property of the class decides where there is one; the table `_SETTINGS` is for what
no property tells.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from torch import nn

from ds_ring.errors import RingConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
_TWO_SEQUENCES = "whose cross attention reads a second sequence, and a ring cuts and carries one"
_BYPASSES = "its attention bypasses transformers' attention interface"

# Of a configuration: what the setting does with other tokens, and the value that does not.
_SETTINGS: dict[str, tuple[str, str]] = {
    "trigram_input": ("joins each token's embedding with its neighbours'", "False"),  # MobileBERT
    "token_dropout": ("scales embeddings by the share of masked tokens in the sequence", "False"),  # ESM
    "keep_window_size": ("keeps the keys with the largest learned terms of all keys", "none"),  # Doge
    "patching_mode": ("groups bytes into patches by what stands before them", "none"),  # BLT
}


def check_class(model: PreTrainedModel, as_is: bool = False) -> None:
    """Refuse models that mix tokens otherwise than by attention, or number them by themselves.

    Args:
        model: a transformers model.
        as_is: its attention is left to the backend "ds_ring", which needs no attention interface.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        raise RingConfigError(
            f"{name} cannot run on a ring: it is an encoder-decoder, {_TWO_SEQUENCES}; use a model of one"
            " sequence such as Llama, Qwen or BERT, or call ds_ring.ring_attention in a model of your own:"
            ' queries="replicated" for cross attention to a long sequence'
        )
    if not model._supports_attention_backend and not (as_is and works_as_is(type(model))):
        raise bypasses(type(model))
    layers = set(getattr(model.config, "layer_types", None) or ()) - _ATTENTION_LAYERS
    named = ", ".join(sorted(layers))
    reasons = {
        # Before the state that a cache has: DeepSeek V4's holds keys that were compressed.
        f"its layers {named} mix tokens otherwise than by a fixed pattern of attention": bool(layers),
        "it carries a recurrent state from token to token": model._is_stateful,
        "it takes no position_ids": not takes_positions(type(model)),
        "it convolves tokens": _convolves(model),
    }
    for reason, applies in reasons.items():
        if applies:
            raise RingConfigError(
                f"{name} cannot run on a ring: {reason}, so each rank would see its own"
                " tokens only; use an attention-only model such as Llama, Qwen, Mistral or GPT-NeoX"
            )
    if as_is and getattr(config, "alibi", False):
        raise RingConfigError(
            f"{name} cannot run on a ring: config.alibi adds a distance to each score, which ring attention"
            " does not compute; use a model with rotary or learned positions"
        )
    for key, (what, value) in _SETTINGS.items():
        if getattr(config, key, None):
            raise RingConfigError(
                f"{name} cannot run on a ring: config.{key} {what}, and a rank knows its own tokens only;"
                + (
                    f" set config.{key} to {value}, if that is your model"
                    if value != "none"
                    else " use another model"
                )
            )


def bypasses(kind: type[PreTrainedModel]) -> RingConfigError:
    """Return the error of a class that has no attention interface; it says what works instead."""
    if works_as_is(kind):
        instead = (
            'What works with it: build it with attn_implementation=\'sdpa\', set "attention": "as_is" in the'
            ' "ring_attention" section, and say engine.compile(backend="ds_ring")'
        )
    else:
        instead = 'The backend "ds_ring" cannot rewrite it either: use a model such as Llama, Qwen or Mistral'
    return RingConfigError(
        f"{kind.__name__} cannot run on a ring with attn_implementation='ds_ring': {_BYPASSES}, so each rank"
        f" would see its own tokens only. {instead}"
    )


def works_as_is(kind: type[PreTrainedModel]) -> bool:
    """Return whether the backend can replace its attention: it calls sdpa and is told positions."""
    return bool(kind._supports_sdpa) and not kind._is_stateful and takes_positions(kind)


def takes_positions(kind: type[PreTrainedModel]) -> bool:
    """Return whether the model's forward can be given the positions of its tokens."""
    return "position_ids" in inspect.signature(kind.forward).parameters


def _convolves(model: PreTrainedModel) -> bool:
    """Return whether the language model's layers convolve tokens (a tower for images may)."""
    layers = getattr(getattr(model, model.base_model_prefix, model), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        return False
    return any(isinstance(part, nn.Conv1d) and part.kernel_size != (1,) for part in layers.modules())
