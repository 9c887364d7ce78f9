"""Refusals of a bias of content and distance, and its module without a ring."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_ring.contrib.families.distance_bias import layers as distance_bias
from ds_ring.errors import RingConfigError
from ds_ring.models import checks
from tests.unit.models.calls import REQUEST, sharding

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


def test_queries_grow_with_their_position_as_in_the_layer() -> None:
    """1 + alpha log(max((p + 1) / floor, 1)) for token p: `InklingAttention.forward`."""
    config = inkling.InklingTextConfig(log_scaling_n_floor=2, log_scaling_alpha=0.5)
    full = SimpleNamespace(config=config, sliding_window=None, rel_logits_proj=None)
    call: Any = SimpleNamespace(module=full, sharding=sharding(), q_BHSD=torch.zeros(1, 2, 4, 8))
    tau = distance_bias._scaling(call)
    wanted = [1.0, 1.0, 1 + 0.5 * math.log(3 / 2), 1 + 0.5 * math.log(2)]
    torch.testing.assert_close(tau.flatten(), torch.tensor(wanted))
