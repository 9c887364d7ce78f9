"""Compare windows and chunks of a model's configuration with the one pattern of a ring.

Owns that rule and its one error, which names every way out. transformers' causal window counts the token
itself, as "window" in the JSON does; its two-sided one does not. A chunk is no window. Models with
chunks (Llama 4) have them in some layers only: no pattern of all layers stands for them, `Chunked` neither.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ds_ring.errors import RingPatternError
from ds_ring.integrations.deepspeed.batch_sharding import BatchSharding
from ds_ring.masks.windows import applies_window

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NARROW = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
_MASKS = {"sliding_attention": "sliding_window", "chunked_attention": "chunked"}


def check_windows(model: PreTrainedModel, sharding: BatchSharding) -> None:
    """Raise unless a window or chunk of the model's configuration is the pattern's, in all layers."""
    config, tokens = model.config.get_text_config(), sharding.layout.tokens
    layer_types = getattr(config, "layer_types", None)
    for layer_type, key in _NARROW.items():
        asks = makes_such_masks(model, layer_type) if layer_types is None else layer_type in layer_types
        width = getattr(config, key, None) if asks else None
        window = None if width is None else _window(layer_type, width, sharding)
        if width is None or window is None or window >= tokens:
            continue
        others = sorted(set(layer_types or ()) - {layer_type})
        if layer_type == "sliding_attention" and not others and _is_the_patterns(window, sharding):
            continue
        raise RingPatternError(
            f"{type(model).__name__}: config.{key} is {width}"
            + (f" in some layers, and others are {', '.join(others)}" if others else "")
            + f"; a ring has one pattern for all layers, and {sharding.pattern} lets each of {tokens} tokens"
            f" see otherwise. {_ways_out(layer_type, key, window, tokens, layer_types)}"
        )


def _window(layer_type: str, width: int, sharding: BatchSharding) -> int:
    """Return what "window" in the JSON would be called for this width."""
    two_sided = layer_type == "sliding_attention" and not sharding.pattern.is_causal
    return width + 1 if two_sided else width


def _is_the_patterns(window: int, sharding: BatchSharding) -> bool:
    first = 0 if sharding.pattern.is_causal else 1 - window
    return applies_window(sharding.pattern, first, window - 1)


def makes_such_masks(model: PreTrainedModel, layer_type: str) -> bool:
    """Return whether the model's code makes masks of this kind: Moshi has a window in its config only."""
    from transformers import PreTrainedModel

    modules = {type(part).__module__ for part in model.modules() if isinstance(part, PreTrainedModel)}
    names: set[str] = set()
    for module in modules:
        names |= set(vars(sys.modules[module])) if module in sys.modules else set()
    return any(name.startswith("create_") and _MASKS[layer_type] in name for name in names)


def _ways_out(layer_type: str, key: str, window: int, tokens: int, layer_types: list[str] | None) -> str:
    ways = [f"let all layers see everything: config.{key} = {tokens} (or more) before the model is built"]
    if layer_type == "sliding_attention":
        alike = ""
        if layer_types is not None and set(layer_types) != {layer_type}:
            alike = (
                f'give all layers the window: config.layer_types = ["{layer_type}"] * {len(layer_types)}'
                " before the model is built, and "
            )
        ways.append(f'{alike}set "window": {window} in the "pattern" section of the JSON')
    ways.append(f"train on at most {window} tokens")
    return "Do one of these: " + "; ".join(f"({i}) {way}" for i, way in enumerate(ways, 1))


def check_window_of_call(name: str, kwargs: dict[str, Any], sharding: BatchSharding) -> None:
    """Raise unless the window that a layer hands to attention is the pattern's."""
    # A two-sided one is written with the token itself by some models and without by others; `check_windows`
    # has looked at their configuration.
    window = kwargs.get("sliding_window")
    if window is None or window >= sharding.layout.tokens:
        return
    allowed = (window,) if sharding.pattern.is_causal else (window, window + 1)
    if not any(_is_the_patterns(one, sharding) for one in allowed):
        raise RingPatternError(
            f"{name}: sliding_window is {window}, and the pattern {sharding.pattern} lets each of"
            f" {sharding.layout.tokens} tokens see otherwise."
            f" {_ways_out('sliding_attention', 'sliding_window', window, sharding.layout.tokens, None)}"
        )
