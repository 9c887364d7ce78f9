"""What `ds-ring plan` says of multi-head latent attention: parameters, bytes, and when latents pay."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from ds_ring_launcher.plan.advice import latents_on_the_wire
from ds_ring_launcher.plan.estimate import estimate
from ds_ring_launcher.plan.model_file import ModelShape, read_model
from tests.unit.launcher.plan.test_node_orders import setting

SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 256, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
}  # fmt: skip


def shape(**more: object) -> ModelShape:
    from argparse import Namespace

    names = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab")
    text = json.dumps(SIZES | more)
    return read_model(Namespace(hf_config=text, **dict.fromkeys(names)))


@pytest.mark.parametrize("query_latent", [None, 12])
def test_the_parameters_are_those_of_the_layer(query_latent: int | None) -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    with torch.device("meta"):
        layer = DeepseekV3Attention(DeepseekV3Config(**SIZES, q_lora_rank=query_latent), 0)
    matrices = sum(x.numel() for x in layer.parameters() if x.dim() == 2)
    assert shape(q_lora_rank=query_latent).attention_parameters == matrices


def test_bytes_arithmetic_and_break_even_by_hand() -> None:
    model = shape()
    assert model.head_dim == (8 + 4 + 6) // 2
    assert latents_on_the_wire(estimate(setting(4))) is None  # grouped queries
    found = estimate(replace(setting(4), model=model))
    one = latents_on_the_wire(found)
    assert one is not None
    (layer,) = found.passes
    sent = layer.cost.forward_bytes + layer.cost.backward_bytes
    assert one.expanded_bytes == sent
    assert one.latent_bytes == round(sent * (16 + 4) / (4 * (8 + 4 + 6)))
    tokens = layer.cost.forward_bytes / (4 * (8 + 4 + 6) * 4)
    products = 4 * tokens + 1024
    hardware = found.setting.hardware
    rate = hardware.flops("float32") * hardware.matmul_efficiency
    assert one.expansion_s == pytest.approx(2 * 16 * 4 * (8 + 6) * products / rate)
    assert one.pays_below_bytes_per_s == pytest.approx(sent / (layer.cost.compute_s + one.expansion_s))


def test_latents_are_faster_below_the_break_even_and_not_above() -> None:
    base = replace(setting(4), model=shape())
    one = latents_on_the_wire(estimate(base))
    assert one is not None

    def seconds(bytes_per_s: float) -> float:
        values = {"intra_node_bytes_per_s": bytes_per_s, "inter_node_bytes_per_s": bytes_per_s}
        machine = base.hardware.model_copy(update=values)
        return estimate(replace(base, hardware=machine)).passes[0].cost.seconds

    with_latents = estimate(base).passes[0].cost.compute_s + one.expansion_s
    assert seconds(one.pays_below_bytes_per_s / 4) > with_latents
    assert seconds(one.pays_below_bytes_per_s * 1e6) < with_latents


def test_latents_are_faster_with_fewer_tokens_than_the_break_even_and_not_with_more() -> None:
    base = replace(setting(4, tokens=1 << 14), model=shape())
    one = latents_on_the_wire(estimate(base))
    assert one is not None and one.pays_below_tokens_per_rank > 0

    def pays_below(shard: int) -> float:
        found = latents_on_the_wire(estimate(replace(base, tokens=4 * shard)))
        assert found is not None
        return found.pays_below_bytes_per_s

    few, many = (one.pays_below_tokens_per_rank * n // 4 for n in (3, 5))
    assert pays_below(many) < base.bytes_per_s < pays_below(few)
