"""Compare sections by their dotted JSON keys, as messages name them."""

from __future__ import annotations

from ds_ring.config.deepspeed_file import SECTION, SP_KEY
from ds_ring.config.json_text import Json
from ds_ring.config.section import RingConfig


def differing_keys(a: RingConfig, b: RingConfig) -> list[str]:
    """Return the dotted JSON keys in which two configurations differ; empty exactly if the fingerprints
    agree.
    """
    left, right = by_json_key(a), by_json_key(b)
    return [key for key in left if left[key] != right[key]]


def by_json_key(config: RingConfig) -> Json:
    """Return the values by their dotted JSON keys, with everything that was left out filled in."""
    values = config.model_dump(mode="json")
    flat = {SP_KEY: values.pop(SP_KEY)}
    inner = {part: values.pop(part) for part in ("pattern", "long_sequence")}
    flat |= {f"{SECTION}.{name}": value for name, value in values.items()}
    for part, keys in inner.items():
        flat |= {f"{SECTION}.{part}.{name}": value for name, value in keys.items()}
    return flat
