"""Refuse what a transformers model may not ask of attention on a ring.

Every check guards against a silent mistake: a shard taken for the whole sequence, a mask that is dropped, a
loss averaged over local tokens. Errors depend on what all ranks have in common (the model, the call), so that
every rank raises them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import TransformersKwargs

from ds_ring.compat.transformers import HAS_RECURRENT_FUNCTIONS, RECURRENT_SINCE
from ds_ring.data.batch import cache_in
from ds_ring.data.batch_sharding import BatchSharding
from ds_ring.data.loss import ITEMS, check_items
from ds_ring.error_origins import is_inside
from ds_ring.errors import RingConfigError, RingPatternError, RingShapeError
from ds_ring.models.attention_name import NAME
from ds_ring.models.variant import (
    CONVOLUTION,
    INTERFACE,
    POSITIONS,
    STATE,
    TWO_SEQUENCES,
    AttachRequest,
)
from ds_ring.models.variants import variants

if TYPE_CHECKING:
    from transformers import PreTrainedModel


UNMODIFIED = "sdpa"  # the attention that the backend "ds_ring" rewrites in a graph
THROUGH_SHARD_BATCH = (
    "take the batch from the loader of ds_ring.initialize or from engine.ring.shard_batch(batch)"
)


def check_model_call(name: str, arguments: dict[str, Any]) -> None:
    """Refuse what a shard cannot answer. `arguments` are the call's, by name."""
    if arguments.get("position_ids") is None:
        wrong = "transformers would number this rank's tokens from 0"
        raise RingShapeError(f"{name}: expected position_ids, got none; {wrong}: {THROUGH_SHARD_BATCH}")
    if arguments.get("attention_mask") is not None:
        raise RingPatternError(f"{name}: expected no attention_mask, got a local one; {THROUGH_SHARD_BATCH}")
    if cache_in(arguments) is not None:
        raise RingConfigError(f"{name}: expected a call without a cache, got one; call model.generate")
    if arguments.get("use_cache"):
        raise RingConfigError(
            f"{name}: expected use_cache=False outside training, got True; call model.generate"
        )
    keep = arguments.get("logits_to_keep")
    if isinstance(keep, Tensor) or keep:
        got = list(keep.shape) if isinstance(keep, Tensor) else keep
        raise RingConfigError.wrong(
            f"{name}: logits_to_keep", "none on a shard, whose last tokens are not the sequence's", got,
            "leave it out, and take tokens of engine.ring.gather(output.logits)",
        )  # fmt: skip
    if arguments.get("output_attentions"):
        raise refuse_weights(name)
    check_items(name, arguments.get(ITEMS))


LOST_GRADIENTS = (
    "layers take keys and values of earlier ones, whose gradients reentrant checkpointing cuts, as in one"
    " process; set gradient_checkpointing_kwargs={'use_reentrant': False}"
)


def loses_gradients(model: nn.Module) -> bool:
    """Return whether reentrant checkpoints cut gradients of what layers hand to later ones.

    The first run of a reentrant region has no gradients, so neither have the keys that later layers read.
    """
    shares = any(getattr(module, "is_kv_shared_layer", False) for module in model.modules())
    functions = [vars(module).get("_gradient_checkpointing_func") for module in model.modules()]
    plain = [
        getattr(function, "plain", function) for function in functions
    ]  # without what offloads checkpoints
    return shares and any(getattr(function, "keywords", {}).get("use_reentrant") for function in plain)


def refuse_weights(name: str) -> RingConfigError:
    """Return the error for attention weights, which no rank keeps."""
    got, advice = "True", "leave it out: no rank keeps the weights of attention"
    return RingConfigError.wrong(f"{name}: output_attentions", "False", got, advice)


def check_length(name: str, arguments: dict[str, Any], sharding: BatchSharding) -> None:
    """Raise RingShapeError unless the tensors are as long as this rank's part of the sequence."""
    for key in ("input_ids", "inputs_embeds", "position_ids"):
        tensor = arguments.get(key)
        if tensor is not None and tensor.shape[1] != sharding.local_tokens:
            expected = f"{sharding.local_tokens} local tokens, a rank's part of {sharding.layout.tokens}"
            got = f"got {tensor.shape[1]}; {THROUGH_SHARD_BATCH}"
            raise RingShapeError(f"{name}: {key}: expected {expected}, {got}")


_READ_BY_MODELS = frozenset(TransformersKwargs.__annotations__) | {"shift_labels", "token_type_ids"}
UNREAD_KEYS = (
    "the ring's attention does not read the batch's own %s: an attention function of yours would, by"
    " model.set_attn_implementation(NAME) (configs/examples/batch_mask.py); leave what only the"
    " loop reads out of the model's call"
)


