"""Virtual ranks against real gloo ranks: the same results, the same bytes sent, the same memory."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ds_ring import RingMesh, make_layout, shard_sequence, simulate
from ds_ring.kernels.interface import drop_cached
from ds_ring.kernels.select import get_kernel
from ds_ring.measure.memory import measure_cpu_memory
from ds_ring.ops.context import make_ring_context
from ds_ring.ops.options import Options
from ds_ring.ops.ring_op import ring_attention_op
from ds_ring.simulation.simulate import BytesSent, SimulationOptions, SimulationResult
from tests.cases import PATTERNS, Shape, tensors
from tests.dist.harness import Pool
from tests.reference import relative_error

SHAPE = Shape(batch=1, query_heads=8, kv_heads=4, tokens=2001, head_dim=32)
CHUNK_BYTES = 1 << 16


class Real(NamedTuple):
    """What one gloo rank found, local."""

    found: dict[str, Tensor]
    bytes_sent: BytesSent
    peak_bytes: int


def real_pass(rank: int, world_size: int, pattern_name: str, layout_name: str, dtype: torch.dtype) -> Real:
    """Forward and backward of a rank, counted and measured."""
    mesh = RingMesh.from_world(world_size)
    pattern = PATTERNS[pattern_name](SHAPE.tokens)
    layout = make_layout(layout_name, tokens=SHAPE.tokens, ring_size=world_size)
    context = make_ring_context(pattern, layout, mesh, Options(chunk_bytes=CHUNK_BYTES))
    inputs = tensors(SHAPE, dtype)
    counters = context.exchange.counters
    drop_cached(get_kernel("auto", "cpu"))  # of tests before
    with measure_cpu_memory() as memory:
        q, k, v = (shard_sequence(x, layout, mesh=mesh, dim=2).requires_grad_() for x in inputs[:3])
        out, _ = ring_attention_op(q, k, v, context.handle)
        forward = counters.bytes_sent
        out.backward(shard_sequence(inputs[3], layout, mesh=mesh, dim=2))
    found = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    return Real(found, BytesSent(forward, counters.bytes_sent - forward), memory.peak_bytes)


def virtual_pass(
    world_size: int, pattern_name: str, layout_name: str, dtype: torch.dtype
) -> SimulationResult:
    q, k, v, grad = tensors(SHAPE, dtype)
    return simulate(
        q,
        k,
        v,
        pattern=PATTERNS[pattern_name](SHAPE.tokens),
        layout=make_layout(layout_name, tokens=SHAPE.tokens, ring_size=world_size),
        grad_out=grad,
        options=SimulationOptions(chunk_bytes=CHUNK_BYTES),
    )


@pytest.mark.day("2-causal-zigzag-float32")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("pattern_name", "layout_name"), [("causal", "zigzag"), ("dilated", "contiguous")])
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_virtual_ring_is_the_real_one(
    rank_pool: Pool, world_size: int, pattern_name: str, layout_name: str, dtype: torch.dtype
) -> None:
    arguments = (pattern_name, layout_name, dtype)
    real = rank_pool(world_size).run(real_pass, *arguments, timeout_s=60)
    virtual = virtual_pass(world_size, *arguments)
    layout = make_layout(layout_name, tokens=SHAPE.tokens, ring_size=world_size)
    tolerance = 1e-6 if dtype == torch.float32 else 2**-7  # a last bit of bfloat16 may fall either way
    for rank, item in enumerate(real):
        assert virtual.bytes_sent[rank] == item.bytes_sent, rank
        assert virtual.memory[rank].peak_bytes == pytest.approx(item.peak_bytes, rel=0.03), rank
        for name, tensor in item.found.items():
            local = shard_sequence(getattr(virtual, name), layout, dim=2, ring_rank=rank)
            assert tensor.dtype == local.dtype == dtype
            assert relative_error(local, tensor) < tolerance, (rank, name)
