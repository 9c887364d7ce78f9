"""From a plan to steps: when each head chunk sets out, and that plans with every kind of step are proven.

Small enough to find a fault of `lowering.py` in seconds; test_validate.py has the plans of the registry.
"""

from __future__ import annotations

import pytest

from ds_ring import Causal, Full, SlidingWindow, build_plan, make_layout
from ds_ring.errors import RingLayoutError
from ds_ring.masks.pattern import Pattern
from ds_ring.schedule.directions import choose_stage_sizes
from ds_ring.schedule.lowering import MANY_CHUNKS, lower_rank, stage_shards
from ds_ring.schedule.rank_plan import make_one_way
from ds_ring.schedule.steps import Accumulate, Payload
from tests.cases import rows_of
from tests.schedule_proof.validate import validate_plan


@pytest.mark.parametrize(
    ("ring_size", "chunks", "forward", "backward"),
    [(4, 2, 3, 4), (4, MANY_CHUNKS - 1, 3, 4), (4, MANY_CHUNKS, 3, 3), (2, 3, 1, 2), (1, 2, 1, 1)],
)
def test_a_chunk_sets_out_at_the_last_hop_of_the_one_before(
    ring_size: int, chunks: int, forward: int, backward: int
) -> None:
    """Of few chunks the next one sets out a batch later in the backward pass."""
    layout = make_layout("contiguous", tokens=16, ring_size=ring_size)
    plan = build_plan(Full(), layout, query_heads=chunks, kv_heads=chunks, directions=make_one_way(ring_size))
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
        *rows_of("Dilated", lambda dilated: {"": (dilated((64, 128), (1, 2)), "zigzag", True)}).values(),
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


@pytest.mark.parametrize("way", [{}, {"stage_shards": 4}, {"ranks_per_node": 2}], ids=str)
def test_every_batch_of_a_causal_pass_computes(way: dict[str, int]) -> None:
    """Those after the last hop, when gradients return, have parts of the own shard, unless it is short."""
    for tokens, few in ((8 * 8192, False), (8 * 2048, True)):
        layout = make_layout("zigzag", tokens=tokens, ring_size=8)
        plan = build_plan(Causal(), layout, **way)
        for rank in range(8):
            *batches, end = lower_rank(plan.rank(rank), backward=True).chunks[0].steps.rounds
            assert not end.posted and not end.computed
            assert all(one.computed for one in batches) is not few, (way, rank)
            own = [step.tiles for one in batches for step in one.computed if step.hop == 0]
            whole = plan.rank(rank).classes[0].hops[0].tiles
            assert sum(int(tiles.pairs.sum()) for tiles in own) == int(whole.pairs.sum())


def test_stages_are_few_and_end_with_a_short_one() -> None:
    sizes = {(2, 1): (1,), (2, 9): (1,), (3, 2): (2,), (4, 7): (3,), (8, 7): (4, 3), (8, 4): (4, 3)}
    sizes |= {
        (8, 3): (3, 3, 1), (8, 2): (2, 2, 2, 1), (8, 1): (1,) * 7, (16, 8): (4, 6, 5), (64, 63): (4, 16, 43),
    }  # fmt: skip
    for (ring_size, most), want in sizes.items():
        found = choose_stage_sizes(ring_size, most)
        assert found == want and sum(found) == ring_size - 1, (ring_size, most, found)


def test_stages_by_a_budget_of_bytes() -> None:
    """By themselves only on a GPU, in rings inside a node; never of one shard, which saves nothing."""
    shard = 32 << 20
    rows = [
        (("auto", "cuda", 8, 8, shard), 4),
        (("auto", "cuda", 8, 8, 4 * shard), None),
        (("auto", "cuda", 8, None, shard), None),
        (("auto", "cuda", 8, 4, shard), None),
        (("auto", "cpu", 8, 8, shard), None),
        ((0, "cuda", 8, 8, shard), None),
        ((3 * shard, "cpu", 8, None, shard), 3),
        ((3 * shard - 1, "cpu", 8, 4, shard), 2),
        ((shard, "cpu", 8, 8, shard), None),
        ((shard, "cpu", 2, 2, shard), 1),
        ((shard, "cpu", 1, 1, shard), None),
        ((1 << 50, "cuda", 4, 4, 0), 3),
    ]
    for given, want in rows:
        assert stage_shards(*given) == want, given


def test_stages_beside_other_directions_are_refused() -> None:
    layout = make_layout("zigzag", tokens=64, ring_size=4)
    with pytest.raises(RingLayoutError, match="stage_shards: expected None with directions, got 2"):
        build_plan(Causal(), layout, directions=make_one_way(4), stage_shards=2)
    # Two levels are not chosen beside them: the plan says so.
    plan = build_plan(Full(), layout, ranks_per_node=2, stage_shards=3)
    assert "shards travel from owner to reader, hops in stages of 1, 3" in plan.summary()
    assert plan.tokens_sent == plan.tokens_needed
