"""The validator: every plan of the registry is accepted, every fault seeded into a schedule is refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from schedule_proof.validate import validate_plan, validate_schedules

from ds_ring import Causal, Full, build_plan, make_layout
from ds_ring.errors import RingError, RingScheduleError
from ds_ring.masks.pattern import Pattern
from ds_ring.schedule.lowering import lower_pass
from ds_ring.schedule.plan import in_stages
from ds_ring.schedule.rank_plan import Direction
from ds_ring.schedule.steps import (
    RESULTS,
    SHARD,
    Accumulate,
    Compute,
    Free,
    Payload,
    Recv,
    Round,
    ScheduleStep,
    Send,
)
from tests.cases import LAYOUTS, PATTERNS, layout_for

ALL_APART = {"head_bytes": 1, "chunk_bytes": 1}  # every K/V head is a chunk of its own


_DILATED = ["dilated"] if "dilated" in PATTERNS else []  # a capability
DAY = [
    (None, "causal", 8),
    (None, "full", 2),
    (3, "full", 4),
    (None, "window", 3),
    (3, "window both ways", 8),
    (3, "dilated", 4),
    (None, "dilated, not nested, not causal", 3),
    (3, "documents", 4),
    (None, "documents, causal", 1),
    (3, "mask function, causal", 4),
]


# --- what is accepted ------------------------------------------------------------------------------


@pytest.mark.parametrize("ring_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("pattern_of", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("most", [None, 3])
@pytest.mark.day(*(f"{most}-{name}-{size}" for most, name, size in DAY if name in PATTERNS))
def test_every_plan_of_the_registry_is_accepted(
    pattern_of: Callable[[int], Pattern], ring_size: int, most: int | None
) -> None:
    tokens = 8 * ring_size + 5
    pattern = pattern_of(tokens)
    for name in LAYOUTS:
        layout = layout_for(name, pattern, tokens=tokens, ring_size=ring_size)
        validate_plan(build_plan(pattern, layout, query_heads=2, kv_heads=1, stage_shards=most))


@pytest.mark.parametrize("pattern_name", ["causal", *_DILATED, "window both ways", "documents"])
@pytest.mark.parametrize("layout_name", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("prune", [True, False])
@pytest.mark.day(
    "True-contiguous-causal", "True-zigzag-documents", "False-striped-window both ways",
    *(f"False-zigzag-{name}" for name in _DILATED),
)  # fmt: skip
def test_head_chunks_and_two_directions_are_accepted(
    pattern_name: str, layout_name: str, prune: bool
) -> None:
    pattern = PATTERNS[pattern_name](59)
    layout = layout_for(layout_name, pattern, tokens=59, ring_size=4)
    build = partial(build_plan, pattern, layout, query_heads=8, kv_heads=4, prune=prune)
    for directions in (None, (Direction(-1, 3),), (Direction(1, 2), Direction(-1, 1))):
        validate_plan(build(directions=directions), **ALL_APART)
    for payload in ("float32", "bfloat16"):
        validate_plan(build(gradient_payload=payload, stage_shards=2), **ALL_APART)


@pytest.mark.parametrize(
    ("pattern_name", "layout_name", "ring_size"),
    [
        ("causal", "zigzag", 16),
        ("window", "balanced", 16),
        ("documents, causal", "auto", 32),
        *((name, "residue", 32) for name in _DILATED),
        ("full", "contiguous", 64),
        ("causal", "striped", 32),
    ],
)
@pytest.mark.night
def test_large_rings_are_accepted(pattern_name: str, layout_name: str, ring_size: int) -> None:
    tokens = 3 * ring_size + 1
    pattern = PATTERNS[pattern_name](tokens)
    layout = layout_for(layout_name, pattern, tokens=tokens, ring_size=ring_size)
    validate_plan(build_plan(pattern, layout))


def test_idle_ranks_and_more_ranks_than_tokens_are_accepted() -> None:
    validate_plan(build_plan(Causal(), layout_for("zigzag", Causal(), tokens=5, ring_size=8)))


# --- what is refused -------------------------------------------------------------------------------


class Seeded:
    """The schedules of full attention over 64 tokens on a ring that goes one way, to be damaged.

    Args:
        backward: which of the passes.
        ring_size: ranks.
        stages: of at most two shards of other ranks.
    """

    def __init__(self, backward: bool, ring_size: int = 4, stages: bool = False) -> None:
        layout = make_layout("contiguous", tokens=64, ring_size=ring_size)
        way = in_stages(ring_size, 2) if stages else (Direction(1, ring_size - 1),)
        self.plan = build_plan(Full(), layout, directions=way)
        ranks = [self.plan.rank(rank) for rank in range(ring_size)]
        self.schedules = [lower_pass(rank.classes, 1, backward=backward) for rank in ranks]

    def rounds(self, rank: int) -> tuple[Round, ...]:
        return self.schedules[rank].chunks[0].steps.rounds

    def find(self, kind: type, rank: int, batch: int) -> Any:
        """The first step of a kind in a batch."""
        return next(step for step in self.rounds(rank)[batch].steps if isinstance(step, kind))

    def edit(self, rank: int, batch: int, change: Callable[[list[Any]], Iterable[Any]]) -> None:
        """Change the steps of one batch; each goes to its place by its kind."""
        steps = list(change(list(self.rounds(rank)[batch].steps)))
        sorted_: list[Any] = [tuple(s for s in steps if isinstance(s, kinds)) for kinds in PLACES]
        rounds = list(self.rounds(rank))
        rounds[batch] = Round(*sorted_)
        self.chunk(rank, steps=self.schedules[rank].chunks[0].steps._replace(rounds=tuple(rounds)))

    def chunk(self, rank: int, **values: Any) -> None:
        """Change fields of a rank's head chunk."""
        chunk = self.schedules[rank].chunks[0]._replace(**values)
        self.schedules[rank] = replace(self.schedules[rank], chunks=(chunk,))

    def buffer(self, number: int, rank: int, **values: Any) -> None:
        """Change what a buffer is."""
        steps = self.schedules[rank].chunks[0].steps
        buffers = list(steps.buffers)
        buffers[number] = buffers[number]._replace(**values)
        self.chunk(rank, steps=steps._replace(buffers=tuple(buffers)))

    def change(self, kind: type, rank: int, batch: int, **values: object) -> None:
        """Change fields of the first step of a kind in a batch."""
        found = self.find(kind, rank, batch)
        self.edit(rank, batch, lambda steps: [replace(s, **values) if s is found else s for s in steps])

    def drop(self, step: ScheduleStep, rank: int, batch: int) -> None:
        self.edit(rank, batch, lambda steps: [s for s in steps if s is not step])

    def insert(self, step: ScheduleStep, rank: int, batch: int) -> None:
        """As the first of its kind."""
        self.edit(rank, batch, lambda steps: [step, *steps])


