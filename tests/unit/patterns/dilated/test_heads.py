"""The heads of a Ulysses rank see what they see among all heads."""

from __future__ import annotations

import numpy as np
import pytest

from ds_ring.masks.catalog import Causal, HeadShard
from ds_ring.patterns.dilated.pattern import Dilated

HEADS, KV_HEADS, POSITIONS = 8, 4, np.arange(64)


@pytest.mark.parametrize("offsets", ["paper", "paper_kv", "torchscale", "zero"])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_a_part_of_the_heads_is_a_part_of_the_pattern(parts, offsets):
    whole = Dilated((16, 64), (2, 4), True, offsets)
    heads, kv_heads = HEADS // parts, KV_HEADS // parts
    for part in range(parts):
        pattern = HeadShard(whole, part, parts)
        for head in range(heads):
            got = pattern.mask(POSITIONS, POSITIONS, head, heads, kv_heads)
            assert np.array_equal(got, whole.mask(POSITIONS, POSITIONS, part * heads + head, HEADS, KV_HEADS))
        bound = pattern.bind((0, 1), heads, kv_heads)
        assert bound == whole.bind((part * heads, part * heads + 1), HEADS, KV_HEADS)


def test_a_pattern_that_knows_no_heads_stays():
    assert HeadShard(Causal(), 1, 2).bind((0,), 1, 1) == Causal().bind((0,), 1, 1)
