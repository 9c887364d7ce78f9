"""Messages have both ends alike, in one ring and on two levels; what leaves a node by each adapter."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from ds_ring import Causal, Full, SlidingWindow, build_plan, make_layout
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.slots import count_slots
from ds_ring.schedule.lowering import lower_pass
from ds_ring.schedule.plan import Plan
from ds_ring.schedule.rank_plan import Direction, make_one_way, make_two_levels
from ds_ring.schedule.steps import Payload, Send
from tests.cases import PATTERNS, layout_for
from tests.schedule_proof.validate import validate_plan

SIZES = {Payload.KEYS: 1, Payload.GRADIENTS: 2, Payload.ROUNDED: 1}  # of bfloat16 inputs


def messages(plan: Plan, backward: bool) -> tuple[dict, dict]:
    """By sender, receiver and batch the payloads, owners and slots, in order; as each end has them."""
    ends: tuple[dict, dict] = (defaultdict(list), defaultdict(list))
    for rank in range(plan.ring_size):
        schedule = lower_pass(plan.rank(rank).classes, plan.group, backward=backward, head_bytes=1)
        for batch in schedule.batches:
            for index, steps in batch.rounds:
                for post in steps.posted:
                    sent = isinstance(post, Send)
                    pair = (rank, post.peer) if sent else (post.peer, rank)
                    message = (index, post.payload, post.origin, post.slots.tolist())
                    ends[not sent][(*pair, batch.number)].append(message)
    return ends


def ways(size: int, node: int) -> list[tuple[Direction, ...]]:
    both = (Direction(1, size // 2), Direction(-1, (size - 1) // 2))
    return [make_one_way(size, -1), both, make_two_levels(size, node), make_two_levels(size, node, -1)]


@pytest.mark.parametrize(
    ("size", "node", "names"),
    [
        (2, 1, ("causal", "full")),
        (4, 2, ("causal", "window", "dilated", "documents")),
        (8, 4, ("causal", "window both ways")),
        (16, 4, ("causal",)),
        (64, 8, ("causal",)),
    ],
)
@pytest.mark.day("2-1-names0", "4-2-names1", "8-4-names2")
def test_both_ends_have_the_same_messages_in_every_batch(
    size: int, node: int, names: tuple[str, ...]
) -> None:
    """In the same order, size and dtype: ranks match them by order alone."""
    tokens = 4 * size + 3
    for name in PATTERNS.keys() & names:
        pattern = PATTERNS[name](tokens)
        layout = layout_for("zigzag", pattern, tokens=tokens, ring_size=size)
        taken = ways(size, node)[3 * (size > 16) :] if size > 2 else [make_one_way(2)]
        for number, way in enumerate(taken):
            payload = ("float32", "bfloat16")[number % 2]
            plan = build_plan(
                pattern, layout, kv_heads=2, query_heads=2, directions=way, gradient_payload=payload
            )
            for backward in (False, True):
                sent, received = messages(plan, backward)
                assert sent and sent == received, (name, way)


@pytest.mark.parametrize(("size", "node"), [(4, 2), (6, 3), (6, 2)])
@pytest.mark.day("4-2", "6-2")
def test_schedules_of_two_levels_are_proven(size: int, node: int) -> None:
    tokens = 4 * size + 5
    for name in PATTERNS.keys() & {"causal", "full", "dilated", "window both ways"}:
        pattern = PATTERNS[name](tokens)
        layout = layout_for("zigzag", pattern, tokens=tokens, ring_size=size)
        for sign, payload in ((1, "bfloat16"), (-1, "float32")):
            way = make_two_levels(size, node, sign)
            plan = build_plan(
                pattern, layout, kv_heads=2, query_heads=2, directions=way, gradient_payload=payload
            )
            validate_plan(plan)


def left_by_adapter(plan: Plan, node: int, backward: bool) -> np.ndarray:
    """What each rank of some nodes sends to others, in shards of K and V; [nodes, ranks of a node]."""
    left = np.zeros(plan.ring_size)
    for rank in (place + first for first in (8, 56) for place in range(8)):
        for steps in lower_pass(plan.rank(rank).classes, 1, backward=backward).chunks[0].steps.rounds:
            for post in steps.posted:
                if isinstance(post, Send) and post.peer // node != rank // node:
                    left[rank] += count_slots(post.slots) * SIZES[post.payload]
    return left.reshape(-1, node)[[1, 7]] / plan.layout.local_tokens


@pytest.mark.parametrize(("pattern", "name"), [(Full(), "contiguous"), (Causal(), "zigzag")])
@pytest.mark.day("pattern1-zigzag")
def test_adapters_of_a_node_send_alike(pattern: Pattern, name: str) -> None:
    """Eight nodes of eight: one adapter of eight carries all in one ring; each an eighth with two levels."""
    layout, whole = make_layout(name, tokens=64 * 16, ring_size=64), 7.0
    flat = left_by_adapter(build_plan(pattern, layout), 8, False)
    assert (np.count_nonzero(flat, axis=1) == 1).all() and flat.max() > 6 * whole
    plans = {
        payload: build_plan(pattern, layout, ranks_per_node=8, gradient_payload=payload)
        for payload in ("float32", "bfloat16")
    }
    for payload, backward, units in (("float32", False, 1), ("float32", True, 3), ("bfloat16", True, 2)):
        left = left_by_adapter(plans[payload], 8, backward)
        assert (left.max(axis=1) / left.mean(axis=1)).max() <= 1.05
        assert left.max() <= units * whole + 0.01
        if isinstance(pattern, Full):
            assert left.max() / left.mean() <= 1.05


def test_what_leaves_a_node_leaves_it_a_part_in_each_batch() -> None:
    for node, pattern in ((2, Full()), (3, Full()), (2, SlidingWindow(30))):
        layout = make_layout("contiguous", tokens=6 * 12, ring_size=6)
        plan = build_plan(pattern, layout, directions=make_two_levels(6, node))
        for rank, backward in ((rank, backward) for rank in range(6) for backward in (False, True)):
            for steps in lower_pass(plan.rank(rank).classes, 1, backward=backward).chunks[0].steps.rounds:
                sends = [post for post in steps.posted if isinstance(post, Send)]
                crossing = [post.count for post in sends if post.peer // node != rank // node]
                assert max(crossing, default=0) <= 12 // node, (rank, backward, crossing)


@pytest.mark.parametrize(("size", "node"), [(5, 0), (6, 2), (6, 3), (8, 2)])
@pytest.mark.parametrize("sign", [1, -1])
def test_hops_readers_and_origins_belong_together(size: int, node: int, sign: int) -> None:
    way = Direction(sign, size - 1, node)
    for origin in range(size):
        readers = [way.reader(origin, hop, size) for hop in range(size)]
        assert sorted(readers) == list(range(size)) and readers[0] == origin
        assert [way.hop(origin, reader, size) for reader in readers] == list(range(size))
        assert {way.origin(reader, hop, size) for hop, reader in enumerate(readers)} == {origin}


def test_what_hardly_crosses_stays_in_one_ring() -> None:
    layout = make_layout("contiguous", tokens=16 * 64, ring_size=16)
    plan = build_plan(SlidingWindow(32), layout, ranks_per_node=4)
    assert {way.ranks_per_node for way in plan.classes[0].directions} == {0}


@pytest.mark.parametrize(
    ("size", "node", "window", "layout"), [(8, 2, 20, "contiguous"), (9, 3, 20, "zigzag")]
)
def test_keys_for_another_node_are_freed_where_a_pass_ends_inside_a_node(
    size: int, node: int, window: int, layout: str
) -> None:
    """The last keys that came into a node go on to no other one."""
    whole = make_layout(layout, tokens=16 * size, ring_size=size)
    validate_plan(build_plan(SlidingWindow(window), whole, ranks_per_node=node))
