"""What a transformers model may not ask of attention on a ring, and the words to say so.

Every check here guards against a silent mistake: a shard taken for the whole sequence, a mask dropped, a loss
averaged over local tokens. Owns no behaviour of the ring. Errors depend on what all ranks have in common
(the model, the call), so that they are raised on every rank together.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_ring.config import PatternConfig, RingConfig
from ds_ring.errors import RingConfigError, RingPatternError, RingShapeError
from ds_ring.integrations.placement import Placement

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_THROUGH_SHARD_BATCH = (
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

_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


def is_plain_causal(config: RingConfig) -> bool:
    """True if the pattern is what a causal model computes by itself.

    Any other pattern (LongNet's dilation, a window, documents) replaces the model's causal mask knowingly:
    the JSON asks for it. So it goes with every causal model, and only with attn_implementation="ds_ring".
    """
    return config.pattern == PatternConfig()


def check_class(model: PreTrainedModel) -> None:
    """Refuse models that mix tokens otherwise than by the attention interface, or number them by themselves.

    Raises:
        RingConfigError: with the model's class and the reason.
    """
    layers = set(getattr(model.config, "layer_types", None) or ()) - _ATTENTION_LAYERS
    reasons = {
        "its attention bypasses transformers' attention interface": not model._supports_attention_backend,
        "it carries a recurrent state from token to token": model._is_stateful,
        f"its layers {', '.join(sorted(layers))} mix tokens without attention": bool(layers),
        "it takes no position_ids": "position_ids" not in inspect.signature(model.forward).parameters,
    }
    for reason, applies in reasons.items():
        if applies:
            raise RingConfigError(
                f"{type(model).__name__} cannot run on a ring: {reason}, so each rank would see its own"
                " tokens only; use an attention-only model such as Llama, Qwen, Mistral or GPT-NeoX"
            )


def check_model_call(name: str, given: dict[str, Any]) -> None:
    """Refuse what a shard cannot answer. `given` is the call's arguments by name."""
    if given.get("position_ids") is None:
        raise RingShapeError(
            f"{name}: expected position_ids, got none; transformers would number this rank's tokens from 0:"
            f" {_THROUGH_SHARD_BATCH}"
        )
    if given.get("attention_mask") is not None:
        raise RingPatternError(
            f"{name}: expected no attention_mask, got one of this rank's tokens; it must be checked against"
            f" the whole sequence: {_THROUGH_SHARD_BATCH}"
        )
    if given.get("use_cache") or given.get("past_key_values") is not None:
        raise RingConfigError(
            f"{name}: expected a call without a cache, got use_cache or past_key_values (generate sets them);"
            " generate with the model loaded on one rank, without a ring"
        )


def check_length(name: str, given: dict[str, Any], placement: Placement) -> None:
    """The tensors must be as long as this rank's part of the sequence."""
    for key in ("input_ids", "inputs_embeds", "position_ids"):
        tensor = given.get(key)
        if tensor is not None and tensor.shape[1] != placement.local_tokens:
            raise RingShapeError(
                f"{name}: {key}: expected {placement.local_tokens} local tokens, a rank's part of"
                f" {placement.layout.tokens}, got {tensor.shape[1]}; {_THROUGH_SHARD_BATCH}"
            )


def check_windows(model: PreTrainedModel, placement: Placement) -> None:
    """A window or chunk that the model's configuration asks for must be the pattern's, in all layers."""
    config, name = model.config.get_text_config(), type(model).__name__
    layer_types = getattr(config, "layer_types", None)
    for key, layer_type in (
        ("sliding_window", "sliding_attention"),
        ("attention_chunk_size", "chunked_attention"),
    ):
        if layer_types is None or layer_type in layer_types:
            width = getattr(config, key, None)
            _check_window(name, f"config.{key}", width, placement)
            others = sorted(set(layer_types or ()) - {layer_type})
            if others and width is not None and width < placement.layout.tokens:
                raise RingPatternError(
                    f"{name}: config.{key} is {width} in some layers, and others are {', '.join(others)}; a"
                    " ring has one pattern for all layers: make config.layer_types all alike"
                )


def _check_window(name: str, key: str, window: int | None, placement: Placement) -> None:
    """transformers' sliding window counts the token itself, as ours does; its chunks are no window."""
    if window is None or window >= placement.layout.tokens:
        return
    if key.endswith("sliding_window") and placement.pattern.distance == (0, window - 1):
        return
    raise RingPatternError(
        f"{name}: {key} is {window}, and the pattern {placement.pattern} lets each of"
        f" {placement.layout.tokens} tokens see otherwise; "
        + (f'set "window": {window} in the "pattern" section of the JSON, ' if "window" in key else "")
        + f"set it to None in the model's configuration, or train on at most {window} tokens"
    )


def check_attention_call(
    module: nn.Module, placement: Placement, mask: object, dropout: float, kwargs: dict[str, Any]
) -> None:
    """Refuse dropout, masks, windows and extra terms of the scores."""
    name = type(module).__name__
    if dropout:
        raise RingConfigError(
            f"{name}: expected no dropout inside attention, got {dropout}; set attention_dropout to 0 in the"
            " model's configuration (dropout elsewhere is fine)"
        )
    if mask is not None:
        raise RingPatternError(
            f"{name}: expected no mask tensor, got {type(mask).__name__} {list(getattr(mask, 'shape', []))};"
            " it is written for one rank's tokens: say it with the pattern in the JSON"
        )
    is_causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if bool(causal) != placement.pattern.is_causal:
        raise RingPatternError(
            f"{name}: the model is {'' if causal else 'not '}causal, the pattern {placement.pattern} is"
            f" {'' if placement.pattern.is_causal else 'not '}causal; set pattern.causal in the JSON to match"
        )
    _check_window(name, "sliding_window", kwargs.get("sliding_window"), placement)
    for key in _FOREIGN_ARGUMENTS:
        if kwargs.get(key) is not None:
            raise RingPatternError(f"{name}: expected no {key}, got one; ring attention does not compute it")


def refuse_masks(mask_function: Callable[..., Any], attention_mask: Tensor | None = None, **_: Any) -> None:
    """transformers' mask interface: the pattern is the mask, so a model may only want what it says by itself.

    Local position ids jump where a layout does, which transformers takes for packed documents: its mask for
    them, of local tokens, is ignored. Real packing was refused, or turned into the pattern
    ("documents": true), where whole batches are seen.
    """
    if attention_mask is not None:
        raise RingPatternError(
            f"attention_mask: expected none, got {list(attention_mask.shape)}; {_THROUGH_SHARD_BATCH}"
        )
    if torch.compiler.is_compiling():  # Dynamo cannot look into functions
        return
    unknown = sorted(set(_leaves(mask_function)) - _KNOWN_MASKS)
    if unknown:
        raise RingPatternError(
            f"the model masks attention by {', '.join(unknown)}, which no ring pattern stands for; use a"
            " model with plain causal or full attention"
        )


_KNOWN_MASKS = {
    "causal_mask_function",
    "bidirectional_mask_function",
    "packed_sequence_mask_function.<locals>.inner_mask",
    "sliding_window_overlay.<locals>.inner_mask",  # its width is checked by check_windows
    "chunked_overlay.<locals>.inner_mask",  # likewise
}
_COMPOSED_MASKS = {
    "and_masks.<locals>.and_mask": "mask_functions",
    "remap_positions_for_packed_sequence.<locals>.inner_mask": "mask_function",
}


def _leaves(function: Callable[..., Any]) -> list[str]:
    """Names of the elementary mask functions that transformers put together into this one."""
    name = function.__qualname__
    if name not in _COMPOSED_MASKS:
        return [name]
    parts = inspect.getclosurevars(function).nonlocals[_COMPOSED_MASKS[name]]
    return [leaf for part in (parts if isinstance(parts, tuple) else (parts,)) for leaf in _leaves(part)]


class LossGuard:
    """A model's loss function, which refuses labels that were not shifted before they were sharded."""

    def __init__(self, loss_function: Callable[..., Tensor]) -> None:
        self.loss_function = loss_function
        self.used = False

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        for key in ("shift_labels", "num_items_in_batch"):
            if kwargs.get(key) is None:
                raise RingShapeError(
                    f"loss: expected {key} beside labels, got none: it would be a mean over this rank's"
                    f" tokens, its labels shifted across a cut; {_THROUGH_SHARD_BATCH}"
                )
        self.used = True
        return self.loss_function(*args, **kwargs)


def check_loss(model: PreTrainedModel, guard: LossGuard, output: Any) -> None:
    """A model that computes its loss by itself cannot know that its labels are shifted."""
    if getattr(output, "loss", None) is not None and not guard.used:
        raise RingConfigError(
            f"{type(model).__name__} computed a loss by itself and not by its loss_function; call it without"
            " labels, and take engine.ring.loss(output.logits, batch).backward_loss"
        )
