"""What ranks really multiply and send under `auto`, at realistic lengths: counted where it happens.

FLOPs are torch's own count of the operators that each kernel call runs (its flop counter does not know the
CPU's flash attention by name, so it is told that its formulas apply); the plan is asked only afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from ds_ring import RingMesh, make_layout, shard_sequence
from ds_ring.kernels.select import get_kernel
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.tiles import Tiles
from ds_ring.ops.context import make_ring_context
from ds_ring.ops.options import Options
from ds_ring.ops.ring_op import ring_attention_op
from ds_ring.schedule.plan import build_plan
from tests.cases import LONG_PATTERNS, Shape, tensors
from tests.dist.harness import Pool

TOKENS, HEADS, HEAD_DIM = 16384, 2, 16
MAX_RATIO = 1.05  # of the work over its mean, and of the bytes over the least that must cross
# Of a (query, key) pair of one head: two products of head_dim forward, five back; 2 FLOPs each.
FORWARD_FLOPS, BACKWARD_FLOPS = 4 * HEAD_DIM, 10 * HEAD_DIM

FORMULAS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(
        q, k, v
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v)
    ),
}


@dataclass
class Counted:
    """Of one rank, forward and back.

    Attributes:
        flops: counted by torch.
        claimed_flops: from the kernel's own `count_executed_pairs` of the tiles that it was given.
        sent_bytes: counted by the exchange.
        planned_bytes: the same as planned.
        needed_bytes: of all ranks together, the least that must cross.
    """

    flops: list[int] = field(default_factory=lambda: [0, 0])
    claimed_flops: list[int] = field(default_factory=lambda: [0, 0])
    sent_bytes: list[int] = field(default_factory=lambda: [0, 0])
    planned_bytes: list[int] = field(default_factory=lambda: [0, 0])
    needed_bytes: list[int] = field(default_factory=lambda: [0, 0])


@contextmanager
def counting(counted: Counted) -> Iterator[None]:
    """Count what kernels of this process run."""
    kernel = type(get_kernel("auto", "cpu", ()))

    def watch(method: Callable[..., Iterator[Any]], way: int, flops_of_pair: int) -> Callable[..., Any]:
        def watched(self: Any, *arguments: Any) -> Iterator[Any]:
            tiles = next(x for x in arguments if isinstance(x, Tiles))
            pairs = self.count_executed_pairs(tiles, backward=way == 1) * arguments[0].shape[1]
            counted.claimed_flops[way] += pairs * flops_of_pair
            parts = method(self, *arguments)
            while True:
                with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
                    part = next(parts, None)
                counted.flops[way] += counter.get_total_flops()
                if part is None:
                    return
                yield part

        return watched

    with (
        patch.object(kernel, "forward", watch(kernel.forward, 0, FORWARD_FLOPS)),
        patch.object(kernel, "backward", watch(kernel.backward, 1, BACKWARD_FLOPS)),
    ):
        yield


def count(rank: int, world_size: int, pattern: Pattern) -> Counted:
    """One pass forward and back with `auto`."""
    mesh, result = RingMesh.from_world(world_size), Counted()
    layout = make_layout("auto", tokens=TOKENS, ring_size=world_size, pattern=pattern)
    shape = Shape(batch=1, query_heads=HEADS, kv_heads=HEADS, tokens=TOKENS, head_dim=HEAD_DIM)
    q, k, v, grad = (shard_sequence(x, layout, mesh=mesh, dim=2) for x in tensors(shape))
    for x in (q, k, v):
        x.requires_grad_()
    context = make_ring_context(pattern, layout, mesh, Options())
    counters = context.exchange.counters
    with counting(result):
        out, _ = ring_attention_op(q, k, v, context.handle)
        forward_bytes = counters.bytes_sent
        out.backward(grad)
    plan = build_plan(pattern, layout, query_heads=HEADS, kv_heads=HEADS)
    local, token_bytes = plan.rank(rank), 2 * HEAD_DIM * 4  # K and V (or dK and dV) of a token, float32
    result.sent_bytes = [forward_bytes, counters.bytes_sent - forward_bytes]
    # Backward: keys and values once more, and for each that was received a gradient onward or home.
    result.planned_bytes = [
        token_bytes * local.tokens_sent,
        token_bytes * (local.tokens_sent + local.tokens_received),
    ]
    result.needed_bytes = [token_bytes * plan.tokens_needed, 2 * token_bytes * plan.tokens_needed]
    return result


@pytest.mark.day("LongNet-2")
@pytest.mark.parametrize("ring_size", [2, 4])
@pytest.mark.parametrize("name", LONG_PATTERNS)
def test_executed_work_is_even_and_no_byte_is_sent_that_need_not_be(
    rank_pool: Pool, name: str, ring_size: int
) -> None:
    ranks = rank_pool(ring_size).run(count, LONG_PATTERNS[name](TOKENS), timeout_s=240)
    for way in (0, 1):
        flops = np.array([result.flops[way] for result in ranks])
        assert flops.tolist() == [result.claimed_flops[way] for result in ranks]
        assert flops.min() > 0 and flops.max() <= MAX_RATIO * flops.mean(), flops / flops.mean()
        sent = [result.sent_bytes[way] for result in ranks]
        assert sent == [result.planned_bytes[way] for result in ranks]
        assert sum(sent) <= MAX_RATIO * ranks[0].needed_bytes[way]