PLACES = ((Accumulate, Free), (Send, Recv), (Compute,))


def swapped_kinds() -> Seeded:
    """Rank 1 sends gradients before keys."""
    seeded = Seeded(backward=True)
    seeded.edit(1, 2, lambda steps: steps[::-1])
    return seeded


def swapped_messages() -> Seeded:
    """Rank 2 takes the second message of rank 1 for the first, and the other way round."""
    seeded = Seeded(backward=False)
    first, second = (seeded.find(Recv, 2, batch) for batch in (1, 2))
    seeded.change(Recv, 2, 1, origin=second.origin)
    seeded.change(Recv, 2, 2, origin=first.origin)
    return seeded


def other_tokens_sent() -> Seeded:
    seeded = Seeded(backward=False)
    seeded.change(Send, 1, 0, part=np.array([[0, 8], [0, 8]]))
    return seeded


def wrong_size() -> Seeded:
    seeded = Seeded(backward=False)
    seeded.change(Recv, 2, 0, slots=np.array([[0, 15]]))
    return seeded


def buffer_too_small() -> Seeded:
    seeded = Seeded(backward=False)
    seeded.buffer(seeded.find(Recv, 2, 0).buffer, 2, slots=12)
    return seeded


def packed_too_small() -> Seeded:
    seeded = Seeded(backward=False)
    seeded.buffer(seeded.find(Send, 1, 0).packed, 1, slots=12)
    return seeded


def gradients_too_small() -> Seeded:
    seeded = Seeded(backward=True)
    seeded.buffer(seeded.find(Compute, 1, 1).gradients, 1, slots=12)
    return seeded


def results_too_small() -> Seeded:
    seeded = Seeded(backward=True)
    seeded.buffer(RESULTS, 3, slots=12)
    return seeded


def shard_too_large() -> Seeded:
    seeded = Seeded(backward=False)
    seeded.buffer(SHARD, 3, slots=17)
    return seeded


