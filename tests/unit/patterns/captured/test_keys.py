"""The key "mask_mod": a function that is imported."""

from __future__ import annotations

from typing import Any

import pytest

from ds_ring import Causal, MaskMod, RingConfig, RingConfigError, RingPatternError, SlidingWindow
from ds_ring.config.section import pattern_from_config
from ds_ring.masks.pattern import Pattern
from tests.masks import every_third

NAME = "tests.masks:every_third"


def pattern_of(**keys: Any) -> Pattern:
    json = {"sequence_parallel_size": 2, "ring_attention": {"pattern": keys}}
    return pattern_from_config(RingConfig.from_deepspeed(json))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, MaskMod(every_third) & Causal()),
        ({"causal": False}, MaskMod(every_third)),
        ({"window": 8}, SlidingWindow(8) & MaskMod(every_third)),
    ],
)
def test_a_function_is_combined_with_the_other_keys(keys: dict[str, Any], expected: Pattern) -> None:
    assert pattern_of(mask_mod=NAME, **keys) == expected


@pytest.mark.parametrize("value", ["every_third", "tests.masks:", "a b:c", 3, [NAME]])
def test_what_is_no_name_is_refused(value: Any) -> None:
    with pytest.raises(RingConfigError, match=r'pattern\.mask_mod: expected "module:function", got'):
        pattern_of(mask_mod=value)


@pytest.mark.parametrize("name", ["no_such_module:fn", "tests.masks:gone"])
def test_what_cannot_be_imported_is_refused(name: str) -> None:
    with pytest.raises(RingPatternError, match=rf"expected a function that can be imported, got '{name}'"):
        pattern_of(mask_mod=name)
