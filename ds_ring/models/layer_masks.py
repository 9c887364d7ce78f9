"""Read what each layer of a transformers model masks: its window, its chunk, whether it is causal.

transformers' causal window counts the token itself, as `SlidingWindow` does; its two-sided one does not.
`data/layer_patterns.py` decides whether the pattern of the JSON may replace a layer's.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from ds_ring.data.layer_patterns import NARROW, covers, make_type_patterns
from ds_ring.errors import RingPatternError
from ds_ring.masks.catalog import Causal, Chunked, Full, SlidingWindow
from ds_ring.masks.pattern import Pattern

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ds_ring.data.batch_sharding import BatchSharding

# a word of `layer_types`: a part of the name of what makes such masks
_MAKERS = {"sliding_attention": "sliding_window", "chunked_attention": "chunked"}


@dataclass(frozen=True)
class LayerMask:
    """What a layer masks, in place of a mask tensor.

    Raises:
        RingPatternError: a model reads or changes the mask as a tensor, so its attention is another one.
    """

    # Not a subclass of Tensor: the recomputation of a layer would get a copy, which has lost the pattern.

    pattern: Pattern | None  # None where nothing is seen: a model may make such a mask for no layer
    sharding: BatchSharding | None = None  # of the batch, where a layer takes no keyword argument
    joins_blocks: bool = False  # whether tokens of a block see each other, too: patterns of the batch's rows
    ndim: ClassVar[int] = 0  # some models add a bias to a mask of four dimensions, and to the scores as well

    def check_blocks(self, sharding: BatchSharding) -> None:
        """Refuse blocks of tokens that see each other which the batch's rows do not have."""
        if self.joins_blocks and not any(
            getattr(group.pattern, "joins_blocks", False) for group in sharding.groups
        ):
            raise RingPatternError(
                "expected a causal mask, got one that lets tokens of a block (of an image, of a prompt) see"
                " each other; give images with the batch, or leave token_type_ids out of it"
            )

    def __getitem__(self, index: Any) -> LayerMask:
        """Return the mask itself for a slice of everything: Gemma 3n and 4 slice by logits_to_keep, 0.

        And for head 0: a layer's mask is the same for all heads.
        """
        parts = index if isinstance(index, tuple) else (index,)
        whole = [isinstance(part, slice) and part in (slice(None), slice(0, None)) for part in parts]
        if all(whole) or (len(parts) > 1 and parts[1] == 0 and all((*whole[:1], *whole[2:]))):
            return self
        raise _refuse_tensor_use(f"selects {index} of it")

    def to(self, *_: Any, **__: Any) -> LayerMask:
        """Return the mask itself: some models ask for truth values."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of Python's protocols: copy, pickle
            raise AttributeError(name)
        raise _refuse_tensor_use(f"reads its {name}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse every function of torch, and every operator with a tensor."""
        raise _refuse_tensor_use(f"calls {getattr(function, '__name__', function)} on it")


def _refuse_tensor_use(how: str) -> RingPatternError:
    return RingPatternError(
        f"attention_mask: expected a model that hands its mask to attention as it is, got one that {how}: it"
        " computes a mask of its own from this rank's tokens, which no ring pattern stands for; use a model"
        " with plain causal or full attention, or with windows or chunks"
    )


# [Note: the model's pattern]
# transformers composes a mask from a few functions of positions, and calls the mask function that is
# registered for the attention. Ours reads these functions and returns a `LayerMask`, which the model passes
# to its layers: it is what "eager" would mask. The configuration is not read. An unknown function is
# refused by name. For a layer that gets no mask, the arguments of attention decide (`is_causal`,
# `sliding_window`).
def read_mask(mask_function: Callable[..., Any]) -> LayerMask:
    """Return what a mask of transformers masks: [Note: the model's pattern].

    Raises:
        RingPatternError: it has a function that no pattern can express.
    """
    leaves = _leaves(mask_function)
    joins = any(ids is not None and bool((ids >= 0).any()) for ids in map(_read_block_ids, leaves))
    leaves = [leaf for leaf in leaves if _read_block_ids(leaf) is None]
    if any(inspect.getclosurevars(leaf).nonlocals.get("sliding_window") == 0 for leaf in leaves):
        return LayerMask(None)  # Qwen's configuration without windows
    causal = any(leaf.__qualname__ == "causal_mask_function" for leaf in leaves)
    parts = {leaf.__qualname__: _part(leaf, causal) for leaf in leaves}
    unknown = sorted(name for name, part in parts.items() if part is None)
    if unknown:
        advice = "use a model with causal or full attention, windows or chunks"
        raise RingPatternError(f"the model masks attention by {', '.join(unknown)}; {advice}")
    narrow = [part for part in parts.values() if part is not None and not isinstance(part, Causal | Full)]
    pattern = reduce(and_, narrow) if narrow else Causal() if causal else Full()
    return LayerMask(pattern, joins_blocks=joins)


def _part(leaf: Callable[..., Any], causal: bool) -> Pattern | None:
    """Return the pattern of an elementary mask function; None if there is none."""
    held = inspect.getclosurevars(leaf).nonlocals
    match leaf.__qualname__.removesuffix(".<locals>.inner_mask"):
        # Local position ids jump where a layout does, which transformers takes for packed documents: its mask
        # for them, of local tokens, is ignored. Real packing was refused, or turned into the pattern
        # ("documents": true), where whole batches are seen.
        case "causal_mask_function" | "bidirectional_mask_function" | "packed_sequence_mask_function":
            return Causal() if causal else Full()
        case "sliding_window_overlay" if causal:  # alone it would hide earlier keys only
            return SlidingWindow(int(held["sliding_window"]))
        case "sliding_window_bidirectional_overlay":
            return SlidingWindow(int(held["sliding_window"]) + 1, causal)
        case "chunked_overlay":
            return Chunked(int(held["chunk_size"]), causal)
    return None