def packed_in_another_dtype() -> Seeded:
    seeded = Seeded(backward=False)
    seeded.buffer(seeded.find(Send, 1, 0).packed, 1, payload=Payload.GRADIENTS)
    return seeded


def received_in_another_dtype() -> Seeded:
    """Rank 2 takes gradients, which come in float32, in a buffer of bfloat16."""
    seeded = Seeded(backward=True)
    seeded.buffer(gradient_message(seeded, 2, 2).buffer, 2, payload=Payload.ROUNDED)
    return seeded


def gradients_in_another_dtype() -> Seeded:
    """Rank 1 adds up gradients in the dtype of the keys."""
    seeded = Seeded(backward=True)
    seeded.buffer(seeded.find(Compute, 1, 1).gradients, 1, payload=Payload.KEYS)
    return seeded


def results_in_another_dtype() -> Seeded:
    seeded = Seeded(backward=True)
    seeded.buffer(RESULTS, 0, payload=Payload.ROUNDED)
    return seeded


def gradients_for_keys() -> Seeded:
    """Rank 1 attends to what it found for its own tokens, as if these were its keys."""
    seeded = Seeded(backward=True)
    seeded.change(Compute, 1, 0, buffer=RESULTS)
    return seeded


def gradients_into_keys() -> Seeded:
    """What arrives for rank 0's tokens is added to their keys."""
    seeded = Seeded(backward=True)
    seeded.change(Accumulate, 2, 3, buffer=seeded.find(Compute, 2, 2).buffer)
    return seeded


def heads_left_out() -> Seeded:
    seeded = Seeded(backward=False)
    for rank in range(4):
        seeded.chunk(rank, kv_heads=slice(1, 2, 1))
    return seeded


def queries_of_other_heads() -> Seeded:
    seeded = Seeded(backward=False)
    seeded.chunk(2, query_heads=slice(1, 2, 1))
    return seeded


def gradient_message(seeded: Seeded, rank: int, batch: int) -> Recv:
    """The first message of gradients that a rank receives in a batch."""
    posted = seeded.rounds(rank)[batch].posted
    return next(s for s in posted if isinstance(s, Recv) and s.payload is Payload.GRADIENTS)


def no_such_rank() -> Seeded:
    seeded = Seeded(backward=False)
    seeded.change(Send, 3, 1, peer=4)
    return seeded


def wrong_peer() -> Seeded:
    seeded = Seeded(backward=False)
    seeded.change(Send, 1, 2, peer=3)
    return seeded


def missing_receive() -> Seeded:
    seeded = Seeded(backward=False)
    seeded.drop(seeded.find(Recv, 2, 2), 2, 2)
    return seeded


def missing_send() -> Seeded:
    seeded = Seeded(backward=False)
    seeded.drop(seeded.find(Send, 1, 2), 1, 2)
    return seeded


def other_heads() -> Seeded:
    seeded = Seeded(backward=False)
    seeded.chunk(3, kv_heads=slice(1, 2))
    return seeded


def deadlock() -> Seeded:
    """Both ranks of a ring of two send in batch 0 what the other one receives in batch 1."""
    seeded = Seeded(backward=False, ring_size=2)
    for rank in (0, 1):
        receive = seeded.find(Recv, rank, 0)
        seeded.drop(receive, rank, 0)
        seeded.drop(seeded.find(Compute, rank, 1), rank, 1)
        seeded.insert(receive, rank, 1)
    return seeded


def read_before_arrival() -> Seeded:
    seeded = Seeded(backward=False)
    compute = seeded.find(Compute, 1, 1)
    seeded.drop(compute, 1, 1)
    seeded.insert(compute, 1, 0)
    return seeded


def read_of_nothing() -> Seeded:
    seeded = Seeded(backward=False)
    seeded.change(Compute, 1, 1, buffer=seeded.find(Compute, 1, 3).buffer)
    return seeded


def wait_forgotten() -> Seeded:
    seeded = Seeded(backward=False)
    seeded.change(Compute, 1, 2, needs=0)
    return seeded


def freed_early() -> Seeded:
    seeded = Seeded(backward=False)
    seeded.insert(Free(seeded.find(Compute, 1, 3).buffer), 1, 3)
    return seeded


def freed_twice() -> Seeded:
    seeded = Seeded(backward=False)
    seeded.insert(seeded.find(Free, 1, 3), 1, 3)
    return seeded


