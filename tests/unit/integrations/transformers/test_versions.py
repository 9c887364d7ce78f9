"""Whether the integration takes other names of other versions, and refuses by feature what one lacks."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import cache_utils
from transformers.models.gptj.modeling_gptj import GPTJAttention
from transformers.models.llama.modeling_llama import LlamaAttention

from ds_ring.errors import RingConfigError
from ds_ring.integrations.adapter import imports_of
from ds_ring.integrations.deepspeed.batch import cache_name
from ds_ring.integrations.transformers import generation
from ds_ring.integrations.transformers.variants import eager_attention
from ds_ring.integrations.transformers.variants.indexed import IndexedLayer
from ds_ring.integrations.transformers.variants.recurrent.layers import WRAPPERS

RING_CACHE = "ds_ring.integrations.transformers.ring_cache"


@pytest.fixture
def fresh_ring_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ring_cache be imported again."""
    monkeypatch.delitem(sys.modules, RING_CACHE, raising=False)
    package = sys.modules[RING_CACHE.rpartition(".")[0]]
    monkeypatch.delattr(package, "ring_cache", raising=False)


def test_the_cache_does_without_layers_that_hold_nothing(
    fresh_ring_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(cache_utils, "DummyLayer", raising=False)  # as in 5.18 to 5.22
    cache = importlib.import_module(RING_CACHE).RingCache(0, 2)
    assert cache.layers == []


def test_a_name_that_is_missing_refuses_generation_alone(
    fresh_ring_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(cache_utils, "LinearAttentionLayer")
    with pytest.raises(RingConfigError, match=r"generate on a ring: .*LinearAttentionLayer"):
        generation._cache_class()


def test_an_import_that_fails_is_a_refusal_by_name() -> None:
    with (
        pytest.raises(RingConfigError, match=r"pictures: expected a version of torch .*do without pictures"),
        imports_of("pictures", "torch"),
    ):
        from torch import no_such_name  # type: ignore[attr-defined]  # noqa: F401


@pytest.mark.parametrize(
    ("names", "name"),
    [
        ("x cache", "cache"),
        ("x past_key_values", "past_key_values"),
        ("x cache_params", "cache_params"),
        ("x", "past_key_values"),
    ],
)
def test_a_cache_goes_by_the_name_that_a_function_has(names: str, name: str) -> None:
    assert cache_name(names.split()) == name


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_an_indexer_gets_its_keys_by_its_own_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Indexer(nn.Module):
        if name == "cache":

            def forward(self, x: Tensor, cache: Any = None) -> Tensor:
                return x
        else:

            def forward(self, x: Tensor, past_key_values: Any = None) -> Tensor:
                return x

    layer = nn.Module()
    layer.indexer = Indexer()
    hooks = IndexedLayer(layer)
    with pytest.raises(RingConfigError, match="Indexer: expected a call without a cache"):
        hooks.give_keys(layer.indexer, (), {name: object()})


@pytest.mark.parametrize(
    ("function", "given"),
    [
        ("MiniMaxLightningAttention.forward", {"hidden_states": 1, "position_embeddings": 2}),
        ("ZayaCCAProjection.forward", {"hidden_states": 1, "conv_mask": 2}),
        ("Qwen4ExpTextNGramEmbedding.forward", {"input_ids": 1}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_wrapped_method_keeps_the_names_of_its_arguments(
    function: str, given: dict[str, Any], name: str
) -> None:
    def original(layer: Any, **kwargs: Any) -> Any:
        return kwargs

    asked = given | {name: None}
    assert WRAPPERS[function](original, SimpleNamespace(), **asked) == asked  # without a ring


def test_attention_is_written_out_where_the_class_does_not_ask_the_interface() -> None:
    class WritesItOut(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    assert eager_attention._asks_interface(LlamaAttention)
    assert not eager_attention._asks_interface(WritesItOut)
    names = GPTJAttention.forward.__code__.co_names  # 5.24 hands it to the interface
    assert eager_attention._asks_interface(GPTJAttention) == ("ALL_ATTENTION_FUNCTIONS" in names)


def test_the_slopes_of_alibi_are_the_models_own() -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    slopes = eager_attention._bloom_alibi(SimpleNamespace(num_heads=6), 2.0).slopes
    whole = build_alibi_tensor(torch.ones(1, 9, dtype=torch.int64), 6, torch.float64)[:, 0]
    found = torch.tensor(slopes, dtype=torch.float64)[:, None] * torch.arange(9) / 2
    torch.testing.assert_close(found, whole)
