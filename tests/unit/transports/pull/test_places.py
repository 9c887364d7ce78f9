"""Places of buffers in shared memory: none lies on another one that is needed, and all messages are found."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_ring.masks.slots import count_slots
from ds_ring.schedule.layout import make_layout
from ds_ring.schedule.lowering import lower_rank
from ds_ring.schedule.plan import Plan, build_plan
from ds_ring.schedule.steps import (
    RESULTS,
    SHARD,
    Free,
    HeadChunk,
    Payload,
    Recv,
    Schedule,
    ScheduleStep,
    Send,
)
from ds_ring.transports.pull.places import BufferOffsets, MessageKey, place_buffers
from tests.cases import PATTERNS

TOKENS, HEADS = 257, 4


class Size(NamedTuple):
    """What `place_buffers` asks of the kind of a buffer."""

    nbytes: int
    before: tuple[
        int, int, bool
    ]  # bytes of a slot, slots, and whether both tensors are messages of their own

    def bytes_before(self, slot: int) -> tuple[int, ...]:
        row, slots, apart = self.before
        return (slot * row // 2, (slots + slot) * row // 2) if apart else (slot * row,)


def size_at(chunk: HeadChunk, payload: Payload, slots: int) -> Size:
    heads = len(range(chunk.kv_heads.start, chunk.kv_heads.stop, chunk.kv_heads.step or 1))
    slot = heads * (256 if payload is Payload.GRADIENTS else 128)
    return Size(-(-slots * slot // 64) * 64, (slot, slots, payload is Payload.PARTS))


def size_of(schedule: Schedule, key: tuple[int, int]) -> Size:
    chunk = schedule.chunks[key[0]]
    return size_at(chunk, *chunk.steps.buffers[key[1]])


def named(step: ScheduleStep) -> set[int]:
    """The buffers that a step names."""
    names = (getattr(step, name, None) for name in ("buffer", "source", "packed", "gradients"))
    return {buffer for buffer in names if buffer is not None}


def overlaps(schedule: Schedule, places: BufferOffsets) -> list[str]:
    """The buffers that lie where another one lies that is still needed: written to, read or in flight.

    By the rules of [Note: batches] and the steps' own words: a buffer is needed from the first step that
    names it to its `Free`. What arrived is put in place and freed step by step; all messages of a batch are
    posted at once, and all that it computes, too.
    """
    spans: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for batch in schedule.batches:
        for number, phase in enumerate(("arrived", "posted", "computed")):
            for index, steps in batch.rounds:
                for order, step in enumerate(getattr(steps, phase)):
                    time = (batch.number, number) + ((index, order) if phase == "arrived" else ())
                    for buffer in named(step):
                        spans.setdefault((index, buffer), []).append(time)
    used = sorted(key for key in spans if key in places.offsets)
    return [
        f"{one} and {other}"
        for one, other in itertools.combinations(used, 2)
        if max(spans[one][0], spans[other][0]) < min(spans[one][-1], spans[other][-1])
        and places.offsets[one] < places.offsets[other] + size_of(schedule, other).nbytes
        and places.offsets[other] < places.offsets[one] + size_of(schedule, one).nbytes
    ]


def schedules_of(plan: Plan, backward: bool, chunk_bytes: int) -> list[Schedule]:
    ranks = range(plan.ring_size)
    return [
        lower_rank(plan.rank(rank), backward=backward, head_bytes=1, chunk_bytes=chunk_bytes)
        for rank in ranks
    ]


def plan_of(
    pattern: str, layout: str, ring_size: int, payload: str = "float32", tokens: int = TOKENS,
    stage_shards: int | None = None,
) -> Plan:  # fmt: skip
    made = PATTERNS[pattern](tokens)
    where = make_layout(layout, tokens=tokens, ring_size=ring_size, pattern=made)
    return build_plan(
        made,
        where,
        query_heads=2 * HEADS,
        kv_heads=HEADS,
        gradient_payload=payload,
        stage_shards=stage_shards,
    )


@settings(max_examples=settings.default.max_examples // 6)  # an example has up to eight ranks
@given(
    st.sampled_from(list(PATTERNS)), st.sampled_from(["zigzag", "contiguous", "striped"]),
    st.sampled_from([2, 3, 4, 8]), st.sampled_from(["float32", "bfloat16"]), st.booleans(),
    st.sampled_from([1, 2, 4]), st.sampled_from([None, None, 2, 4]),
)  # fmt: skip
def test_no_buffer_lies_on_another_one_and_each_message_is_found(
    pattern: str, layout: str, ring_size: int, payload: str, backward: bool, chunk_bytes: int,
    stage_shards: int | None,
) -> None:  # fmt: skip
    plan = plan_of(pattern, layout, ring_size, payload, stage_shards=stage_shards)
    schedules = schedules_of(plan, backward, chunk_bytes)
    sent: dict[MessageKey, int] = {}
    for schedule in schedules:
        places = place_buffers(schedule, size_at)
        assert not overlaps(schedule, places)
        sent |= places.messages
    read: Counter[MessageKey] = Counter()
    for schedule in schedules:
        for chunk in schedule.chunks:
            for step in (step for one in chunk.steps.rounds for step in one.posted if isinstance(step, Recv)):
                for what in step.payload.messages:
                    where = step.peer, schedule.ring_rank, what, step.origin, step.slots
                    read[MessageKey.for_tokens(*where, chunk.kv_heads)] += 1
                assert count_slots(step.slots)
    assert set(read) == set(sent) and set(read.values()) <= {1}


@pytest.mark.parametrize("phase", ["sent", "computed"])
def test_a_place_that_is_used_again_too_early_is_found(phase: str) -> None:
    """The seeded fault: two buffers that are needed at once share a place."""
    (schedule, *_) = schedules_of(plan_of("causal", "zigzag", 4), True, 1)
    places = place_buffers(schedule, size_at)
    steps = schedule.chunks[0].steps
    posted = [step for one in steps.rounds for step in one.posted]
    first = next(step for step in posted if isinstance(step, Send))
    source = first.buffer if first.in_place else first.packed
    other = next(step.buffer for step in posted if isinstance(step, Recv))
    if phase == "computed":
        hop = next(
            step for one in steps.rounds for step in one.computed if step.gradients not in (None, RESULTS)
        )
        assert hop.buffer != SHARD
        source, other = hop.buffer, hop.gradients
    wrong = dict(places.offsets)
    wrong[0, other] = wrong[0, source]
    assert overlaps(schedule, places._replace(offsets=wrong))


@pytest.mark.parametrize(("tokens", "most"), [(256, 1.1), (257, 1.4)])  # equal shards, and others
@pytest.mark.parametrize("ring_size", [2, 4, 8])
def test_it_takes_little_more_than_what_is_in_use_at_once(ring_size: int, tokens: int, most: float) -> None:
    for pattern in ("causal", "full", "window", "documents, causal"):
        plan = plan_of(pattern, "zigzag", ring_size, tokens=tokens)
        for backward in (False, True):
            found = [(one, place_buffers(one, size_at)) for one in schedules_of(plan, backward, 2)]
            used = max(most_in_use(*one) for one in found)
            assert used <= max(places.nbytes for _, places in found) <= most * used


def most_in_use(schedule: Schedule, places: BufferOffsets) -> int:
    """What a pool would have in use at once, in the order of a pass."""
    used = most = 0
    held: set[tuple[int, int]] = set()
    for batch in schedule.batches:
        for phase in ("arrived", "posted", "computed"):
            for index, steps in batch.rounds:
                for step in getattr(steps, phase):
                    names = ("packed", "buffer", "gradients")
                    for key in ((index, getattr(step, name, None)) for name in names):
                        if key not in places.offsets:
                            continue
                        size = size_of(schedule, key).nbytes
                        if isinstance(step, Free):
                            used -= size if key in held else 0
                            held.discard(key)
                        elif key not in held:
                            held.add(key)
                            used += size
                    most = max(most, used)
    return most
