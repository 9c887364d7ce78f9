"""The plan of a direct exchange: proven by the validator, minimal between nodes, in bounded stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ds_ring import Causal, Documents, Full, SlidingWindow, build_plan, make_layout, simulate
from ds_ring.errors import RingConfigError, RingScheduleError
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.slots import count_slots
from ds_ring.schedule.layout import Layout
from ds_ring.schedule.lowering import lower_pass
from ds_ring.schedule.plan import Plan
from ds_ring.schedule.rank_plan import Direction
from ds_ring.schedule.steps import Accumulate, Payload, Recv, Send
from ds_ring.simulation.generate import GeneratedSource
from ds_ring.simulation.simulate import SimulationOptions, exact_rows
from ds_ring.transports.direct.choose import _count_reads, choose_plan
from ds_ring.transports.direct.exchange_table import make_exchange_table
from ds_ring.transports.direct.plan import make_direct_plan, plan_for_bytes
from ds_ring_launcher.plan.model_memory import attention_alone
from ds_ring_launcher.plan.pass_memory import PassShape, pass_memory
from ds_ring_launcher.plan.pass_time import CostPart, bytes_sent
from tests.cases import LAYOUTS, PATTERNS, layout_for, least_kept
from tests.reference import relative_error
from tests.schedule_proof.validate import validate_plan, validate_schedules

LENGTHS = (70, 10, 3, 45, 33, 31)
TOKENS = sum(LENGTHS)
PACKED = Documents(np.repeat(np.arange(len(LENGTHS)), LENGTHS)) & Causal()
PAYLOADS: list[dict[str, Any]] = [
    {},
    {"gradient_payload": "bfloat16"},
    {"prune": False},
]


def plan_of(pattern: Pattern, layout: Layout, inner: int | None, tokens: int, **options: Any) -> Plan:
    ring = build_plan(pattern, layout, query_heads=4, kv_heads=2, **options)
    return make_direct_plan(ring, inner, tokens)


def packed(size: int, inner: int | None, tokens: int = 60, **options: Any) -> Plan:
    layout = make_layout("balanced", tokens=TOKENS, ring_size=size, pattern=PACKED)
    return plan_of(PACKED, layout, inner, tokens, **options)


# --- what is proven --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "inner"), [(1, None), (2, None), (4, 2), (6, 3), (8, 2), (8, 4), (12, 4), (5, None)]
)
@pytest.mark.parametrize("pattern_of", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.night
def test_every_plan_of_the_registry_is_accepted(
    pattern_of: Callable[[int], Pattern], size: int, inner: int | None
) -> None:
    tokens = 8 * size + 5
    pattern = pattern_of(tokens)
    for name in LAYOUTS:
        layout = layout_for(name, pattern, tokens=tokens, ring_size=size)
        for most in (1, 20, 10**6):
            for least in (2048, 1):
                with least_kept(least):
                    validate_plan(plan_of(pattern, layout, inner, most))


@pytest.mark.parametrize("options", PAYLOADS, ids=lambda options: f"options{PAYLOADS.index(options)}")
@pytest.mark.parametrize(("size", "inner"), [(4, 2), (6, 3), (8, 2), (8, None)])
@pytest.mark.day("4-2-options0", "6-3-options1", "8-2-options2", "4-2-options2")
def test_packed_documents_are_accepted(size: int, inner: int | None, options: dict[str, Any]) -> None:
    for most in (1, 60, 10**6):
        with least_kept(1):
            validate_plan(packed(size, inner, most, **options), head_bytes=int(most == 60))


@pytest.mark.night
def test_a_thousand_ranks_are_accepted() -> None:
    """Packed documents over 128 nodes; the validator runs all ranks, forward and backward."""
    lengths = np.random.default_rng(0).integers(1, 200, size=400)
    pattern = Documents(np.repeat(np.arange(len(lengths)), lengths)) & Causal()
    layout = make_layout("balanced", tokens=int(lengths.sum()), ring_size=1024, pattern=pattern)
    validate_plan(make_direct_plan(build_plan(pattern, layout), 8, 100))


# --- what is refused -------------------------------------------------------------------------------


def schedules(backward: bool) -> tuple[Plan, list[Any]]:
    plan = packed(8, 2)
    ranks = [plan.rank(rank) for rank in range(8)]
    return plan, [lower_pass(rank.classes, plan.group, backward=backward) for rank in ranks]


def edited(backward: bool, drop: Callable[[Any, Any], bool]) -> None:
    """Validate the schedules without the first step of which `drop` is true, of a rank and a step."""
    plan, all_ranks = schedules(backward)
    for schedule in all_ranks:
        (chunk,) = schedule.chunks
        for number, steps in enumerate(chunk.steps.rounds):
            for field, side in zip(steps._fields, steps, strict=True):
                for step in side:
                    if drop(schedule, step):
                        left = steps._replace(**{field: tuple(x for x in side if x is not step)})
                        rounds = [*chunk.steps.rounds[:number], left, *chunk.steps.rounds[number + 1 :]]
                        steps_left = chunk.steps._replace(rounds=tuple(rounds))
                        changed = replace(schedule, chunks=(chunk._replace(steps=steps_left),))
                        all_ranks[schedule.ring_rank] = changed
                        validate_schedules(all_ranks, plan)
                        return
    raise AssertionError("no such step")


def is_relay(schedule: Any, step: Any) -> bool:
    return isinstance(step, Send) and step.payload is Payload.KEYS and step.origin != schedule.ring_rank


def is_part_of_a_sum(schedule: Any, step: Any) -> bool:
    buffers = schedule.chunks[0].steps.buffers
    return (
        isinstance(step, Accumulate) and step.buffer > 1 and buffers[step.buffer].payload is Payload.GRADIENTS
    )


def is_sum(schedule: Any, step: Any) -> bool:
    return isinstance(step, Send) and step.payload is Payload.GRADIENTS and step.peer == step.origin


def is_crossing(schedule: Any, step: Any) -> bool:
    return (
        isinstance(step, Recv) and step.payload is Payload.KEYS and step.peer // 2 != schedule.ring_rank // 2
    )


@pytest.mark.parametrize(
    ("backward", "drop"), [(False, is_relay), (False, is_crossing), (True, is_part_of_a_sum), (True, is_sum)]
)
def test_a_step_that_is_left_out_is_refused(backward: bool, drop: Callable[[Any, Any], bool]) -> None:
    with pytest.raises(RingScheduleError):
        edited(backward, drop)


def test_no_bytes_for_a_stage_are_refused() -> None:
    plan = build_plan(Causal(), make_layout("zigzag", tokens=64, ring_size=4))
    with pytest.raises(RingConfigError, match="stage_bytes"):
        plan_for_bytes(plan, 2, 0, 16)


# --- what is sent ----------------------------------------------------------------------------------


def test_a_token_crosses_to_a_node_once() -> None:
    """Against the mask: other nodes send a node what its ranks read there, each token once."""
    plan, ids = packed(8, 2), np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    mask = (ids[:, None] == ids[None, :]) & np.tri(TOKENS, dtype=bool)
    shards = [plan.layout.positions(rank) for rank in range(8)]
    shards = [shard[shard >= 0] for shard in shards]
    crossing = dict.fromkeys(range(4), 0)
    for rank in range(8):
        steps = lower_pass(plan.rank(rank).classes, plan.group, backward=False).chunks[0].steps
        for step in (x for steps in steps.rounds for x in steps.posted if isinstance(x, Recv)):
            crossing[rank // 2] += step.count * (step.peer // 2 != rank // 2)
    for node in range(4):
        inside = np.concatenate(shards[2 * node : 2 * node + 2])
        read = np.flatnonzero(mask[inside].any(axis=0))
        assert crossing[node] == len(np.setdiff1d(read, inside)), node


def test_stages_hold_and_relay_at_most_the_bytes() -> None:
    plan = packed(8, 4, 60)
    for rank in range(8):
        (way,) = plan.rank(rank).classes[0].directions
        relayed: dict[int, int] = {}
        for relay in way.relays:
            number = way.numbers[relay.hop]
            relayed[number] = relayed.get(number, 0) + count_slots(relay.slots)
        for number, stage in enumerate(way.stages[1:], start=1):
            if stage is not None and len(stage.hops) > 1:
                assert stage.slots <= 60 and relayed.get(number, 0) <= 60, (rank, number)


@pytest.mark.parametrize("pattern", [Full(), SlidingWindow(20)])
def test_without_nodes_tokens_go_straight_to_their_readers(pattern: Pattern) -> None:
    plan = plan_of(pattern, make_layout("contiguous", tokens=160, ring_size=5), None, 10**6)
    assert plan.tokens_sent == plan.tokens_needed
    assert all(plan.rank(rank).classes[0].limit == 1 for rank in range(5))  # one stage
    assert "straight to their readers" in plan.summary()
    sent = sum(plan.rank(rank).classes[0].tokens_sent for rank in range(5))
    assert sent * plan.kv_heads == plan.tokens_sent


def test_what_is_not_compared_is_said_with_the_choice() -> None:
    """A ring of one has nothing to choose."""
    layout = make_layout("zigzag", tokens=64, ring_size=4)
    plan = build_plan(Causal(), layout)
    assert "direct, as stage_bytes is 0" in choose_plan(plan, None, 0, 1).reason
    assert "direct, as stage_bytes is 0" not in choose_plan(plan, None, "auto", 1).reason
    assert _count_reads(build_plan(Causal(), layout, prune=False)) == 16.0
    single = build_plan(Causal(), make_layout("contiguous", tokens=64, ring_size=1))
    assert choose_plan(single, None, "auto", 1) is make_direct_plan(single, None, 1) is single


# --- virtual ranks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.day("dtype0")
def test_virtual_ranks_need_what_is_estimated(dtype: torch.dtype) -> None:
    """Bytes on the wire and of message buffers to the byte; the kernel is counted at its most."""
    lengths = (3000, 1200, 2500, 1492)
    pattern = Documents(np.repeat(np.arange(4), lengths)) & Causal()
    layout = make_layout("balanced", tokens=8192, ring_size=8, pattern=pattern)
    source, stage_bytes = GeneratedSource(8192, 4, 4, 64, dtype=dtype), 1500 * 4 * 2 * 64 * dtype.itemsize
    options = SimulationOptions(stage_bytes=stage_bytes, chunk_bytes=1, transport="direct", ranks_per_node=4)
    result = simulate(source, pattern=pattern, layout=layout, grad_out=True, ranks=[0, 3, 6], options=options)
    plan = make_direct_plan(build_plan(pattern, layout, query_heads=4, kv_heads=4), 4, 1500)
    shape = PassShape(1, 1, layout.local_tokens, 64, dtype.itemsize, 1, "cpu")
    for rank in (0, 3, 6):
        classes = plan.rank(rank).classes
        assert (
            bytes_sent([CostPart(head_class, 1) for head_class in classes], shape) == result.bytes_sent[rank]
        )
        passing = pass_memory(classes, shape)
        total = attention_alone(4, 4, layout.local_tokens, 64, dtype.itemsize, passing).total
        memory = result.memory[rank]
        assert passing.buffers == max(step.in_flight for step in memory.steps)
        assert memory.peak_bytes <= total < 1.12 * memory.peak_bytes


@pytest.mark.parametrize("size", [64, 1024])
@pytest.mark.day("64")
def test_virtual_ranks_of_a_large_ring_are_exact(size: int) -> None:
    lengths = np.random.default_rng(1).integers(1, 130, size=40)
    tokens = int(lengths.sum())
    pattern = Documents(np.repeat(np.arange(40), lengths)) & Causal()
    layout = make_layout("balanced", tokens=tokens, ring_size=size, pattern=pattern)
    source = GeneratedSource(tokens, 2, 1, 8, dtype=torch.float64)
    options = SimulationOptions(transport="direct", ranks_per_node=8, stage_bytes=100 * 2 * 8 * 8)
    result = simulate(
        source, pattern=pattern, layout=layout, grad_out=True, measure_memory=False, options=options
    )
    exact = exact_rows(source, pattern, np.arange(tokens), 8**-0.5, backward=True)
    for got, want in (
        (result.out, exact.out),
        (result.dq, exact.dq),
        (result.dk, exact.dk),
        (result.dv, exact.dv),
    ):
        assert relative_error(got, want) < 1e-12


def test_simulation_refuses_a_transport_without_a_plan_of_steps() -> None:
    layout = make_layout("zigzag", tokens=64, ring_size=2)
    words = "transport: expected one of ring, .*direct.*, got .*all_gather.*; use one of these"
    with pytest.raises(RingConfigError, match=words):
        simulate(
            GeneratedSource(64, 1, 1, 8), pattern=Causal(), layout=layout,
            options=SimulationOptions(transport="all_gather"),
        )  # fmt: skip


def test_the_last_stage_is_that_of_the_node_with_most() -> None:
    """Ranks 0 and 1, a node, read all of ranks 2 and 3, and these read nothing."""
    reads = {(origin, reader): np.array([[0, 8]]) for origin in (2, 3) for reader in (0, 1)}
    table = make_exchange_table(reads, Direction(1, 3, 2), 4, stage_tokens=4)
    assert table.last == max(table.far_stages.values()) > 0
    assert {node for _, node in table.far_stages} == {0}
