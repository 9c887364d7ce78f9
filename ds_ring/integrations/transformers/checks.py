"""Refuse what a transformers model may not ask of attention on a ring.

Every check guards against a silent mistake: a shard taken for the whole sequence, a mask that is dropped, a
loss averaged over local tokens. Errors depend on what all ranks have in common (the model, the call), so that
every rank raises them.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch import nn

from ds_ring.errors import RingConfigError, RingPatternError, RingShapeError
from ds_ring.integrations.deepspeed.batch import cache_in
from ds_ring.integrations.deepspeed.batch_sharding import BatchSharding
from ds_ring.integrations.transformers.compressed import compresses
from ds_ring.integrations.transformers.indexed import selects_blocks, selects_keys
from ds_ring.integrations.transformers.recurrent_parts import (
    attends_recurrently,
    convolves_locally,
    file_is_recurrent,
    is_recurrent,
)
from ds_ring.integrations.transformers.written_out import FAMILIES, family_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


THROUGH_SHARD_BATCH = (
    "take the batch from the loader of ds_ring.initialize or from engine.ring.shard_batch(batch)"
)

# Arguments with which models change what attention computes; a ring has none of it.
_FOREIGN_ARGUMENTS = (
    "softcap",
    "s_aux",
    "sinks",
    "position_bias",
    "head_mask",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
)


def check_model_call(name: str, given: dict[str, Any]) -> None:
    """Refuse what a shard cannot answer. `given` is the call's arguments by name."""
    if given.get("position_ids") is None:
        raise RingShapeError(
            f"{name}: expected position_ids, got none; transformers would number this rank's tokens from 0:"
            f" {THROUGH_SHARD_BATCH}"
        )
    if given.get("attention_mask") is not None:
        raise RingPatternError(
            f"{name}: expected no attention_mask, got one of this rank's tokens; it must be checked against"
            f" the whole sequence: {THROUGH_SHARD_BATCH}"
        )
    if given.get("use_cache") or cache_in(given) is not None:
        raise RingConfigError(
            f"{name}: expected a call without a cache, got one, or use_cache; call model.generate, whose"
            " cache stays on the ring"
        )


def check_length(name: str, given: dict[str, Any], sharding: BatchSharding) -> None:
    """Raise RingShapeError unless the tensors are as long as this rank's part of the sequence."""
    for key in ("input_ids", "inputs_embeds", "position_ids"):
        tensor = given.get(key)
        if tensor is not None and tensor.shape[1] != sharding.local_tokens:
            raise RingShapeError(
                f"{name}: {key}: expected {sharding.local_tokens} local tokens, a rank's part of"
                f" {sharding.layout.tokens}, got {tensor.shape[1]}; {THROUGH_SHARD_BATCH}"
            )


def check_attention_call(name: str, mask: object, dropout: float, kwargs: dict[str, Any]) -> None:
    """Refuse dropout, mask tensors and extra terms of the scores."""
    if dropout:
        raise RingConfigError(
            f"{name}: expected no dropout inside attention, got {dropout}; set attention_dropout to 0 in the"
            " model's configuration (elsewhere it is fine; T5 has one number for all, so set `dropout` of"
            " its attention modules)"
        )
    if mask is not None:
        raise RingPatternError(
            f"{name}: expected no mask tensor, got {type(mask).__name__} {list(getattr(mask, 'shape', []))};"
            " it is written for one rank's tokens: say it with the pattern in the JSON"
        )
    refuse_foreign_arguments(name, kwargs)


def refuse_foreign_arguments(name: str, kwargs: dict[str, Any]) -> None:
    """Refuse terms of the scores that a ring does not compute, and with them the backend's own attention."""
    for key in _FOREIGN_ARGUMENTS:
        if kwargs.get(key) is not None:
            raise RingPatternError(
                f"{name}: expected no {key}, got one, which is not computed here; sinks (s_aux) and softcap"
                ' are computed with "attention": "ring" in the section, without backend="ds_ring"'
            )


