"""What can be asked for, and a sentence for what cannot."""

from __future__ import annotations

from typing import Any

import pytest

from ds_ring.errors import RingConfigError, RingMeshError
from ds_ring_launcher.tune.request import request_from
from tests.unit.launcher.tune.cases import request

SIZES = {"tokens": 4096, "heads": 4, "head_dim": 64, "world_size": 4}


def test_all_ranks_share_a_sequence_unless_the_json_says_otherwise() -> None:
    assert request(4).sequence_size == 4
    assert request(4, section={"ring_size": 2}).sequence_size == 2
    assert request_from({"sequence_parallel_size": 2, "ring_attention": {}}, **SIZES).sequence_size == 2
    assert request_from({}, **SIZES).sequence_size == 4  # the section may be missing


def test_sizes_of_the_section_are_open_and_the_rest_is_kept() -> None:
    asked = request(4, section={"ring_size": 2, "ulysses_size": 2, "check_finite": True, "prune": False})
    assert (asked.base.ring_size, asked.base.ulysses_size) == (4, 1)
    assert asked.base.check_finite and not asked.base.prune


def test_the_source_is_not_changed() -> None:
    whole: dict[str, Any] = {"ring_attention": {"ring_size": 2}}
    request_from(whole, **SIZES)
    assert whole == {"ring_attention": {"ring_size": 2}}


@pytest.mark.parametrize(
    ("keys", "whole", "words"),
    [
        ({"tokens": 0}, {}, ["tokens: expected a whole number of at least 1, got 0"]),
        ({"heads": -1}, {}, ["heads: expected", "got -1"]),
        ({"head_dim": 1.5}, {}, ["head-dim: expected", "got 1.5"]),
        ({"world_size": 0}, {}, ["processes: expected", "got 0"]),
        ({"batch": True}, {}, ["batch: expected", "got True"]),
        ({"kv_heads": 3}, {}, ["kv-heads: expected a divisor of 4 heads, got 3; use one of 1, 2, 4"]),
        ({"dtype": "fp8"}, {}, ["dtype: expected one of float32, bfloat16, float16, got 'fp8'"]),
        ({"device": "tpu"}, {}, ["device: expected one of cpu, cuda, got 'tpu'"]),
        ({"tokens": 3}, {}, ["at least 4, one a rank, got 3"]),
        ({}, {"ring_attention": {"pattern": {"windw": 4}}}, ["windw", "did you mean 'window'?"]),
        ({}, {"ring_attention": 4}, ["expected an object {...}, got 4"]),
        ({}, {"ring_attention": {}, "sequence_parallel_size": "4"}, ['got "4"; ']),
    ],
)  # fmt: skip
def test_refusals(keys: dict[str, Any], whole: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(RingConfigError) as caught:
        request_from(whole, **(SIZES | keys))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_ranks_that_do_not_fall_into_whole_groups() -> None:
    with pytest.raises(RingMeshError, match="sequence_parallel_size 3 does not divide world size 4"):
        request_from({"sequence_parallel_size": 3}, **SIZES)
