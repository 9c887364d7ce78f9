"""Packed sequences of Megatron: which tokens are documents, and which are padding between them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ds_ring import Documents
from ds_ring.errors import RingConfigError

megatron = pytest.importorskip("ds_ring.contrib.megatron.core_attention", exc_type=ImportError)


def test_padding_after_each_sequence_belongs_to_no_document() -> None:
    """Three tokens of four, then five of eight, in rings of two: multiples of four."""
    layout, documents = megatron._packing((0, 3, 8), (0, 4, 12), 2)
    assert documents == Documents([0, 0, 0, -1, 1, 1, 1, 1, 1, -1, -1, -1])
    assert (layout.tokens, layout.ring_size) == (12, 2)


def make_core(**changes: Any) -> Any:
    """The attention of a layer of 4 heads and 2 K/V heads, on a ring of one."""
    values = {
        "attention_dropout": 0.0, "window_size": None, "kv_channels": 8, "num_attention_heads": 4,
        "softmax_type": "vanilla", "use_cpu_initialization": True, "params_dtype": torch.float32,
        "perform_initialization": True, "init_method": lambda x: nn.init.constant_(x, 0.5),
    }  # fmt: skip
    one = SimpleNamespace(size=lambda: 1)
    return megatron.RingCoreAttention(
        SimpleNamespace(**values | changes), 1, megatron.AttnMaskType.causal, "self",
        pg_collection=SimpleNamespace(cp=one, tp=one),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "sink", "window"),
    [
        ({}, None, None),
        ({"window_size": (3, 0)}, None, 4),
        ({"window_size": (-1, 0)}, None, None),
        ({"softmax_type": "off-by-one"}, 0.0, None),
        ({"softmax_type": "learnable", "window_size": (2, 0)}, 0.5, 3),
        ({"softmax_type": "learnable", "perform_initialization": False}, 7.0, None),
    ],
    ids=str,
)
def test_windows_and_sinks_are_those_of_the_config(
    changes: dict[str, Any], sink: float | None, window: int | None
) -> None:
    core = make_core(**changes)
    if sink == 7.0:
        nn.init.constant_(core.softmax_offset, sink)
    q, k, v = (torch.randn(9, 2, heads, 8) for heads in (4, 2, 2))
    scores = torch.einsum("sbhd,tbhd->bhst", q, k.repeat_interleave(2, 2)) / 8**0.5
    distance = torch.arange(9)[:, None] - torch.arange(9)
    seen = (distance >= 0) & (distance < (window or 9))
    scores = torch.cat([scores.masked_fill(~seen, -torch.inf), torch.full((2, 4, 9, 1), sink or 0.0)], -1)
    weights = (scores if sink is not None else scores[..., :-1]).softmax(-1)[..., :9]
    wanted = torch.einsum("bhst,tbhd->sbhd", weights, v.repeat_interleave(2, 2)).flatten(2)
    assert torch.allclose(core(q, k, v, None), wanted, atol=1e-5)


def test_a_mask_of_no_type_sees_all_and_sequences_see_themselves() -> None:
    core = make_core()
    q, k, v = (torch.randn(6, 1, heads, 8) for heads in (4, 2, 2))
    out = core(q, k, v, None, attn_mask_type=megatron.AttnMaskType.no_mask)
    grouped = [x.permute(1, 2, 0, 3) for x in (q, k, v)]
    wanted = nn.functional.scaled_dot_product_attention(*grouped, enable_gqa=True)
    assert torch.allclose(out, wanted.permute(2, 0, 1, 3).flatten(2), atol=1e-5)
    ends = torch.tensor([0, 2, 6])
    packed = SimpleNamespace(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
    )  # fmt: skip
    out = core(q[:, 0], k[:, 0], v[:, 0], None, packed_seq_params=packed)
    parts = [core(*(x[part] for x in (q, k, v)), None)[:, 0] for part in (slice(2), slice(2, 6))]
    assert torch.allclose(out, torch.cat(parts), atol=1e-5)


def test_another_softmax_is_refused() -> None:
    words = "softmax_type: expected vanilla, off-by-one or learnable, got 'x'"
    with pytest.raises(RingConfigError, match=words):
        make_core(softmax_type="x")