# By model type, what a model that writes its attention out does with other tokens.
_OTHERWISE = {
    "cpmant": "it puts a prompt in front of the tokens it is given, and learns a bias for each distance",
    "deberta": "its scores have terms of learned relative positions, whose tables need a gradient",
    "deberta-v2": "its scores have terms of learned relative positions, whose tables need a gradient",
    "mpnet": "its scores have a learned bias for each distance, whose table needs a gradient",
    "prophetnet": "it predicts several tokens ahead, from states that attend by learned bucketed distances",
    "reformer": "it sorts tokens into buckets by random projections, and attends within chunks of them",
    "xlnet": "it adds scores of learned relative positions, for which it shifts the scores of all keys",
}

# Which models a ring can run at all: known from the class and the configuration, before any call.

_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
_LOCAL_LAYERS = {"mlp", "moe"}  # they mix no tokens
_RECURRENT_LAYERS = {
    "linear_attention",
    "conv",
    "hybrid",
    "hybrid_sliding",
}  # recurrent_parts.py knows theirs
_INDEXED_LAYERS = {"indexed_attention", "minimax_m3_sparse"}
_COMPRESSED_LAYERS = {"compressed_sparse_attention", "heavily_compressed_attention"}
# By model type, what an encoder-decoder does with other tokens; of the others no test compares any.
_PAIRS_OTHERWISE = {
    "fsmt": "its attention is written out with tokens before samples, and makes a mask of its own",
    "led": "its encoder attends within windows that it cuts out of the tokens it is given",
    "longt5": "its encoder attends within blocks that it cuts out of the tokens it is given",
    "nllb-moe": "its experts take as many tokens of the sequence as they have room for",
    "pegasus_x": "its encoder attends within blocks that it cuts out of the tokens it is given",
    "prophetnet": "it predicts several tokens ahead, from states that attend by learned bucketed distances",
    "switch_transformers": "its experts take as many tokens of the sequence as they have room for",
}
_BYPASSES = "its attention bypasses transformers' attention interface"

# Settings that no property of the class shows: what the setting does with other tokens, and the value that
# does not.
_SETTINGS: dict[str, tuple[str, str]] = {
    "trigram_input": ("joins each token's embedding with its neighbours'", "False"),  # MobileBERT
    "token_dropout": ("scales embeddings by the share of masked tokens in the sequence", "False"),  # ESM
    "patching_mode": ("groups bytes into patches by what stands before them", "none"),  # BLT
}


