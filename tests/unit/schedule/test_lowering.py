"""From a plan to steps: when each head chunk sets out, and that plans with every kind of step are proven.

Small enough to find a fault of `lowering.py` in seconds; test_validate.py has the plans of the registry.
"""

from __future__ import annotations

import pytest
from schedule_proof.validate import validate_plan

from ds_ring import Causal, Dilated, Full, SlidingWindow, build_plan, make_layout
from ds_ring.masks.pattern import Pattern
from ds_ring.schedule.lowering import MANY_CHUNKS, lower_rank
from ds_ring.schedule.plan import one_way
from ds_ring.schedule.steps import Accumulate, Payload


@pytest.mark.parametrize(
    ("ring_size", "chunks", "forward", "backward"),
    [(4, 2, 3, 4), (4, MANY_CHUNKS - 1, 3, 4), (4, MANY_CHUNKS, 3, 3), (2, 3, 1, 2), (1, 2, 1, 1)],
)
def test_a_chunk_sets_out_at_the_last_hop_of_the_one_before(
    ring_size: int, chunks: int, forward: int, backward: int
) -> None:
    """Of few chunks the next one sets out a batch later in the backward pass."""
    layout = make_layout("contiguous", tokens=16, ring_size=ring_size)
    plan = build_plan(Full(), layout, query_heads=chunks, kv_heads=chunks, directions=one_way(ring_size))
    for backwards, apart in ((False, forward), (True, backward)):
        for rank in range(ring_size):
            own = plan.rank(rank)
            schedule = lower_rank(own, backward=backwards, head_bytes=1, chunk_bytes=1)
            assert schedule.starts == [apart * chunk for chunk in range(chunks)]
            assert len(lower_rank(own, backward=backwards, head_bytes=0, chunk_bytes=1).chunks) == 1
            assert len(lower_rank(own, backward=backwards, head_bytes=1, chunk_bytes=chunks).chunks) == 1


@pytest.mark.parametrize(
    ("pattern", "layout_name", "joins"),
    [
        (Causal(), "zigzag", False),
        (SlidingWindow(9, False), "striped", False),
        (Dilated((64, 128), (1, 2)), "zigzag", True),
        (SlidingWindow(50), "zigzag", True),
    ],
    ids=str,
)
@pytest.mark.parametrize("payload", ["float32", "bfloat16"])
def test_relays_direct_sends_and_returns_are_proven(
    pattern: Pattern, layout_name: str, joins: bool, payload: str
) -> None:
    layout = make_layout(layout_name, tokens=96, ring_size=4, pattern=pattern)
    plan = build_plan(pattern, layout, query_heads=2, kv_heads=2, gradient_payload=payload)
    validate_plan(plan, head_bytes=1, chunk_bytes=1)
    written = [
        steps.buffers[step.buffer].payload
        for rank in range(4)
        for chunk in lower_rank(plan.rank(rank), backward=True).chunks
        for steps in [chunk.steps]
        for batch in steps.rounds
        for step in batch.arrived
        if isinstance(step, Accumulate)
    ]
    assert Payload.GRADIENTS in written
    assert (Payload.KEYS in written) is joins, "keys of two senders are put together"
