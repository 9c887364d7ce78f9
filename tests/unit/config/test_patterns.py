"""The JSON's "pattern" section becomes the pattern it describes."""

from __future__ import annotations

from typing import Any

import pytest

from ds_ring import Causal, Dilated, Full, RingConfig, SlidingWindow
from ds_ring.config.patterns import pattern_from_config
from ds_ring.masks.pattern import Pattern

DILATED: dict[str, Any] = {"segment_lengths": [16, 64], "dilation_rates": [1, 4]}


@pytest.mark.parametrize(
    ("section", "pattern"),
    [
        ({}, Causal()),
        ({"causal": False}, Full()),
        ({"window": 8}, SlidingWindow(8)),
        ({"window": 8, "causal": False}, SlidingWindow(8, False)),
        (DILATED, Dilated((16, 64), (1, 4))),
        (DILATED | {"head_offsets": "zero", "causal": False}, Dilated((16, 64), (1, 4), False, "zero")),
        (DILATED | {"window": 8}, Dilated((16, 64), (1, 4)) & SlidingWindow(8)),
    ],
    ids=str,
)
def test_sections_and_their_patterns(section: dict[str, Any], pattern: Pattern) -> None:
    config = RingConfig.from_deepspeed({"sequence_parallel_size": 2, "ring_attention": {"pattern": section}})
    assert pattern_from_config(config) == pattern
