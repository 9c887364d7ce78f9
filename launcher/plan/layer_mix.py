"""Count the layers of each pattern: what a config.json says of them, put together with the JSON's section.

Owns how `layer_types` and windows are read off a configuration that no model is built from; a model's own
word is integrations/transformers/layer_masks.py's, the rule by which both are put together
layer_patterns.py's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ds_ring.config.json_text import Json, parse_object, read_object
from ds_ring.config.messages import sentence, shown
from ds_ring.config.section import RingConfig, named_patterns, pattern_from_config
from ds_ring.errors import RingConfigError
from ds_ring.masks.layer_patterns import NARROW, LayerPatterns, patterns_of_types
from ds_ring.masks.pattern import Pattern
from ds_ring.schedule.layout import Mix

_FULL = ("full_attention", "attention")
MOST_LAYERS = 1 << 16


def text_part(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's part of a config.json, which reads more than text in some models."""
    inner = values.get("text_config")
    return inner if "hidden_size" not in values and isinstance(inner, dict) else values


def said_by(values: Mapping[str, Any]) -> tuple[Pattern, ...]:
    """Return what a config.json says of every layer, as of a causal model.

    Args:
        values: of the file. Without `layer_types` all layers have the window or chunk that it names.

    Raises:
        RingConfigError: layers that are not attention, or keys of another kind.
    """
    own = text_part(values)
    count = own.get("num_hidden_layers")
    if type(count) is not int or not 1 <= count <= MOST_LAYERS:
        raise _refused("num_hidden_layers", "a whole number of at least 1", count, "correct it")
    return patterns_of_types(_types(own, count), lambda key: _width(own, key), True)


def said_of(hf_config: str | None, layers: int | None) -> tuple[Pattern | None, ...] | None:
    """Return what is known of each layer: by a config.json or its text, or by their number alone.

    Raises:
        RingConfigError: both are given, or one of them is wrong.
    """
    if hf_config is None:
        if layers is not None and not 1 <= layers <= MOST_LAYERS:
            raise RingConfigError(
                f"--layers: {sentence('a whole number of at least 1', str(layers), 'correct it')}"
            )
        return None if layers is None else (None,) * layers
    if layers is not None:
        raise RingConfigError("--layers: expected no number beside --hf-config, got one; leave it out")
    return said_by(read_hf_config(hf_config))


def read_hf_config(path_or_text: str) -> Json:
    """Return a config.json, by its path or its text.

    Raises:
        RingConfigError: no such file, or no JSON.
    """
    if not path_or_text.lstrip().startswith("{"):
        return read_object(path_or_text)
    return parse_object(path_or_text, "--hf-config")


def mix_of(config: RingConfig, said: Sequence[Pattern | None], tokens: int) -> Mix:
    """Count the layers of each pattern, in the order of the layers.

    Args:
        config: the section; its "pattern" and "layers".
        said: what the model says of each layer, None where nobody knows.
        tokens: of the sequence.

    Raises:
        RingPatternError: the model and the JSON contradict each other.
        RingConfigError: "layers" names one that the model has not.
    """
    named = named_patterns(config)
    beyond = [layer for layer in named if layer >= len(said)]
    if beyond:
        expected = f"layers from 0 to {len(said) - 1}, which the model has"
        raise RingConfigError(f"pattern: layers: {sentence(expected, str(max(beyond)), 'leave it out')}")
    patterns, mixed = LayerPatterns(pattern_from_config(config), named), len(set(said)) > 1
    counted = Counter(patterns.of(tokens, one, layer, mixed) for layer, one in enumerate(said))
    return tuple(counted.items())


def _types(own: Mapping[str, Any], count: int) -> Sequence[str]:
    types = own.get("layer_types")
    if types is None:
        narrow = [word for word, key in NARROW.items() if _width(own, key)]
        return [narrow[0] if narrow else _FULL[0]] * count
    if not isinstance(types, list) or len(types) != count or not all(isinstance(one, str) for one in types):
        raise _refused("layer_types", f"a list of {count} words, one for each layer", types, "correct it")
    unknown = [one for one in types if one not in (*_FULL, *NARROW)]
    if unknown:
        advice = "plan a model whose layers are all attention: ds_ring refuses this one"
        raise _refused("layer_types", f"{', '.join((*_FULL, *NARROW))}", unknown[0], advice)
    return types


def _width(own: Mapping[str, Any], key: str) -> int | None:
    width = own.get(key)
    if width is not None and (type(width) is not int or width < 1):
        raise _refused(key, "a whole number of at least 1, or null", width, "correct it")
    return width if own.get("use_sliding_window", True) is not False else None


def _refused(key: str, expected: str, got: object, advice: str) -> RingConfigError:
    return RingConfigError(f"--hf-config: {key}: {sentence(expected, shown(got), advice)}")