def list_unread_keys(
    signature: inspect.Signature, kwargs: Mapping[str, Any], sharding: BatchSharding
) -> list[str]:
    """Return the keys of a user's tensors of local tokens that a model without such a parameter is given."""
    own = (key for key in kwargs if key not in signature.parameters and key not in _READ_BY_MODELS)
    tensors = ((key, kwargs[key]) for key in own if isinstance(kwargs[key], Tensor))
    return [key for key, value in tensors if value.shape[1:2] == (sharding.local_tokens,)]


def refuse_other_inputs(name: str, arguments: Mapping[str, Any]) -> None:
    """Refuse a second sequence, and images, which some models put in front of each rank's tokens."""
    for key in ("encoder_hidden_states", "encoder_outputs", "pixel_values", "audio_codes"):
        if arguments.get(key) is not None:
            raise RingConfigError(f"{name}: expected one sequence of tokens, got {key} as well; leave it out")


# Which models a ring can run at all: known from the class and the configuration, before any call.

_PLAIN_LAYERS = {
    "full_attention", "sliding_attention", "chunked_attention", "reference_sliding_attention", "mlp", "moe",
}  # fmt: skip
OWN_TOKENS = (
    "so each rank would see its own tokens only; use an attention-only model such as Llama, Qwen, Mistral or"
    " GPT-NeoX"
)
_BYPASSES = "its attention bypasses transformers' attention interface"

# Settings that no property of the class shows: what the setting does with other tokens, and the value that
# does not. A variant that covers a setting computes it.
_SETTINGS: dict[str, tuple[str, str]] = {
    "attn_temperature_tuning": ("scales queries by their place in the sequence", "False"),
    "trigram_input": ("joins each token's embedding with its neighbours'", "False"),  # MobileBERT
    "token_dropout": ("scales embeddings by the share of masked tokens in the sequence", "False"),  # ESM
    "patching_mode": ("groups bytes into patches by the bytes before them", "none"),  # BLT
}


def check_class(model: PreTrainedModel, request: AttachRequest) -> None:
    """Refuse models that mix tokens otherwise than by attention, or number them by themselves.

    Raises:
        RingConfigError, RingPatternError: a variant refuses the model, or none covers its layers.
    """
    as_is, covered = request.as_is, set[str]()
    for variant in variants():
        variant.refuse(model, request)
        covered |= variant.covers(model, as_is)
    kind, needs = type(model), find_needs(model) - covered
    config = model.config.get_text_config()
    if INTERFACE in needs and not (as_is and works_as_is(kind)):
        raise make_bypass_error(kind)
    types = set(getattr(model.config, "layer_types", None) or ())
    if STATE in needs and types and types <= _PLAIN_LAYERS:
        raise cannot_run(model, _ATTENTION_ALONE)
    layers = ", ".join(sorted(needs - {INTERFACE, *_REASONS}))
    reasons = (
        [f"its layers {layers} mix tokens otherwise than by a fixed pattern of attention"] if layers else []
    )
    reasons += [reason for need, reason in _REASONS.items() if need in needs]
    if reasons:
        # ds_ring wraps functions of recurrent layers by their names.
        is_older = bool(layers or needs & {STATE, CONVOLUTION}) and not HAS_RECURRENT_FUNCTIONS
        since = f" (ds_ring runs such layers {RECURRENT_SINCE})" if is_older else ""
        raise cannot_run(model, f"{reasons[0]}{since}, {OWN_TOKENS}")
    both_ways = getattr(model.config, "use_bidirectional_attention", None) and request.is_outermost
    if model.config.model_type == "gemma" and both_ways and model.config._attn_implementation != "eager":
        raise cannot_run(
            model,
            "config.use_bidirectional_attention lets sdpa attend to later tokens in a batch without padding"
            " only, and eager attention in none; set it to False, or load the model with"
            ' attn_implementation="eager"',
        )
    for key, (what, value) in _SETTINGS.items():
        if getattr(config, key, None) and key not in covered:
            advice = f"set config.{key} to {value}, if that is your model"
            advice = "use another model" if value == "none" else advice
            raise cannot_run(model, f"config.{key} {what}, and a rank knows its own tokens only; {advice}")


_REASONS = {
    TWO_SEQUENCES: "it is an encoder-decoder, which is not known to be exact",
    STATE: "it carries a recurrent state from token to token",
    POSITIONS: "it takes no position_ids",
    CONVOLUTION: "it convolves tokens",
}

TAKES_NO_MORE = (
    "its forward takes no further arguments, by which its layers get the batch's sharding and its loss the"
    " shifted labels; install transformers 5.0 or later"
)
_ATTENTION_ALONE = (
    "its class can have layers with a state, this configuration has attention layers alone, and no test"
    " compares such a model with one process; use a configuration with recurrent layers, or a model such as"
    " Llama, Qwen, Mistral or GPT-NeoX"
)


def cannot_run(model: PreTrainedModel, reason: str) -> RingConfigError:
    """Return the error of a model that a ring does not compute."""
    return RingConfigError(f"{type(model).__name__} cannot run on a ring: {reason}")


