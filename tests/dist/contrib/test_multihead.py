"""`MultiheadRingAttention` on rings of 2 and 4 against the formula: the output and every gradient by itself.

Tokens do not divide by the ranks, so shards have padding. A parameter's gradient is the sum of the ranks'.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_ring import (
    Causal,
    Dilated,
    Full,
    MultiheadRingAttention,
    RingMesh,
    gather_sequence,
    make_layout,
    shard_sequence,
)
from tests.dist.harness import Pool
from tests.multihead import dense
from tests.reference import relative_error

E, H, T = 32, 4, 46
DILATED = Dilated((8, 16, 46), (1, 2, 4))


def on_a_ring(
    rank: int, world_size: int, pattern: Any, layout_name: str, extra: dict[str, Any], compiled: bool
) -> dict[str, float]:
    """Relative error of the output and of each gradient, by name, of two steps."""
    ulysses = extra.pop("ulysses_size", 1)
    mesh = RingMesh.from_world(world_size // ulysses, ulysses)
    layout = make_layout(
        layout_name, tokens=T, ring_size=mesh.ring_size, pattern=pattern, multiple_of=ulysses
    )
    module = MultiheadRingAttention(
        E, H, mesh=mesh, pattern=pattern, layout=layout, dtype=torch.float64, **extra
    )
    torch._dynamo.reset()
    call: Any = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
    errors: dict[str, float] = {}
    for _ in range(2):
        *inputs, grad = torch.randn(4, 2, T, E, dtype=torch.float64)
        shards = [shard_sequence(x, layout, mesh=mesh, dim=1).requires_grad_() for x in inputs]
        module.zero_grad()
        out, _ = call(*shards)
        out.backward(shard_sequence(grad, layout, mesh=mesh, dim=1))
        got: dict[str, Tensor] = {"out": gather_sequence(out, layout, mesh=mesh, dim=1)}
        for name, shard in zip(("query", "key", "value"), shards, strict=True):
            assert shard.grad is not None
            got[name] = gather_sequence(shard.grad, layout, mesh=mesh, dim=1)
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            got[name] = parameter.grad
        want = dense(module, pattern, tuple(inputs), grad)
        assert got.keys() == want.keys()
        for name in want:
            errors[name] = max(errors.get(name, 0.0), relative_error(got[name], want[name]))
    return errors


@pytest.mark.parametrize(
    ("world_size", "pattern", "layout", "extra", "compiled"),
    [
        (2, Causal(), "zigzag", {"kv_heads": 2}, False),
        (2, DILATED, "contiguous", {"sub_layer_norm": True}, True),
        (4, Causal(), "zigzag", {"bias": False}, False),
        (4, DILATED, "residue", {"sub_layer_norm": True}, False),
        (4, Full(), "contiguous", {"ulysses_size": 2}, False),
    ],
    ids=lambda x: str(x)[:10],
)
def test_every_gradient_is_that_of_one_process(
    rank_pool: Pool, world_size: int, pattern: Any, layout: str, extra: dict[str, Any], compiled: bool
) -> None:
    for errors in rank_pool(world_size).run(on_a_ring, pattern, layout, extra, compiled):
        assert len(errors) == (6 if "bias" in extra else 10 if "sub_layer_norm" in extra else 8)
        assert max(errors.values()) < 1e-11, errors


def asked_for_more(rank: int, world_size: int) -> None:
    """Rank 1 alone passes a mask; then nobody does."""
    mesh = RingMesh.from_world(world_size)
    module = MultiheadRingAttention(E, H, mesh=mesh, pattern=Causal())
    x = torch.randn(1, 8, E)
    try:
        module(x, x, x, attn_mask=torch.ones(8, 16) if rank == 1 else None)
    finally:
        module(x, x, x, need_weights=False)


def test_what_one_rank_refuses_all_hear_of(rank_pool: Pool) -> None:
    first, second = rank_pool(2).collect(asked_for_more)
    assert (first.error_type, second.error_type) == ("RingMismatchError", "RingPatternError")
    assert "rank 1 refused its own input: attn_mask: expected None, got Tensor" in first.report
