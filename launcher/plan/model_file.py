"""Read the model of `ds-ring plan`: a transformers config.json, read as JSON, or sizes one by one.

Only where the file leaves open which of its layers have a window or chunk, transformers is asked, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from ds_ring.config.messages import did_you_mean, shown
from ds_ring.errors import RingConfigError
from ds_ring.masks.layer_patterns import NARROW
from ds_ring.masks.pattern import Pattern

from .layer_mix import read_hf_config, said_by, text_part
from .model_shape import ModelShape

_KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "intermediate": "intermediate_size",
    "vocab": "vocab_size",
}
_OPTIONS = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab")


def model_of(options: argparse.Namespace) -> ModelShape:
    """Return the model of --hf-config, or of --layers, --hidden, --heads, --vocab and what has defaults."""
    given = [name for name in _OPTIONS if getattr(options, name) is not None]
    if options.hf_config is not None:
        if given:
            raise RingConfigError(
                f"--hf-config: expected no sizes beside it, got"
                f" --{given[0].replace('_', '-')}; remove one of them"
            )
        return _from_transformers(options.hf_config)
    missing = [f"--{name}" for name in ("layers", "hidden", "heads", "vocab") if name not in given]
    if missing:
        raise RingConfigError(
            f"model: expected --hf-config config.json, or sizes, got no {', '.join(missing)};"
            " add what is missing"
        )
    return ModelShape(
        options.layers,
        options.hidden,
        options.heads,
        options.kv_heads or options.heads,
        _head_dim(options.head_dim, options.hidden, options.heads),
        options.intermediate or 4 * options.hidden,
        options.vocab,
    )


def said_of_layers(hf_config: str | None, layers: int) -> tuple[Pattern | None, ...]:
    """Return what a model says of each of its layers, None where nobody knows.

    Args:
        hf_config: a config.json, or its text; None for a model of which the sizes are known only.
        layers: of the model.

    Raises:
        RingConfigError: layers that no pattern stands for, or a file that leaves them open.
    """
    return (None,) * layers if hf_config is None else said_by(with_layer_types(hf_config))


def with_layer_types(path_or_text: str) -> dict[str, Any]:
    """Return a config.json with its `layer_types`, which transformers fills in where the file has none.

    Raises:
        RingConfigError: only transformers could tell, and it is not installed or does not know the model.
    """
    whole = read_hf_config(path_or_text)
    values = text_part(whole)
    model_type, narrow = values.get("model_type"), [key for key in NARROW.values() if values.get(key)]
    if "layer_types" in values or model_type is None or not narrow:
        return whole
    try:
        from transformers import CONFIG_MAPPING
    except ImportError:
        known = False
    else:
        known = isinstance(model_type, str) and model_type in CONFIG_MAPPING
    if not known:
        raise RingConfigError(
            f"--hf-config: layer_types: expected the type of each layer beside {narrow[0]}, got none, and"
            f" transformers, which knows it, is not installed or does not know {model_type!r}; add it"
        )
    made = CONFIG_MAPPING[model_type](**{key: value for key, value in values.items() if key != "model_type"})
    types = getattr(made, "layer_types", None)
    return dict(values) | ({} if types is None else {"layer_types": list(types)})


def _head_dim(given: int | None, hidden: int, heads: int) -> int:
    if given is not None:
        return given
    if heads > 0 and hidden % heads:
        raise RingConfigError(
            f"model: hidden: expected a multiple of heads {heads}, got {hidden}; give --head-dim"
        )
    return hidden // max(heads, 1)


def _from_transformers(path_or_text: str) -> ModelShape:
    whole = read_hf_config(path_or_text)
    values = text_part(whole)
    sizes = {}
    for name, key in _KEYS.items():
        if not isinstance(values.get(key), int) or isinstance(values.get(key), bool):
            near = did_you_mean(key, [word for word in values if word not in _KEYS.values()])
            # A key with a wrong value is no misspelt one.
            misspelt = near is not None and key not in values
            advice = f"did you mean '{near}'?" if misspelt else "give --layers and the other sizes instead"
            raise RingConfigError(
                f"--hf-config: {key}: expected a whole number, got {shown(values.get(key))}; {advice}"
            )
        sizes[name] = values[key]
    return ModelShape(
        **sizes,
        kv_heads=_optional(values, "num_key_value_heads") or sizes["heads"],
        head_dim=_head_dim(_optional(values, "head_dim"), sizes["hidden"], sizes["heads"]),
        tied=bool(whole.get("tie_word_embeddings", False)),
    )


def _optional(values: Mapping[str, Any], key: str) -> int | None:
    value = values.get(key)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise RingConfigError(
        f"--hf-config: {key}: expected a whole number or null, got {shown(value)}; correct it"
    )
