"""Refusals of a bias of content and distance, and its module without a ring."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ds_ring.contrib.families.distance_bias import layers as distance_bias
from ds_ring.errors import RingConfigError
from ds_ring.models import checks
from tests.unit.models.calls import REQUEST

inkling = pytest.importorskip("transformers.models.inkling.modeling_inkling")


def small() -> Any:
    config = inkling.InklingTextConfig(
        vocab_size=61, hidden_size=16, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        n_routed_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    with torch.device("meta"):
        return inkling.InklingForCausalLM(config)


def test_the_backend_and_generation_are_refused() -> None:
    model = small()
    with pytest.raises(RingConfigError, match="its layers add a bias of content and distance"):
        checks.check_class(model, replace(REQUEST, as_is=True))
    assert "which no pass over a cache adds" in str(distance_bias.DistanceBias().refuse_generation(model))


def test_each_attention_has_a_bias_and_full_layers_scale() -> None:
    variant = distance_bias.DistanceBias()
    layers = [module for module in small().modules() if variant.matches(module)]
    assert len(layers) == 2
    assert [distance_bias.find_bias_module(layer) is layer.rel_logits_proj for layer in layers] == [
        True,
        True,
    ]
    assert not any(distance_bias.scales(layer) for layer in layers if layer.is_sliding)