def never_freed() -> Seeded:
    seeded = Seeded(backward=False)
    seeded.drop(seeded.find(Free, 1, 2), 1, 2)
    return seeded


def shard_freed() -> Seeded:
    seeded = Seeded(backward=False)
    seeded.insert(Free(SHARD), 2, 2)
    return seeded


def results_freed_early() -> Seeded:
    seeded = Seeded(backward=False)
    seeded.edit(0, 3, lambda steps: [Free(RESULTS), *steps])
    return seeded


def freed_on_arrival() -> Seeded:
    """Rank 1 gives gradients back in the batch after they were computed, while they are still to be sent."""
    seeded = Seeded(backward=True)
    found = seeded.find(Compute, 1, 1).gradients
    step = next(s for s in seeded.rounds(1)[3].arrived if isinstance(s, Free) and s.buffer == found)
    seeded.drop(step, 1, 3)
    seeded.edit(1, 2, lambda steps: [step, *steps])
    return seeded


def overwritten() -> Seeded:
    """Rank 1 receives the next keys over those that it is about to use."""
    seeded = Seeded(backward=False)
    seeded.change(Recv, 1, 1, buffer=seeded.find(Recv, 1, 0).buffer)
    return seeded


def written_while_sent() -> Seeded:
    """Rank 1 computes into the gradients of its own tokens while it sends them."""
    seeded = Seeded(backward=True)
    compute = seeded.find(Compute, 1, 0)
    seeded.drop(compute, 1, 0)
    seeded.insert(compute, 1, 2)
    late = next(
        s for s in seeded.rounds(1)[2].posted if isinstance(s, Send) and s.payload is Payload.GRADIENTS
    )
    own = replace(late, buffer=RESULTS, origin=1, needs=-1)
    seeded.edit(1, 2, lambda steps: [own if s is late else s for s in steps])
    return seeded


def computed_twice() -> Seeded:
    seeded = Seeded(backward=False)
    seeded.edit(2, 1, lambda steps: [*steps, seeded.find(Compute, 2, 1)])
    return seeded


def never_computed() -> Seeded:
    seeded = Seeded(backward=False)
    seeded.drop(seeded.find(Compute, 3, 2), 3, 2)
    return seeded


def tiles_of_another_hop() -> Seeded:
    seeded = Seeded(backward=False)
    seeded.change(Compute, 3, 2, tiles=seeded.find(Compute, 3, 1).tiles)
    return seeded


def tiles_of_another_rank() -> Seeded:
    seeded = Seeded(backward=False)
    seeded.change(Compute, 3, 1, tiles=seeded.find(Compute, 1, 3).tiles)
    return seeded


def keys_of_another_hop() -> Seeded:
    seeded = Seeded(backward=False)
    seeded.change(Compute, 3, 2, origins=(0,))
    return seeded


def gradients_lost() -> Seeded:
    """Rank 1 sends rank 2's gradients on, but what arrives there is thrown away."""
    seeded = Seeded(backward=True)
    seeded.drop(seeded.find(Accumulate, 2, 5), 2, 5)
    return seeded


def gradients_of_a_hop_lost() -> Seeded:
    """Rank 2 does not add what rank 1 found to its own gradients of the same keys."""
    seeded = Seeded(backward=True)
    seeded.drop(seeded.find(Accumulate, 2, 3), 2, 3)
    late = next(s for s in seeded.rounds(2)[3].posted if isinstance(s, Send))
    seeded.edit(2, 3, lambda steps: [replace(s, needs=1) if s is late else s for s in steps])
    return seeded


def gradients_twice() -> Seeded:
    seeded = Seeded(backward=True)
    seeded.insert(seeded.find(Accumulate, 2, 5), 2, 5)
    return seeded


def gradients_to_other_tokens() -> Seeded:
    """What arrives for rank 3's tokens is added to rank 2's."""
    seeded = Seeded(backward=True)
    seeded.change(Accumulate, 1, 3, buffer=RESULTS)
    return seeded


# In stages ranks 0 to 3 compute with (own), (two others), (the last one).


def stages_in_another_order() -> Seeded:
    """Rank 3 computes the last stage's tiles with the keys of the first one."""
    seeded = Seeded(backward=False, stages=True)
    first, last = (seeded.find(Compute, 3, batch) for batch in (1, 2))
    seeded.change(Compute, 3, 1, tiles=last.tiles)
    seeded.change(Compute, 3, 2, tiles=first.tiles)
    return seeded


