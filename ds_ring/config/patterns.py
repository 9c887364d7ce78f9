"""Build the pattern that the JSON's "pattern" section describes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_ring.masks.dense import Causal, Full
from ds_ring.masks.dilated import Dilated
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.windows import SlidingWindow

if TYPE_CHECKING:
    from ds_ring.config.section import RingConfig


def pattern_from_config(config: RingConfig) -> Pattern:
    """Build the pattern of the section; its parts are composed with `&`."""
    # "documents": true is not in it: documents change with every batch, and are added to this pattern by
    # whoever has the batch (`pattern & Documents(...)`).
    section = config.pattern
    parts: list[Pattern] = []
    if section.segment_lengths is not None and section.dilation_rates is not None:
        lengths, rates = tuple(section.segment_lengths), tuple(section.dilation_rates)
        parts.append(Dilated(lengths, rates, section.causal, section.head_offsets))
    if section.window is not None:
        parts.append(SlidingWindow(section.window, section.causal))
    if not parts:
        return Causal() if section.causal else Full()
    pattern = parts[0]
    for part in parts[1:]:
        pattern = pattern & part
    return pattern
