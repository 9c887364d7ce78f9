"""Build the pattern that the JSON's "pattern" section describes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache, reduce
from operator import and_
from typing import TYPE_CHECKING, cast

from ds_ring.config.pattern_section import PATTERNS_BY_KEY
from ds_ring.masks.dense import Causal, Full
from ds_ring.masks.dilated import Dilated
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.sinks import Sinks
from ds_ring.masks.slices import Slices
from ds_ring.masks.windows import DilatedWindow, SlidingWindow

if TYPE_CHECKING:
    from ds_ring.config.pattern_section import PatternConfig
    from ds_ring.config.section import RingConfig


def pattern_from_config(config: RingConfig) -> Pattern:
    """Build the pattern of the section; its parts are composed with `&`."""
    # "documents": true is not in it: documents change with every batch, and are added to this pattern by
    # whoever has the batch (`pattern & Documents(...)`).
    return _pattern(config.pattern)


def named_patterns(config: RingConfig) -> dict[int, Pattern]:
    """Return the patterns of the layers that "layers" names, by their numbers from 0."""
    return {layer: _pattern(section) for layer, section in config.pattern.layers or ()}


@lru_cache(maxsize=256)
def _pattern(section: PatternConfig) -> Pattern:
    parts: list[Pattern] = []
    if section.segment_lengths is not None and section.dilation_rates is not None:
        lengths, rates = tuple(section.segment_lengths), tuple(section.dilation_rates)
        parts.append(Dilated(lengths, rates, section.causal, section.head_offsets))
    if section.window is not None:
        parts.append(_window(section, section.window))
    for name, (_, kind) in PATTERNS_BY_KEY.items():
        tokens, make = getattr(section, name), cast(Callable[..., Pattern], kind)
        if tokens is not None:
            has_causal = any(field.name == "causal" for field in fields(kind))
            parts.append(make(tokens, section.causal) if has_causal else make(tokens))
    if section.slices is not None:
        # the kinds of slices say what is causal; beside "causal": true they may only hide more
        parts += [Slices(section.slices), *([Causal()] if section.causal and not parts else [])]
    return reduce(and_, parts) if parts else Causal() if section.causal else Full()


def _window(section: PatternConfig, window: int) -> Pattern:
    """The sliding window, dilated or not, with the sinks that are seen beside it."""
    near: Pattern = SlidingWindow(window, section.causal)
    if section.window_dilation > 1:
        near = DilatedWindow(window, section.window_dilation, section.causal)
    return near if section.sinks is None else near | Sinks(section.sinks, section.causal)
