"""What `check_model` says of an attention that is neither transformers' nor ds_ring's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from transformers import (
    AttentionInterface,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ds_ring import RingConfig, RingConfigError
from ds_ring.models.attach import check_model
from ds_ring.models.copies import TransformersCopies
from ds_ring_launcher.check.small_model import build, read_config, shrink

CONFIG = RingConfig.from_deepspeed({"sequence_parallel_size": 2, "ring_attention": {}})


def with_own_mask(*args: Any, **kwargs: Any) -> Any:
    return sdpa_attention_forward(*args, **kwargs)


@pytest.fixture
def own() -> Iterator[str]:
    AttentionInterface.register("own", with_own_mask)
    yield "own"
    del AttentionInterface._global_mapping["own"]


def model_of(implementation: str) -> LlamaForCausalLM:
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
    config = LlamaConfig(**sizes, num_hidden_layers=1, attn_implementation=implementation)
    return LlamaForCausalLM(config)


def test_an_attention_of_the_users_is_not_replaced_in_silence(own: str) -> None:
    """Its mask would be gone: the model would train on another attention."""
    with pytest.raises(
        RingConfigError, match="expected an attention of transformers, got 'own' of tests"
    ) as e:
        check_model(model_of(own), CONFIG)
    assert "see configs/examples/batch_mask.py" in str(e.value)


def test_an_attention_of_the_users_that_came_after_the_rings_serves_the_copy_of_one_process(own: str) -> None:
    model, copy = model_of("ds_ring"), model_of("sdpa")
    TransformersCopies().set_attention(copy, model, CONFIG)
    assert copy.config._attn_implementation == "sdpa"
    model.set_attn_implementation(own)
    TransformersCopies().set_attention(copy, model, CONFIG)
    assert copy.config._attn_implementation == own


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_those_of_transformers_are(implementation: str) -> None:
    check_model(model_of(implementation), CONFIG)


@pytest.mark.situation("configurations", "Gemma with use_bidirectional_attention: sdpa, eager")
def test_a_gemma_that_looks_both_ways_is_refused_unless_it_was_loaded_with_eager_attention() -> None:
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
    sizes |= {"num_hidden_layers": 1, "head_dim": 8}
    for implementation in ("sdpa", "eager"):
        config = GemmaConfig(
            **sizes, use_bidirectional_attention=True, attn_implementation=implementation, pad_token_id=0
        )
        model = GemmaForCausalLM(config)
        if implementation == "eager":  # causal, as its masks are
            check_model(model, CONFIG)
            continue
        with pytest.raises(RingConfigError, match=r"config\.use_bidirectional_attention lets sdpa attend"):
            check_model(model, CONFIG)


@pytest.mark.parametrize(
    ("family", "setting"),
    [
        ("jamba", {"attn_layer_period": 1, "attn_layer_offset": 0}),
        ("bamba", {"attn_layer_indices": [0, 1]}),
        ("qwen3_next", {"layer_types": ["full_attention"] * 2}),
    ],
)
def test_a_hybrid_of_attention_layers_alone_is_not_said_to_have_a_state(
    family: str, setting: dict[str, Any]
) -> None:
    config = shrink(read_config(family), 40, 2, {})
    for key, value in setting.items():
        setattr(config, key, value)
    with pytest.raises(RingConfigError, match="configuration has attention layers alone") as error:
        check_model(build(config, "causal-lm", 0), CONFIG)
    assert "from token to token" not in str(error.value)
