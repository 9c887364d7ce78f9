"""Memory per rank is O(T/P), counted in tensors: on real gloo ranks, and on fake ones beyond this machine.

The sizes are small, so heads go round one by one (chunk_bytes) and the kernel's blocks are small: what does
not shrink with the shard must not hide what does. `tools/measure_memory.py` measures large ones.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from ds_ring import Causal, RingMesh, make_layout, shard_sequence
from ds_ring.measure.memory import measure_cpu_memory, shard_unit_bytes
from ds_ring.ops.context import make_ring_context
from ds_ring.ops.options import Options
from ds_ring.ops.ring_op import ring_attention_op
from ds_ring.ring.pool import Buffers
from tests.cases import Shape, tensors
from tests.dist.harness import Pool, RankPool

ROOT = Path(__file__).resolve().parents[2]
SHAPE = Shape(batch=1, query_heads=16, kv_heads=16, tokens=2048, head_dim=32)
FEW_HEADS = Shape(batch=1, query_heads=8, kv_heads=8, tokens=2048, head_dim=32)
GROUPED = Shape(batch=1, query_heads=16, kv_heads=4, tokens=2048, head_dim=32)
TENSORS = 8  # that live at the end: q, k, v, out, their gradients


class Measured(NamedTuple):
    """Bytes of one pass on one rank, in units of one local tensor [1, H, T / P, D].

    Attributes:
        peak: highest sum of live tensors, the inputs and the gradient of the output counted.
        after_forward: what the forward pass leaves behind, beyond its results: 0 if nothing of a hop is kept.
        after_backward: what both leave behind, beyond the results and gradients.
        unit_bytes: of such a tensor.
    """

    peak: float
    after_forward: float
    after_backward: float
    unit_bytes: int

    @property
    def peak_bytes(self) -> float:
        return self.peak * self.unit_bytes


def measured_pass(rank: int, world_size: int, shape: Shape, transport: str) -> Measured:
    """Forward and backward under the profiler."""
    mesh = RingMesh.from_world(world_size)
    layout = make_layout("zigzag", tokens=shape.tokens, ring_size=world_size)
    chunks = {"chunk_bytes": 1} if transport == "ring" else {}
    options = Options(transport=transport, kernel_options={"block": 256, "triangle": 128}, **chunks)
    handle = make_ring_context(Causal(), layout, mesh, options).handle
    q, k, v, grad = (shard_sequence(x, layout, mesh=mesh, dim=2) for x in tensors(shape))
    for x in (q, k, v):
        x.requires_grad_()
    with measure_cpu_memory() as forward:
        out, lse = ring_attention_op(q, k, v, handle)
    stored = mesh.owners[Buffers].free_bytes  # for the next call
    with measure_cpu_memory() as backward:
        out.backward(grad)
    inputs, results = sum(x.nbytes for x in (q, k, v, grad)), out.nbytes + lse.nbytes
    unit = shard_unit_bytes(1, shape.query_heads, layout.local_tokens, shape.head_dim, q.dtype)
    peak = inputs + max(forward.peak_bytes, results + stored + backward.peak_bytes)
    gradients = sum(x.grad.nbytes for x in (q, k, v) if x.grad is not None)
    after_forward = forward.end_bytes - results - stored
    after_backward = backward.end_bytes - gradients - (mesh.owners[Buffers].free_bytes - stored)
    mesh.owners[Buffers].release()
    assert mesh.owners[Buffers].free_bytes == 0
    return Measured(peak / unit, after_forward / unit, after_backward / unit, unit)


def largest(pool: RankPool, shape: Shape, transport: str) -> Measured:
    """That of the rank with the highest peak."""
    return max(pool.run(measured_pass, shape, transport, timeout_s=120))


def test_each_doubling_of_the_ring_halves_the_peak(rank_pool: Pool) -> None:
    ring = {size: largest(rank_pool(size), SHAPE, "ring") for size in (1, 2, 4)}
    for size in (2, 4):
        ratio = ring[size // 2].peak_bytes / ring[size].peak_bytes
        assert 1.8 < ratio < 2.2, (size, ring)
    # Eight tensors, 14 buffers of one head of sixteen ([Note: heads in groups]), the lse, and a workspace.
    assert all(TENSORS < result.peak < TENSORS + 14 / 16 + 1 / 32 + 0.1 for result in ring.values()), ring
    gathered = largest(rank_pool(4), SHAPE, "all_gather")
    assert gathered.peak > 1.5 * ring[4].peak, (gathered, ring)


@pytest.mark.night
def test_few_heads_have_as_few_buffers(rank_pool: Pool) -> None:
    # A chunk sets out once the keys of the one before are freed. Two ranks have six buffers of one
    # head of eight at once (the own keys side by side with values, gradients that leave, half a shard's that
    # return, the next keys), four have ten.
    # Beside them there are the lse and the kernel's workspace of a quarter of a MiB.
    few = {size: largest(rank_pool(size), FEW_HEADS, "ring") for size in (2, 4)}
    buffers = {2: 6, 4: 10}
    for size, result in few.items():
        assert result.peak < TENSORS + buffers[size] / 8 + 1 / 32 + (1 << 18) / result.unit_bytes, few


@pytest.mark.parametrize("shape", [SHAPE, GROUPED], ids=["H=G", "GQA"])
@pytest.mark.day("GQA")
def test_nothing_of_a_hop_is_kept(rank_pool: Pool, shape: Shape) -> None:
    """After the forward pass there is `out` and `lse`, after the backward pass the gradients, and no more.

    (Beside the buffers of messages, which are kept for the next call until they are released.)
    """
    for result in rank_pool(4).run(measured_pass, shape, "ring", timeout_s=120):
        assert abs(result.after_forward) < 0.01 and abs(result.after_backward) < 0.01, result


@pytest.mark.parametrize("large", [32, 64])
@pytest.mark.night  # `ds-ring simulate` and the ranks above hold the memory of a pass by day
def test_fake_ranks_of_a_large_ring_need_what_those_of_8_need(large: int) -> None:
    """Rank 0 with 1 Mi tokens each: no process, no byte, the same walk. (A ring of 1024 takes minutes.)"""
    command = [sys.executable, "tools/measure_memory.py", "--fake", "--json", "--heads", "2"]
    done = subprocess.run(
        [*command, "--local-tokens", str(1 << 20), "--ring-sizes", "8", str(large)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    eight, many = (json.loads(line) for line in done.stdout.splitlines())
    assert (eight["ring_size"], many["ring_size"]) == (8, large)
    assert many["shard_units"] == pytest.approx(eight["shard_units"], rel=0.01)
    # Of two heads one goes round: 11 / 2 buffers, and as workspace a whole head's dq, dk and dv.
    assert TENSORS + 10 / 2 <= many["shard_units"] <= TENSORS + 11 / 2 + 3 / 2 + 0.1