def keys_of_a_stage_swapped() -> Seeded:
    """Rank 3 puts the keys of ranks 1 and 2 where those of the other one belong."""
    seeded = Seeded(backward=False, stages=True)
    swap = {0: 16, 16: 0}
    seeded.edit(
        3, 0, lambda steps: [replace(x, first=swap[x.first]) if isinstance(x, Recv) else x for x in steps]
    )
    return seeded


def keys_of_a_stage_on_top_of_each_other() -> Seeded:
    seeded = Seeded(backward=False, stages=True)
    seeded.edit(3, 0, lambda steps: [replace(x, first=0) if isinstance(x, Recv) else x for x in steps])
    return seeded


def gradients_to_another_owner() -> Seeded:
    """Rank 3 sends the gradients of rank 1's keys to rank 2, and those of rank 2's to rank 1."""
    seeded = Seeded(backward=True, stages=True)
    swap = {1: 2, 2: 1}
    seeded.edit(
        3, 2, lambda steps: [
            replace(x, peer=swap[x.peer]) if isinstance(x, Send) and x.payload is Payload.PARTS else x
            for x in steps
        ],
    )  # fmt: skip
    return seeded


def gradients_of_other_keys_of_a_stage() -> Seeded:
    """Rank 3 sends rank 1 what it found for rank 2's keys."""
    seeded = Seeded(backward=True, stages=True)
    sends = [x for x in seeded.rounds(3)[2].posted if isinstance(x, Send) and x.payload is Payload.PARTS]
    seeded.edit(3, 2, lambda steps: [replace(x, part=sends[1].part) if x is sends[0] else x for x in steps])
    return seeded