_COMPOSED_MASKS = {
    "and_masks.<locals>.and_mask": "mask_functions",
    "remap_positions_for_packed_sequence.<locals>.inner_mask": "mask_function",
}


def _leaves(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Return the elementary mask functions that transformers composed into this one."""
    name = function.__qualname__
    if name == "or_masks.<locals>.or_mask":
        parts = inspect.getclosurevars(function).nonlocals["mask_functions"]
        blocks = [part for part in parts if _read_block_ids(part) is not None]
        others = [_leaves(part) for part in parts if part not in blocks]
        widest = min(others, key=len, default=[function])
        # a mask, or a part of it, is the mask
        return [*widest, *blocks] if all({*widest} <= {*functions} for functions in others) else [function]
    if name not in _COMPOSED_MASKS:
        return [function]
    parts = inspect.getclosurevars(function).nonlocals[_COMPOSED_MASKS[name]]
    leaves = [leaf for part in (parts if isinstance(parts, tuple) else (parts,)) for leaf in _leaves(part)]
    # Unlimited-OCR's mask of a prompt hides nothing: in training all tokens are that.
    lengths = (inspect.getclosurevars(leaf).nonlocals.get("prefill_length") for leaf in leaves)
    return [leaf for leaf, length in zip(leaves, lengths, strict=True) if length != math.inf]


def _read_block_ids(function: Callable[..., Any]) -> Tensor | None:
    """Return the blocks whose tokens a mask function lets see each other; None for other functions."""
    ids: Tensor | None = inspect.getclosurevars(function).nonlocals.get("block_sequence_ids")
    return ids


def is_causal(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Return whether a layer that got no mask is causal."""
    argument = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if argument is None else argument)


def read_call_pattern(module: nn.Module, kwargs: dict[str, Any]) -> Pattern:
    """Return the pattern of a layer that got no mask, by its arguments: [Note: the model's pattern].

    Raises:
        RingPatternError: a window that cannot be read.
    """
    causal = is_causal(module, kwargs)
    window = kwargs.get("sliding_window")
    if window is None:
        return Causal() if causal else Full()
    if not causal:
        # Some models count the token itself here and others do not.
        expected = f"expected a mask beside the two-sided sliding_window {window}, got none"
        raise RingPatternError(f"{type(module).__name__}: {expected}; use a model that makes one")
    return SlidingWindow(int(window))


def choose_layer_pattern(
    module: nn.Module, sharding: BatchSharding, model_pattern: Pattern | None
) -> Pattern:
    """Return which query attends to which key in a layer, documents apart.

    Args:
        module: the layer.
        sharding: of the batch, with the JSON's pattern.
        model_pattern: the pattern that the model gives the layer; None if it hides all keys.

    Raises:
        RingPatternError: the layer hides all, or contradicts the JSON.
    """
    name, config = type(module).__name__, getattr(module, "config", None)
    if model_pattern is None:
        raise RingPatternError(f"{name}: expected a window of at least 1 token, got a mask that hides all")
    mixed = len(set(getattr(config, "layer_types", None) or ())) > 1
    try:
        return sharding.get_layer_pattern(model_pattern, getattr(module, "layer_idx", None), mixed)
    except RingPatternError as error:
        raise RingPatternError(f"{name}: {error}") from None


def read_layer_patterns(model: PreTrainedModel, causal: bool) -> tuple[Pattern, ...]:
    """Return the pattern of every layer by the configuration: for the choice of a layout."""
    config: Any = model.config.get_text_config()
    count = int(getattr(config, "num_hidden_layers", 1) or 1)
    types = getattr(config, "layer_types", None)
    if types is None:
        types = [
            next(
                (layer_type for layer_type in NARROW if makes_such_masks(model, layer_type)), "full_attention"
            )
        ] * count
    if not getattr(config, "use_sliding_window", True):
        types = ["full_attention"] * len(types)
    # a value that layers may have of their own is refused as an attribute
    values = config.to_dict() if getattr(config, "per_layer_config", None) else {}
    return make_type_patterns(
        types, lambda key: values[key] if key in values else getattr(config, key, None), causal
    )


def find_narrowest_layer(layers: tuple[Pattern, ...], pattern: Pattern) -> int:
    """Return the shortest window or chunk of the layers that the JSON's pattern has not; 2^62 for none."""
    narrow = (
        layer for layer in layers if isinstance(layer, SlidingWindow | Chunked) and not covers(pattern, layer)
    )
    widths = (layer.window if isinstance(layer, SlidingWindow) else layer.chunk for layer in narrow)
    return min(widths, default=1 << 62)


def makes_such_masks(model: PreTrainedModel, layer_type: str) -> bool:
    """Return whether the model's code makes masks of this kind: Moshi has a window in its config only."""
    from transformers import PreTrainedModel

    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    modules = {kind.__module__ for part in parts for kind in type(part).__mro__}  # of what it inherits, too
    names: set[str] = set()
    for module in modules:
        names |= set(vars(sys.modules[module])) if module in sys.modules else set()
    return any(name.startswith("create_") and _MAKERS[layer_type] in name for name in names)
