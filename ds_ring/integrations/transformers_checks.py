"""What a transformers model may not ask of attention on a ring, and the words to say so.

Every check here guards against a silent mistake: a shard taken for the whole sequence, a mask dropped, a loss
averaged over local tokens. Owns no behaviour of the ring. Errors depend on what all ranks have in common
(the model, the call), so that they are raised on every rank together.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ds_ring.config import RingConfig
from ds_ring.errors import RingConfigError, RingPatternError, RingShapeError
from ds_ring.integrations.placement import Placement

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


def is_plain_causal(config: RingConfig) -> bool:
    """True if the pattern is what a causal model computes by itself."""
    return config.pattern == type(config.pattern)()


def checked_model_call(
    model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The keyword arguments of a model call, without a cache; refuses what a shard cannot answer."""
    given = dict(inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments) | kwargs
    name = type(model).__name__
    if given.get("position_ids") is None:
        raise RingShapeError(
            f"{name}: expected position_ids, got none; transformers would number this rank's tokens from 0:"
            f" {_THROUGH_SHARD_BATCH}"
        )
    if given.get("attention_mask") is not None:
        raise RingPatternError(
            f"{name}: expected no attention_mask, got one of this rank's tokens; it must be checked against the"
            f" whole sequence: {_THROUGH_SHARD_BATCH}"
        )
    if given.get("use_cache") or given.get("past_key_values") is not None:
        raise RingConfigError(
            f"{name}: expected a call without a cache, got use_cache or past_key_values (generate sets them);"
            " generate with the model loaded on one rank, without a ring"
        )
    return kwargs if "use_cache" in given else kwargs | {"use_cache": False}


def check_windows(model: PreTrainedModel, placement: Placement) -> None:
    """A window or chunk that the model's configuration asks for must not be wider open on the ring."""
    config = model.config.get_text_config()
    layer_types = getattr(config, "layer_types", None)
    for key, layer_type in (
        ("sliding_window", "sliding_attention"),
        ("attention_chunk_size", "chunked_attention"),
    ):
        if layer_types is None or layer_type in layer_types:
            _check_window(type(model).__name__, f"config.{key}", getattr(config, key, None), placement)


def _check_window(name: str, key: str, window: int | None, placement: Placement) -> None:
    if window is None or window >= placement.layout.tokens:
        return
    raise RingPatternError(
        f"{name}: {key} is {window}, and the pattern {placement.pattern} lets each of {placement.layout.tokens} tokens"
        f" see further; set it to None in the model's configuration, or train on at most {window} tokens"
    )


def check_attention_call(
    module: nn.Module, placement: Placement, mask: object, dropout: float, kwargs: dict[str, Any]
) -> None:
    """Refuse dropout, masks, windows and extra terms of the scores."""
    name = type(module).__name__
    if dropout:
        raise RingConfigError(
            f"{name}: expected no dropout inside attention, got {dropout}; set attention_dropout to 0 in the model's"
            " configuration (dropout elsewhere is fine)"
        )
    if mask is not None:
        raise RingPatternError(
            f"{name}: expected no mask tensor, got {type(mask).__name__} {list(getattr(mask, 'shape', []))}; it is"
            " written for one rank's tokens: say it with the pattern in the JSON"
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
    them is ignored. Real packing was refused (or turned into the pattern) where whole batches are seen.
    """
    if attention_mask is not None:
        raise RingPatternError(
            f"attention_mask: expected none, got {list(attention_mask.shape)}; {_THROUGH_SHARD_BATCH}"
        )
    unknown = sorted(set(_leaves(mask_function)) - _KNOWN_MASKS)
    if unknown:
        raise RingPatternError(
            f"the model masks attention by {', '.join(unknown)}, which no ring pattern stands for; use a model with"
            " plain causal or full attention"
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
                    f"loss: expected {key} beside labels, got none: it would be a mean over this rank's tokens, its"
                    f" labels shifted across a cut; {_THROUGH_SHARD_BATCH}"
                )
        self.used = True
        return self.loss_function(*args, **kwargs)


def check_loss(model: PreTrainedModel, guard: LossGuard, output: Any) -> None:
    """A model that computes its loss by itself cannot know that its labels are shifted."""
    if getattr(output, "loss", None) is not None and not guard.used:
        raise RingConfigError(
            f"{type(model).__name__} computed a loss by itself and not by its loss_function; call it without labels,"
            " and take engine.ring.loss(output.logits, batch).backward_loss"
        )