FAULTS = [
    (stages_in_another_order, "ring rank 3, batch 1.*: expected tiles over the keys that are in the buffer"),
    (keys_of_a_stage_swapped, "ring rank 3, batch 1.*: expected tiles over the keys that are in the buffer"),
    (keys_of_a_stage_on_top_of_each_other,
        "ring rank 3, batch 0, receive.*: expected empty slots of b.*, got slots of another message"),
    (gradients_to_another_owner,
        "ring rank [12], batch 2.*: expected the tokens it names, got as many others"),
    (gradients_of_other_keys_of_a_stage, "ring rank 3, batch 2, send.*: expected the tokens it names, got"),
    (
        swapped_kinds,
        r"ring rank 1, batch 2.*: expected dK/dV \(gradients\) as its sender's next message,"
        r" got K/V \(keys\): send",
    ),
    (swapped_messages,
        "ring rank 2, batch 1.*: expected the tokens it names, got as many others of ring rank 0"),
    (other_tokens_sent,
        "ring rank 1, batch 0, send K/V of 1 .* to 2: expected the tokens it names, got others"),
    (wrong_size, "ring rank 2, batch 0.*: expected 15 tokens, got 16: send K/V of 1"),
    (buffer_too_small, "ring rank 2, batch 0.*: expected b3 to be a buffer of 16 tokens, got one of 12"),
    (packed_too_small,
        "ring rank 1, batch 0, send.*: expected b2 to be a buffer of 16 tokens, got one of 12"),
    (gradients_too_small,
        "ring rank 1, batch 1, hop 1.*: expected b[0-9]+ to be a buffer of 16 .*, got one of 12"),
    (results_too_small,
        "ring rank 3: expected results .* 16 tokens of gradients, got 12 tokens of gradients"),
    (shard_too_large, "ring rank 3: expected shard .* 16 tokens of keys, got 17 tokens of keys"),
    (packed_in_another_dtype, "ring rank 1, batch 0, send.*: expected keys, got a buffer of the other kind"),
    (received_in_another_dtype, "ring rank 2, batch 2, rec.* to be of gradients, got a buffer of rounded"),
    (gradients_in_another_dtype, "ring rank 1, batch 1, hop 1.* to be of gradients, got a buffer of keys"),
    (results_in_another_dtype, "ring rank 0: expected results .* 16 tokens of gradients, got .* rounded"),
    (gradients_for_keys,
        "ring rank 1, batch 0, hop 0.*: expected results to be of keys, got a buffer of gra"),
    (gradients_into_keys,
        "ring rank 2, batch 3.*: expected b[0-9]+ to be of gradients, got a buffer of keys"),
    (heads_left_out, r"ring rank 0: expected head chunks with the K/V heads \[0\], each once, got \[1\]"),
    (queries_of_other_heads, "ring rank 2: expected query heads slice.0, 1.*, got slice.1, 2"),
    (no_such_rank, "ring rank 3, batch 1.*: expected another rank of the ring, got ring rank 4"),
    (wrong_peer, "ring rank 2, batch 2.*: expected ring rank 1 to send it, got no send left there"),
    (missing_receive, "ring rank 1, batch 2.*: expected ring rank 2 to receive it, got no receive left"),
    (missing_send, "ring rank 2, batch 2.*: expected ring rank 1 to send it, got no send left there"),
    (other_heads, r"ring rank 3: expected head chunks \[slice\(0, 1, 1\)\], got \[slice\(1, 2"),
    (deadlock, r"got a wait in a circle: 0 \(batch 0\) -> 1 \(batch 0\) -> 0 \(batch 0\)"),
    (read_before_arrival, "ring rank 1, batch 0, hop 1.*: expected b3 to be filled, got a read before that"),
    (read_of_nothing,
        "ring rank 1, batch 1, hop 1.*: expected a buffer that is in use, got b7, which was never"),
    (wait_forgotten, "ring rank 1, batch 2, hop 2.*: expected to need batch 1 of its chunk, got batch 0"),
    (freed_early, "ring rank 1, batch 3, hop 3.*: expected a buffer that is in use, got b7, which was freed"),
    (freed_twice, "ring rank 1, batch 3, free b5: expected a buffer that is in use, got b5, which was freed"),
    (never_freed, "ring rank 1.*: expected b3 of head chunk 0 to be freed, got the end of the schedule"),
    (shard_freed, "ring rank 2, batch 2, free shard: expected a buffer of the pass, got the caller's own"),
    (results_freed_early,
        "ring rank 0, batch 3, hop 3.*: expected a buffer that is in use, got results, which"),
    (freed_on_arrival, "ring rank 1, batch 2, send dK/dV of 0.*: expected a buffer that is in use, got b6"),
    (overwritten, "ring rank 1, batch 1, receive.*: expected a buffer that is free, got b3, which is in use"),
    (written_while_sent,
        "ring rank 1, batch 2, hop 0.*: expected results to be left alone, got a change while"),
    (computed_twice, "ring rank 2, batch 1, hop 1.*: expected at most 0 pairs .*, got 256 pairs: some are"),
    (never_computed,
        "ring rank 3: expected head chunk 0 to compute every pair with keys of ring rank 1, got 256"),
    (tiles_of_another_hop, "ring rank 3, batch 2.*: expected tiles over the keys that are in the buffer"),
    (tiles_of_another_rank, "ring rank 3, batch 1.*: expected tiles over the queries of this rank"),
    (keys_of_another_hop, "ring rank 3, batch 2.*: expected keys of ring rank 0, got other keys in b5"),
    (gradients_lost, "ring rank 2: expected gradients of all readers .* to return, got none of ring rank 3"),
    (gradients_of_a_hop_lost,
        "expected gradients of all readers .*, got none of ring rank [0-3] for 16 tokens"),
    (gradients_twice, "ring rank 2, batch 5.*: expected each rank's gradients once, got those of ring rank"),
    (gradients_to_other_tokens, "ring rank 1, batch 3.*: expected gradients of the tokens of results, got"),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "message"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_seeded_fault_is_refused(fault: Callable[[], Seeded], message: str) -> None:
    seeded = fault()
    with pytest.raises(RingScheduleError, match=message):
        validate_schedules(seeded.schedules, seeded.plan)


@pytest.mark.parametrize("backward", [False, True])
def test_the_same_schedules_without_a_fault_are_accepted(backward: bool) -> None:
    for ring_size in (2, 4):
        seeded = Seeded(backward, ring_size)
        validate_schedules(seeded.schedules, seeded.plan)


def test_the_error_says_what_it_is_about_and_can_be_pickled() -> None:
    seeded = wrong_size()
    with pytest.raises(RingError) as caught:
        validate_schedules(seeded.schedules, seeded.plan)
    found = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(found, RingScheduleError) and str(found) == str(caught.value)
    assert (found.ring_rank, found.batch, found.expected) == (2, 0, "15 tokens")
    assert found.step.startswith("receive K/V of 1") and found.got.startswith("16: send K/V of 1")
