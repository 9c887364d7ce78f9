"""Read the model of `ds-ring plan`: a transformers config.json, read as JSON, or sizes one by one."""

from __future__ import annotations

import argparse
from typing import Any

from ds_ring.config.json_text import parse_object, read_object
from ds_ring.config.messages import did_you_mean, shown
from ds_ring.errors import RingConfigError
from ds_ring.estimator.model_shape import ModelShape

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


def _head_dim(given: int | None, hidden: int, heads: int) -> int:
    if given is not None:
        return given
    if heads > 0 and hidden % heads:
        raise RingConfigError(
            f"model: hidden: expected a multiple of heads {heads}, got {hidden}; give --head-dim"
        )
    return hidden // max(heads, 1)


def _from_transformers(path_or_text: str) -> ModelShape:
    whole = _read(path_or_text)
    values: dict[str, Any] = whole
    if "hidden_size" not in whole and isinstance(whole.get("text_config"), dict):
        values = whole["text_config"]  # of a model that reads more than text
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


def _optional(values: dict[str, Any], key: str) -> int | None:
    value = values.get(key)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise RingConfigError(
        f"--hf-config: {key}: expected a whole number or null, got {shown(value)}; correct it"
    )


def _read(path_or_text: str) -> dict[str, Any]:
    if not path_or_text.lstrip().startswith("{"):
        return read_object(path_or_text)
    return parse_object(path_or_text, "--hf-config")
