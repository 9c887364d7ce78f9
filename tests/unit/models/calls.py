"""One call of the adapter's parts without a model: a batch on one rank, and what attention is given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ds_ring.comm.mesh import RingMesh
from ds_ring.config.section import RingConfig
from ds_ring.data import batch
from ds_ring.data.batch_sharding import BatchSharding
from ds_ring.data.layer_patterns import LayerPatterns
from ds_ring.decode import generation
from ds_ring.masks.catalog import Causal
from ds_ring.models import attention
from ds_ring.models.attach import attach
from ds_ring.models.attention_name import NAME
from ds_ring.models.variant import AttachRequest
from ds_ring.schedule.layout import make_layout
from tests.sessions import session_of

IDS = torch.ones(2, 4, dtype=torch.int64)
REQUEST = AttachRequest(RingConfig(ring_size=2))
ON = SimpleNamespace(config=SimpleNamespace(_attn_implementation=NAME))


def sharding(pattern: Any = None) -> BatchSharding:
    pattern = Causal() if pattern is None else pattern
    config = RingConfig.from_deepspeed({"sequence_parallel_size": 1, "ring_attention": {}})
    layout = make_layout("contiguous", tokens=4, ring_size=1)
    return BatchSharding(config, layout, RingMesh.single(), LayerPatterns(pattern, {}))


def cached() -> Any:
    """Where the tokens of a generation lie."""
    one = sharding()
    positions = torch.arange(4)
    return generation.CachedSharding(one.config, one.layout, one.mesh, one.patterns, q_positions=positions)


def check_alone(model: Any, pattern: dict[str, Any]) -> None:
    """Compare logits of `IDS` before a model is attached, on a ring of one rank, and with the ring off."""
    model, session = model.eval(), session_of(pattern=pattern)
    before = model(input_ids=IDS).logits
    attach(model, session)
    on_ring = model(**session.shard_batch({"input_ids": IDS})).logits
    with session.off():
        off = model(input_ids=IDS).logits
    assert torch.equal(before, off)
    torch.testing.assert_close(before, on_ring)


def attend(keys: int = 4, **given: Any) -> Any:
    q, k = torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, keys, 8)
    mask = given.pop("attention_mask", None)
    module = given.pop("module", nn.Linear(1, 1))
    return attention.attention(module, q, k, k, mask, **{batch.SHARDING: sharding()} | given)
