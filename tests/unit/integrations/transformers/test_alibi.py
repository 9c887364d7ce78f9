"""Falcon's ALiBi on a ring is the tensor that Falcon adds, rounded to bfloat16 as there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.falcon.modeling_falcon import build_alibi_tensor

from ds_ring.integrations.transformers.variants import eager_attention


@pytest.mark.parametrize("heads", [4, 6])
def test_falcons_alibi_is_rounded_as_falcon_rounds_it(heads: int) -> None:
    tokens, factor = 600, 0.25  # from 257 keys on bfloat16 has no number for each
    expected = build_alibi_tensor(torch.ones(1, tokens, dtype=torch.int64), heads, torch.float32)[:, 0]
    module: Any = SimpleNamespace(num_heads=heads)
    change = eager_attention._falcon_alibi(module, factor)
    got = change(
        torch.zeros(heads, tokens), None, torch.arange(heads)[:, None], None, torch.arange(tokens)[None]
    )
    assert torch.equal(got, expected * factor)
    assert not torch.equal(got, torch.tensor(change.slopes)[:, None] * torch.arange(tokens) * factor)
