"""The cache of a generation: the parts of all ranks together are DynamicCache's, and decoding on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import NemotronHConfig, Qwen3NextConfig
from transformers.cache_utils import DynamicCache

from ds_ring import Causal, RingConfigError, make_layout
from ds_ring.decode import ring_cache
from ds_ring.decode.ring_cache import RingCache
from tests.unit.models.test_attention import FAMILIES, IDS, attached, build

LAYERS, RESERVED = 2, 2


def whole_of(caches: list[RingCache], layer: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Keys and values of all ranks in the order of positions; slots beyond the tokens are zeros."""
    found = []
    for name in ("keys", "values"):
        held: list[Any] = [getattr(cache.layers[layer], name) for cache in caches]
        whole = held[0].new_full((*held[0].shape[:2], tokens, held[0].shape[3]), torch.nan)
        for cache, part in zip(caches, held, strict=True):
            assert cache.layout is not None and part.shape[2] == cache.layout.local_tokens
            where = torch.from_numpy(cache.layout.positions(cache.ring_rank))
            known = (where >= 0) & (where < tokens)
            whole[:, :, where[known]] = part[:, :, known]
            assert not part[:, :, ~known].any()
        found.append(whole)
    return found[0], found[1]


@pytest.mark.parametrize(
    ("layout_name", "ring_size", "prompt"), [("zigzag", 3, 19), ("striped", 2, 8), ("zigzag", 4, 2)]
)
def test_all_ranks_together_hold_what_one_process_holds(
    monkeypatch: pytest.MonkeyPatch, layout_name: str, ring_size: int, prompt: int
) -> None:
    monkeypatch.setattr(ring_cache, "_RESERVED", RESERVED)
    generator = torch.Generator().manual_seed(0)
    layout = make_layout(layout_name, tokens=prompt, ring_size=ring_size, pattern=Causal())
    caches, alone = [RingCache(rank, ring_size) for rank in range(ring_size)], DynamicCache()
    tokens = 0
    for new in (prompt, 1, 1, 3, *[1] * (RESERVED * ring_size), 2):  # more than is reserved at once
        states = [torch.randn(2, 2, 2, new, width, generator=generator) for width in (4, 6)]  # by layer
        for cache in caches:
            assert cache.get_seq_length() == tokens and cache.get_mask_sizes(new, 0) == (tokens + new, 0)
            cache.begin(new, layout if tokens == 0 else None)
            assert cache.arriving == range(tokens, tokens + new)
            for layer in range(LAYERS):
                keys, values = (x[layer] for x in states)
                if tokens == 0:  # a shard, whose padding holds anything
                    where = torch.from_numpy(layout.positions(cache.ring_rank))
                    keys, values = (
                        torch.where((where >= 0)[:, None], x[:, :, where], 9.0) for x in (keys, values)
                    )
                got = cache.update(keys, values, layer)
                held: Any = cache.layers[layer]
                expected = (keys, values) if tokens == 0 else (held.keys, held.values)
                assert got[0] is expected[0] and got[1] is expected[1]
            cache.finish()
        tokens += new
        for layer in range(LAYERS):
            alone.update(states[0][layer], states[1][layer], layer)
            one: Any = alone.layers[layer]
            keys, values = whole_of(caches, layer, tokens)
            assert torch.equal(keys, one.keys) and torch.equal(values, one.values)
        most = max(cache.layout.local_tokens for cache in caches if cache.layout is not None)
        assert most <= -(-(tokens + RESERVED * ring_size) // ring_size) + 2
    order = torch.tensor([1, 1])
    for cache in caches:
        cache.reorder_cache(order)  # beams
    assert torch.equal(whole_of(caches, 1, tokens)[0], one.keys[order])
    with pytest.raises(RingConfigError, match="keeps all tokens"):
        caches[0].crop(1)
    caches[0].reset()
    assert caches[0].get_seq_length() == 0 and caches[0].layout is None


@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("Llama", {}),
        ("Llama", {"num_beams": 3}),
        ("Llama", {"prefill_chunk_size": 8}),
        ("Gemma 3, local and global", {}),
    ],
    ids=str,
)
def test_a_ring_of_one_decodes_what_the_model_alone_does(family: str, how: dict[str, Any]) -> None:
    """Rows of two lengths, padded on the left; logits of every step, which random weights decide closely."""
    mask = (torch.arange(IDS.shape[1]) >= torch.tensor([[0], [20]])).long()
    asked = {
        "max_new_tokens": 6,
        "attention_mask": mask,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    model, _ = attached(FAMILIES[family]())
    for one in (model.eval(), alone := build(FAMILIES[family](), "sdpa").eval()):
        one.generation_config.eos_token_id = None
    got, want = model.generate(IDS, **asked, **how), alone.generate(IDS, **asked, **how)
    assert torch.equal(got.sequences, want.sequences)
    for ours, right in zip(got.logits, want.logits, strict=True):
        torch.testing.assert_close(ours, right, atol=1e-5, rtol=1e-5)
    assert isinstance(got.past_key_values, RingCache)
    assert got.past_key_values.get_seq_length() == want.past_key_values.get_seq_length()


def test_layers_of_a_hybrid_are_those_that_its_configuration_says() -> None:
    """Attention, states, and none; after the prompt a convolution reads the inputs before a token."""
    kinds = ["linear_attention", "full_attention"]
    config = Qwen3NextConfig(num_hidden_layers=2, layer_types=kinds)
    layout = make_layout("contiguous", tokens=4, ring_size=1)
    cache, whole = RingCache(0, 1, config), DynamicCache(config=config)
    assert [type(layer) for layer in cache.layers] == [ring_cache.RingStateLayer, ring_cache.RingCacheLayer]
    inputs = torch.arange(12.0).view(1, 2, 6)
    for first, end in ((0, 4), (4, 5), (5, 6)):
        cache.begin(end - first, layout if first == 0 else None)
        new = inputs[..., first:end]
        read: Any = [one.layers[0].update_conv_state(new, conv_kernel_size=3) for one in (cache, whole)]
        assert first == 0 or torch.equal(*read)
        cache.finish()
    with_none = RingCache(0, 1, NemotronHConfig(layers_block_type=["mamba", "mlp", "attention"]))
    assert [type(layer).__name__ for layer in with_none.layers] == [
        "RingStateLayer", ring_cache.NO_CACHE_LAYER.__name__, "RingCacheLayer",
    ]  # fmt: skip
