"""Refusals of a learned bias of distances."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

from ds_ring import Causal, Full, RingMesh, make_layout, ring_attention
from ds_ring.contrib.families.relative_bias import layers as relative_bias
from ds_ring.errors import RingConfigError
from ds_ring.models.attention_name import NAME
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


@pytest.mark.parametrize("is_decoder", [False, True])
def test_bands_together_are_the_modules_own_attention(is_decoder: bool) -> None:
    """Out, and the gradients of q, k, v and of the table."""
    config = T5Config(
        is_decoder=is_decoder, d_model=16, d_kv=4, num_heads=4, relative_attention_num_buckets=8,
        relative_attention_max_distance=20,
    )  # fmt: skip
    module: Any = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).double()
    layout, mesh = make_layout("contiguous", tokens=61, ring_size=1), RingMesh.single()

    def attention(scale: float | None, pattern: Any) -> Any:
        return partial(ring_attention, pattern=pattern, layout=layout, mesh=mesh, scale=scale)

    leaves = [torch.randn(2, 4, 61, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    inputs = [*leaves, module.relative_attention_bias.weight]

    def gradients(out: Tensor) -> list[Tensor]:
        return [out, *torch.autograd.grad((out * torch.linspace(0, 1, 61)[:, None]).sum(), inputs)]

    sharding: Any = SimpleNamespace(layout=layout, attention=attention)
    bias = relative_bias.RelativeBias(module, True)
    found = gradients(bias.attend(sharding, *leaves, Causal() if is_decoder else Full(), 1.0))
    scores = leaves[0] @ leaves[1].transpose(2, 3) + module.compute_bias(61, 61)
    hidden = torch.ones(61, 61, dtype=torch.bool).triu(1) & is_decoder
    wanted = gradients(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ leaves[2])
    for x, y in zip(found, wanted, strict=True):
        assert torch.allclose(x, y, rtol=1e-9, atol=1e-11)


def test_off_a_ring_the_bias_is_the_modules_own() -> None:
    config = T5Config(d_model=16, d_kv=4, num_heads=4, is_decoder=False)
    for has_table in (True, False):
        module: Any = T5Attention(config, has_relative_attention_bias=has_table, layer_idx=0)
        compute, config._attn_implementation = relative_bias.wrap_bias(module), "eager"
        wanted = module.compute_bias(5, 5) if has_table else torch.zeros(1, 4, 5, 5)
        assert torch.equal(compute(5, 5), wanted)
        config._attn_implementation = NAME
        assert compute(5, 5).has_table == has_table