def not_compiled(name: str, what: str) -> RingConfigError:
    """Return the error of a layer that does something which compiled code does not do on a ring."""
    return RingConfigError(f"{name} {what}, which a compiled model does not do on a ring; do not compile it")


def no_sharding(name: str, sharding: object) -> RingPatternError:
    """Return the error of a layer that was given something else than the batch's sharding."""
    got = f"got {type(sharding).__name__}; call the model through the engine, not compiled"
    return RingPatternError(f"{name}: expected the batch's sharding, {got}")


def has_cache(name: str) -> RingConfigError:
    """Return the error of a layer that cannot use a cache on a ring."""
    return RingConfigError(f"{name}: expected a call without a cache, got one; generate in engine.ring.off()")


def find_needs(model: PreTrainedModel) -> set[str]:
    """Return the needs of a model that softmax over the keys of a pattern does not cover."""
    kind, layers = type(model), set(getattr(model.config, "layer_types", None) or ())
    convolves = (
        isinstance(child, nn.Conv1d) and child.kernel_size != (1,)
        for layer in get_layers(model)
        for child in layer.modules()
    )
    needs = {
        INTERFACE: not uses_interface(kind),
        TWO_SEQUENCES: getattr(model.config, "is_encoder_decoder", False),
        STATE: model._is_stateful,
        POSITIONS: not takes_positions(kind),
        CONVOLUTION: any(convolves),
    }
    return layers - _PLAIN_LAYERS | {need for need, applies in needs.items() if applies}


def find_attention_home(name: str) -> str | None:
    """Return the module of an attention function that another package has registered; None for others."""
    function = ALL_ATTENTION_FUNCTIONS.get(name)
    home = getattr(getattr(function, "func", function), "__module__", None)
    return None if home is None or is_inside(home, "transformers", "ds_ring", "kernels") else home


def check_attention(name: str, implementation: str) -> None:
    """Refuse a model that was given an attention of transformers in place of the ring's.

    Raises:
        RingConfigError: with the model's class.
    """
    if implementation != NAME and find_attention_home(implementation) is None:
        got = f"{implementation!r}, which would attend to this rank's tokens only"
        advice = (
            f"call model.set_attn_implementation('{NAME}'), or engine.ring.off() for a pass without a ring; a"
            " function of your own calls ds_ring.ring_attention: see configs/examples/batch_mask.py"
        )
        raise RingConfigError.wrong(name, f"attention '{NAME}' on a ring", got, advice)


def check_adapters(model: nn.Module) -> None:
    """Refuse adapters of peft that count tokens from the end of what they are given."""
    for part in model.modules():
        configs = getattr(part, "peft_config", None)
        for name, config in configs.items() if isinstance(configs, dict) else ():
            if getattr(config, "alora_invocation_tokens", None):
                got = "alora_invocation_tokens, counted from the end of a sequence"
                raise RingConfigError(f"peft: adapter {name!r}: expected a plain LoRA, got {got}")


def make_bypass_error(kind: type[PreTrainedModel]) -> RingConfigError:
    """Return the error of a class that has no attention interface, with the way that works instead."""
    advice = next(filter(None, (variant.advice(kind) for variant in variants())), None)
    if advice is not None:
        instead = f"What works with it: {advice}"
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


def bypasses_interface(model: PreTrainedModel) -> bool:
    """Return whether a variant computes the attention of a model whose class does not take the name."""
    return any(INTERFACE in variant.covers(model, as_is=False) for variant in variants())


def uses_interface(kind: type[PreTrainedModel]) -> bool:
    """Return whether all attention of a class is called through transformers' attention interface."""
    return kind._supports_attention_backend or any(variant.uses_interface(kind) for variant in variants())


def works_as_is(kind: type[PreTrainedModel]) -> bool:
    """Return whether the backend can replace its attention: it calls sdpa and takes position_ids."""
    return bool(kind._supports_sdpa) and not kind._is_stateful and takes_positions(kind)


def takes_positions(kind: type[PreTrainedModel]) -> bool:
    """Return whether the model's forward can be given the positions of its tokens."""
    # A subclass whose forward takes any arguments hands them to the forward that it inherits.
    for base in kind.__mro__:
        if "forward" in vars(base):
            parameters = inspect.signature(base.forward).parameters  # type: ignore[attr-defined]
            if "position_ids" in parameters:
                return True
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
                return False
    return False


def takes_more(signature: inspect.Signature) -> bool:
    """Return whether a forward takes arguments that it hands on to its layers and its loss."""
    names = [x.name for x in signature.parameters.values() if x.kind is x.VAR_KEYWORD]
    return (
        bool(names) and "deprecated_arguments" not in names
    )  # Bloom's and MPT's refuse what they do not know


def get_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the layers of the language model, without those of an image encoder (which may convolve)."""
    base = getattr(model, model.base_model_prefix, model)
    layers = getattr(base, "layers", getattr(base, "blocks", None))
    return layers if isinstance(layers, nn.ModuleList) else nn.ModuleList()
