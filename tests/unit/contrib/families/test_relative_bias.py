"""Refusals of a learned bias of distances."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

from ds_ring.contrib.families.relative_bias import layers as relative_bias
from ds_ring.errors import RingConfigError
from tests.refusals import Refusals, refuse
from tests.unit.models.calls import attend


def biased() -> Any:
    bias = object.__new__(relative_bias.RelativeBias)
    vars(bias)["has_table"] = True
    return attend(position_bias=bias)


COMPILED: Refusals = {
    "a bias of distances": (biased, RingConfigError, "adds a learned bias of distances"),
}  # fmt: skip


test_compiled_code_is_refused = refuse(COMPILED, compiling=True)


@pytest.mark.parametrize("is_decoder", [False, True])
def test_bands_have_the_bucket_of_each_distance(is_decoder: bool) -> None:
    config = T5Config(
        is_decoder=is_decoder, relative_attention_num_buckets=8, relative_attention_max_distance=20,
    )  # fmt: skip
    module: Any = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    distances = torch.arange(-60, 61)
    settings = {"bidirectional": not is_decoder, "num_buckets": 8, "max_distance": 20}
    wanted = module._relative_position_bucket(-distances, **settings).tolist()
    bands = relative_bias.RelativeBias(module, True).bands(tokens=61)
    for distance, bucket in zip(distances.tolist(), wanted, strict=True):
        assert [name for least, most, name in bands if least <= distance <= most] == [bucket], distance
