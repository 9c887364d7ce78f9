"""The JSON's "pattern" section becomes the pattern it describes."""

from __future__ import annotations

from typing import Any

import pytest

from ds_ring import (
    Causal,
    Chunked,
    DilatedWindow,
    Full,
    PrefixLM,
    RingConfig,
    RingConfigError,
    Sinks,
    SlidingWindow,
)
from ds_ring.config.section import named_patterns, pattern_from_config
from ds_ring.masks.pattern import Pattern


@pytest.mark.parametrize(
    ("section", "pattern"),
    [
        ({}, Causal()),
        ({"causal": False}, Full()),
        ({"window": 8}, SlidingWindow(8)),
        ({"window": 8, "causal": False}, SlidingWindow(8, False)),
        ({"window": 8, "window_dilation": 3}, DilatedWindow(8, 3)),
        ({"window": 8, "sinks": 2}, SlidingWindow(8) | Sinks(2)),
        ({"window": 8, "sinks": 2, "causal": False}, SlidingWindow(8, False) | Sinks(2, False)),
        ({"chunk": 16}, Chunked(16)),
        ({"chunk": 16, "window": 8}, SlidingWindow(8) & Chunked(16)),
        ({"prefix": 5}, PrefixLM(5)),
    ],
    ids=str,
)
def test_sections_and_their_patterns(section: dict[str, Any], pattern: Pattern) -> None:
    config = RingConfig.from_deepspeed({"sequence_parallel_size": 2, "ring_attention": {"pattern": section}})
    assert pattern_from_config(config) == pattern


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"sinks": 2}, "pattern.sinks: .*window null, which sees all tokens already; leave it out"),
        ({"window_dilation": 2}, "pattern.window_dilation: .*it has no effect"),
        ({"prefix": 2, "causal": False}, "pattern.prefix: .*causal false, which hides no later token"),
        ({"prefix": 2, "window": 8}, "pattern.prefix: .*beside window 8, which hides later tokens"),
        ({"chunk": 0}, "pattern.chunk: expected a whole number of at least 1, or null, got 0"),
    ],
    ids=str,
)
def test_sections_that_mean_nothing_are_refused(section: dict[str, Any], said: str) -> None:
    with pytest.raises(RingConfigError, match=said):
        RingConfig.from_deepspeed({"sequence_parallel_size": 2, "ring_attention": {"pattern": section}})


def test_named_layers_keep_what_they_do_not_say() -> None:
    layers = {"0-2, 5": {"chunk": 16}, "4": {"window": None}}
    pattern: Any = {"window": 8, "documents": True, "layers": layers}
    config = RingConfig.from_deepspeed({"ring_attention": {"ring_size": 2, "pattern": pattern}})
    local = SlidingWindow(8) & Chunked(16)
    assert named_patterns(config) == {0: local, 1: local, 2: local, 5: local, 4: Causal()}
    assert pattern_from_config(config) == SlidingWindow(8)