def check_class(model: PreTrainedModel, as_is: bool = False) -> None:
    """Refuse models that mix tokens otherwise than by attention, or number them by themselves.

    Args:
        model: a transformers model.
        as_is: its attention is left to the backend "ds_ring", which needs no attention interface.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    family = None if as_is else family_of(model)
    pair = getattr(model.config, "is_encoder_decoder", False)
    if pair and family is None:
        unknown = "no test compares it with one process"
        if model.main_input_name != "input_ids":
            unknown = f"its encoder reads {model.main_input_name} and not tokens"
        why = _PAIRS_OTHERWISE.get(model.config.model_type, unknown)
        raise RingConfigError(
            f"{name} cannot run on a ring: it is an encoder-decoder, and {why}; use BART, Marian or T5, say,"
            " or call ds_ring.ring_attention with key_layout in a model of your own"
        )
    if config.model_type in _OTHERWISE:
        raise RingConfigError(
            f"{name} cannot run on a ring: {_OTHERWISE[config.model_type]}, so each rank would see its own"
            " tokens only; use an attention-only model such as Llama, Qwen, Mistral or GPT-NeoX"
        )
    is_known = family is not None
    if family and family.positions not in ("", *(type(part).__name__ for part in model.modules())):
        raise RingConfigError(
            f"{name} cannot run on a ring: it numbers its tokens otherwise than by {family.positions}, and a"
            " rank knows its own tokens only; choose these positions in the configuration of the model"
            " (TrOCR: use_learned_position_embeddings)"
        )
    if not is_known and not uses_interface(type(model)) and not (as_is and works_as_is(type(model))):
        raise bypasses(type(model))
    recurrent = any(map(is_recurrent, model.modules()))
    types = list(getattr(model.config, "layer_types", None) or ())
    layers = set(types) - _ATTENTION_LAYERS - _LOCAL_LAYERS
    of_types: dict[str, list[nn.Module]] = {}
    for type_, layer in zip(types, _layers(model), strict=False):
        of_types.setdefault(type_, []).append(layer)
    layers -= {
        one
        for one in layers & _RECURRENT_LAYERS
        if all(any(map(is_recurrent, layer.modules())) for layer in of_types.get(one, [model]))
    }
    # Keys that an indexer selects: those of which the ring can read the formula.
    indexed = [
        part
        for part in model.modules()
        if isinstance(getattr(part, "indexer", None), nn.Module) and not hasattr(part, "compress_rate")
    ]
    if indexed and all(selects_keys(one) or selects_blocks(one) for one in indexed) and not as_is:
        layers -= _INDEXED_LAYERS
    compressing = not as_is and any(map(compresses, model.modules()))
    if compressing:
        layers -= _COMPRESSED_LAYERS
    named = ", ".join(sorted(layers))
    reasons = {
        f"its layers {named} mix tokens otherwise than by a fixed pattern of attention": bool(layers),
        # The state of DeepSeek V4's cache holds keys that were compressed.
        "it carries a recurrent state from token to token": model._is_stateful
        and not (recurrent or compressing),
        "it takes no position_ids": not recurrent and not is_known and not takes_positions(type(model)),
        "it convolves tokens": any(
            convolves_locally(part) for layer in _layers(model) for part in layer.modules()
        ),
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
    draws = config.model_type == "big_bird" or (config.model_type == "bigbird_pegasus" and pair)
    if draws and config.attention_type == "block_sparse":
        raise RingConfigError(
            f'{name} cannot run on a ring: config.attention_type "block_sparse" draws blocks of keys at'
            ' random for each length, and a rank knows its own tokens only; set it to "original_full", if'
            " that is your model (up to 1024 tokens BigBird takes it by itself)"
        )
    if config.model_type == "doge" and (as_is or config.is_moe):
        what = (
            "config.is_moe: its router takes the scores of an expert from two tokens, one in each half of the"
            " batch, so no token is routed by itself; set is_moe to False, if that is your model"
            if config.is_moe
            else "its layers add learned terms of keys to the scores, which the backend does not; set"
            ' "attention": "ring" in the section, and build it without attn_implementation'
        )
        raise RingConfigError(f"{name} cannot run on a ring: {what}")
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


def check_adapters(model: nn.Module) -> None:
    """Refuse adapters of peft that count tokens from the end of what they are given."""
    for part in model.modules():
        configs = getattr(part, "peft_config", None)
        for name, config in configs.items() if isinstance(configs, dict) else ():
            if getattr(config, "alora_invocation_tokens", None):
                raise RingConfigError(
                    f"peft: the adapter {name!r} is an activated LoRA (alora_invocation_tokens), which begins"
                    " so many tokens before the end of a sequence, and a rank knows its own tokens only; use"
                    " a plain LoRA"
                )


def bypasses(kind: type[PreTrainedModel]) -> RingConfigError:
    """Return the error of a class that has no attention interface; it says what works instead."""
    if getattr(kind.config_class, "model_type", None) in FAMILIES:
        instead = (
            "What works with it: build it without attn_implementation, and start with"
            " ds_ring.initialize(model=...), which computes its attention on the ring"
        )
    elif works_as_is(kind):
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


def uses_interface(kind: type[PreTrainedModel]) -> bool:
    """Return whether all attention of a class goes through transformers' attention interface."""
    # Models with states do not set the flag, though their attention layers use the interface.
    return kind._supports_attention_backend or (
        file_is_recurrent(kind) and (kind._can_set_attn_implementation() or attends_recurrently(kind))
    )


def works_as_is(kind: type[PreTrainedModel]) -> bool:
    """Return whether the backend can replace its attention: it calls sdpa and is told positions."""
    return bool(kind._supports_sdpa) and not kind._is_stateful and takes_positions(kind)


def takes_positions(kind: type[PreTrainedModel]) -> bool:
    """Return whether the model's forward can be given the positions of its tokens."""
    return "position_ids" in inspect.signature(kind.forward).parameters


def _layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the layers of the language model, without those of an image encoder (which may convolve)."""
    base = getattr(model, model.base_model_prefix, model)
    layers = getattr(base, "layers", getattr(base, "blocks", None))
    return layers if isinstance(layers, nn.ModuleList) else nn.ModuleList()
