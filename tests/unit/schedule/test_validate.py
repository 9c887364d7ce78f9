"""The validator: every plan of the registry is accepted, every fault seeded into a schedule is refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from ds_ring import Causal, Full, build_plan, make_layout
from ds_ring.errors import RingError, RingScheduleError
from ds_ring.masks.pattern import Pattern
from ds_ring.schedule import lowering
from ds_ring.schedule.directions import make_stages
from ds_ring.schedule.lowering import lower_pass
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
from tests.cases import LAYOUTS, PATTERNS, layout_for, least_kept
from tests.schedule_proof.validate import validate_plan, validate_schedules

ALL_APART = {"head_bytes": 1, "chunk_bytes": 1}  # every K/V head is a chunk of its own


_DILATED = ["dilated"] if "dilated" in PATTERNS else []  # a capability
# --- what is accepted ------------------------------------------------------------------------------


@pytest.mark.day(
    "None-causal-4",
    "3-full-4",
    "3-window both ways-3",
    "3-documents-4",
    "3-mask function, causal-4",
    "3-dilated-4",
)
@pytest.mark.parametrize("ring_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("pattern_of", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("most", [None, 3])
def test_every_plan_of_the_registry_is_accepted(
    pattern_of: Callable[[int], Pattern], ring_size: int, most: int | None
) -> None:
    """Also with a part of these short shards for the end of a backward pass."""
    tokens = 8 * ring_size + 5
    pattern = pattern_of(tokens)
    for name in LAYOUTS:
        layout = layout_for(name, pattern, tokens=tokens, ring_size=ring_size)
        for least in (lowering.LEAST_KEPT, 1):
            with least_kept(least):
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
        way = make_stages(ring_size, 2) if stages else (Direction(1, ring_size - 1),)
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


def gradient_message(s: Seeded, rank: int, batch: int) -> Recv:
    """The first message of gradients that a rank receives in a batch."""
    posted = s.rounds(rank)[batch].posted
    return next(x for x in posted if isinstance(x, Recv) and x.payload is Payload.GRADIENTS)


def stages_in_another_order(s: Seeded) -> None:
    """Rank 3 computes the last stage's tiles with the keys of the first one."""
    first, last = (s.find(Compute, 3, batch) for batch in (1, 2))
    s.change(Compute, 3, 1, tiles=last.tiles)
    s.change(Compute, 3, 2, tiles=first.tiles)


def keys_of_a_stage_swapped(s: Seeded) -> None:
    """Rank 3 puts the keys of ranks 1 and 2 where those of the other one belong."""
    swap = {0: 16, 16: 0}
    s.edit(3, 0, lambda steps: [replace(x, first=swap[x.first]) if isinstance(x, Recv) else x for x in steps])


def gradients_to_another_owner(s: Seeded) -> None:
    """Rank 3 sends the gradients of rank 1's keys to rank 2, and those of rank 2's to rank 1."""
    swap = {1: 2, 2: 1}
    s.edit(
        3, 2, lambda steps: [
            replace(x, peer=swap[x.peer]) if isinstance(x, Send) and x.payload is Payload.PARTS else x
            for x in steps
        ],
    )  # fmt: skip


def gradients_of_other_keys_of_a_stage(s: Seeded) -> None:
    """Rank 3 sends rank 1 what it found for rank 2's keys."""
    sends = [x for x in s.rounds(3)[2].posted if isinstance(x, Send) and x.payload is Payload.PARTS]
    s.edit(3, 2, lambda steps: [replace(x, part=sends[1].part) if x is sends[0] else x for x in steps])


def swapped_messages(s: Seeded) -> None:
    """Rank 2 takes the second message of rank 1 for the first, and the other way round."""
    first, second = (s.find(Recv, 2, batch) for batch in (1, 2))
    s.change(Recv, 2, 1, origin=second.origin)
    s.change(Recv, 2, 2, origin=first.origin)


def heads_left_out(s: Seeded) -> None:
    for rank in range(4):
        s.chunk(rank, kv_heads=slice(1, 2, 1))


def deadlock(s: Seeded) -> None:
    """Both ranks of a ring of two send in batch 0 what the other one receives in batch 1."""
    for rank in (0, 1):
        receive = s.find(Recv, rank, 0)
        s.drop(receive, rank, 0)
        s.drop(s.find(Compute, rank, 1), rank, 1)
        s.insert(receive, rank, 1)


def read_before_arrival(s: Seeded) -> None:
    compute = s.find(Compute, 1, 1)
    s.drop(compute, 1, 1)
    s.insert(compute, 1, 0)


def freed_on_arrival(s: Seeded) -> None:
    """Rank 1 gives gradients back in the batch after they were computed, while they are still to be sent."""
    found = s.find(Compute, 1, 1).gradients
    step = next(x for x in s.rounds(1)[3].arrived if isinstance(x, Free) and x.buffer == found)
    s.drop(step, 1, 3)
    s.edit(1, 2, lambda steps: [step, *steps])


def written_while_sent(s: Seeded) -> None:
    """Rank 1 computes into the gradients of its own tokens while it sends them."""
    compute = s.find(Compute, 1, 0)
    s.drop(compute, 1, 0)
    s.insert(compute, 1, 2)
    late = next(x for x in s.rounds(1)[2].posted if isinstance(x, Send) and x.payload is Payload.GRADIENTS)
    own = replace(late, buffer=RESULTS, origin=1, needs=-1)
    s.edit(1, 2, lambda steps: [own if x is late else x for x in steps])


def gradients_of_a_hop_lost(s: Seeded) -> None:
    """Rank 2 does not add what rank 1 found to its own gradients of the same keys."""
    s.drop(s.find(Accumulate, 2, 3), 2, 3)
    late = next(s for s in s.rounds(2)[3].posted if isinstance(s, Send))
    s.edit(2, 3, lambda steps: [replace(x, needs=1) if x is late else x for x in steps])


FORWARD, BACKWARD, STAGES = {"backward": False}, {"backward": True}, {"stages": True}
# The pass, its damage, and what the validator says. In stages a rank computes with its own keys, two others',
# and the last one's.
FAULTS: dict[str, tuple[dict[str, Any], Callable[[Seeded], object], str]] = {
    "stages in another order": (FORWARD | STAGES, stages_in_another_order,
        "ring rank 3, batch 1.*: expected tiles over the keys that are in the buffer"),
    "keys of a stage swapped": (FORWARD | STAGES, keys_of_a_stage_swapped,
        "ring rank 3, batch 1.*: expected tiles over the keys that are in the buffer"),
    "keys of a stage on top of each other": (FORWARD | STAGES,
        lambda s: s.edit(3, 0, lambda all: [replace(x, first=0) if isinstance(x, Recv) else x for x in all]),
        "ring rank 3, batch 0, receive.*: expected empty slots of b.*, got slots of another message"),
    "gradients to another owner": (BACKWARD | STAGES, gradients_to_another_owner,
        "ring rank [12], batch 2.*: expected the tokens it names, got as many others"),
    "gradients of other keys of a stage": (BACKWARD | STAGES, gradients_of_other_keys_of_a_stage,
        "ring rank 3, batch 2, send.*: expected the tokens it names, got"),
    # Rank 1 sends gradients before keys.
    "swapped kinds": (BACKWARD, lambda s: s.edit(1, 2, lambda steps: steps[::-1]),
        r"ring rank 1, batch 2.*: expected dK/dV \(gradients\) as its sender's next message, got K/V"),
    "swapped messages": (FORWARD, swapped_messages,
        "ring rank 2, batch 1.*: expected the tokens it names, got as many others of ring rank 0"),
    "other tokens sent": (FORWARD, lambda s: s.change(Send, 1, 0, part=np.array([[0, 8], [0, 8]])),
        "ring rank 1, batch 0, send K/V of 1 .* to 2: expected the tokens it names, got others"),
    "wrong size": (FORWARD, lambda s: s.change(Recv, 2, 0, slots=np.array([[0, 15]])),
        "ring rank 2, batch 0.*: expected 15 tokens, got 16: send K/V of 1"),
    "buffer too small": (FORWARD, lambda s: s.buffer(s.find(Recv, 2, 0).buffer, 2, slots=12),
        "ring rank 2, batch 0.*: expected b3 to be a buffer of 16 tokens, got one of 12"),
    "packed too small": (FORWARD, lambda s: s.buffer(s.find(Send, 1, 0).packed, 1, slots=12),
        "ring rank 1, batch 0, send.*: expected b2 to be a buffer of 16 tokens, got one of 12"),
    "gradients too small": (BACKWARD, lambda s: s.buffer(s.find(Compute, 1, 1).gradients, 1, slots=12),
        "ring rank 1, batch 1, hop 1.*: expected b[0-9]+ to be a buffer of 16 .*, got one of 12"),
    "results too small": (BACKWARD, lambda s: s.buffer(RESULTS, 3, slots=12),
        "ring rank 3: expected results .* 16 tokens of gradients, got 12 tokens of gradients"),
    "shard too large": (FORWARD, lambda s: s.buffer(SHARD, 3, slots=17),
        "ring rank 3: expected shard .* 16 tokens of keys, got 17 tokens of keys"),
    "packed in another dtype": (FORWARD,
        lambda s: s.buffer(s.find(Send, 1, 0).packed, 1, payload=Payload.GRADIENTS),
        "ring rank 1, batch 0, send.*: expected keys, got a buffer of the other kind"),
    # Rank 2 takes gradients, which come in float32, in a buffer of bfloat16.
    "received in another dtype": (BACKWARD,
        lambda s: s.buffer(gradient_message(s, 2, 2).buffer, 2, payload=Payload.ROUNDED),
        "ring rank 2, batch 2, rec.* to be of gradients, got a buffer of rounded"),
    # Rank 1 adds up gradients in the dtype of the keys.
    "gradients in another dtype": (BACKWARD,
        lambda s: s.buffer(s.find(Compute, 1, 1).gradients, 1, payload=Payload.KEYS),
        "ring rank 1, batch 1, hop 1.* to be of gradients, got a buffer of keys"),
    "results in another dtype": (BACKWARD, lambda s: s.buffer(RESULTS, 0, payload=Payload.ROUNDED),
        "ring rank 0: expected results .* 16 tokens of gradients, got .* rounded"),
    # Rank 1 attends to what it found for its own tokens, as if these were its keys.
    "gradients for keys": (BACKWARD, lambda s: s.change(Compute, 1, 0, buffer=RESULTS),
        "ring rank 1, batch 0, hop 0.*: expected results to be of keys, got a buffer of gra"),
    # What arrives for rank 0's tokens is added to their keys.
    "gradients into keys": (BACKWARD,
        lambda s: s.change(Accumulate, 2, 3, buffer=s.find(Compute, 2, 2).buffer),
        "ring rank 2, batch 3.*: expected b[0-9]+ to be of gradients, got a buffer of keys"),
    "heads left out": (FORWARD, heads_left_out,
        r"ring rank 0: expected head chunks with the K/V heads \[0\], each once, got \[1\]"),
    "queries of other heads": (FORWARD, lambda s: s.chunk(2, query_heads=slice(1, 2, 1)),
        "ring rank 2: expected query heads slice.0, 1.*, got slice.1, 2"),
    "no such rank": (FORWARD, lambda s: s.change(Send, 3, 1, peer=4),
        "ring rank 3, batch 1.*: expected another rank of the ring, got ring rank 4"),
    "wrong peer": (FORWARD, lambda s: s.change(Send, 1, 2, peer=3),
        "ring rank 2, batch 2.*: expected ring rank 1 to send it, got no send left there"),
    "missing receive": (FORWARD, lambda s: s.drop(s.find(Recv, 2, 2), 2, 2),
        "ring rank 1, batch 2.*: expected ring rank 2 to receive it, got no receive left"),
    "missing send": (FORWARD, lambda s: s.drop(s.find(Send, 1, 2), 1, 2),
        "ring rank 2, batch 2.*: expected ring rank 1 to send it, got no send left there"),
    "other heads": (FORWARD, lambda s: s.chunk(3, kv_heads=slice(1, 2)),
        r"ring rank 3: expected head chunks \[slice\(0, 1, 1\)\], got \[slice\(1, 2"),
    "deadlock": (FORWARD | {"ring_size": 2}, deadlock,
        r"got a wait in a circle: 0 \(batch 0\) -> 1 \(batch 0\) -> 0 \(batch 0\)"),
    "read before arrival": (FORWARD, read_before_arrival,
        "ring rank 1, batch 0, hop 1.*: expected b3 to be filled, got a read before that"),
    "read of nothing": (FORWARD, lambda s: s.change(Compute, 1, 1, buffer=s.find(Compute, 1, 3).buffer),
        "ring rank 1, batch 1, hop 1.*: expected a buffer that is in use, got b7, which was never"),
    "wait forgotten": (FORWARD, lambda s: s.change(Compute, 1, 2, needs=0),
        "ring rank 1, batch 2, hop 2.*: expected to need batch 1 of its chunk, got batch 0"),
    "freed early": (FORWARD, lambda s: s.insert(Free(s.find(Compute, 1, 3).buffer), 1, 3),
        "ring rank 1, batch 3, hop 3.*: expected a buffer that is in use, got b7, which was freed"),
    "freed twice": (FORWARD, lambda s: s.insert(s.find(Free, 1, 3), 1, 3),
        "ring rank 1, batch 3, free b5: expected a buffer that is in use, got b5, which was freed"),
    "never freed": (FORWARD, lambda s: s.drop(s.find(Free, 1, 2), 1, 2),
        "ring rank 1.*: expected b3 of head chunk 0 to be freed, got the end of the schedule"),
    "shard freed": (FORWARD, lambda s: s.insert(Free(SHARD), 2, 2),
        "ring rank 2, batch 2, free shard: expected a buffer of the pass, got the caller's own"),
    "results freed early": (FORWARD, lambda s: s.edit(0, 3, lambda steps: [Free(RESULTS), *steps]),
        "ring rank 0, batch 3, hop 3.*: expected a buffer that is in use, got results, which"),
    "freed on arrival": (BACKWARD, freed_on_arrival,
        "ring rank 1, batch 2, send dK/dV of 0.*: expected a buffer that is in use, got b6"),
    # Rank 1 receives the next keys over those that it is about to use.
    "overwritten": (FORWARD, lambda s: s.change(Recv, 1, 1, buffer=s.find(Recv, 1, 0).buffer),
        "ring rank 1, batch 1, receive.*: expected a buffer that is free, got b3, which is in use"),
    "written while sent": (BACKWARD, written_while_sent,
        "ring rank 1, batch 2, hop 0.*: expected results to be left alone, got a change while"),
    "computed twice": (FORWARD, lambda s: s.edit(2, 1, lambda steps: [*steps, s.find(Compute, 2, 1)]),
        "ring rank 2, batch 1, hop 1.*: expected at most 0 pairs .*, got 256 pairs: some are"),
    "never computed": (FORWARD, lambda s: s.drop(s.find(Compute, 3, 2), 3, 2),
        "ring rank 3: expected head chunk 0 to compute every pair with keys of ring rank 1, got 256"),
    "tiles of another hop": (FORWARD, lambda s: s.change(Compute, 3, 2, tiles=s.find(Compute, 3, 1).tiles),
        "ring rank 3, batch 2.*: expected tiles over the keys that are in the buffer"),
    "tiles of another rank": (FORWARD, lambda s: s.change(Compute, 3, 1, tiles=s.find(Compute, 1, 3).tiles),
        "ring rank 3, batch 1.*: expected tiles over the queries of this rank"),
    "keys of another hop": (FORWARD, lambda s: s.change(Compute, 3, 2, origins=(0,)),
        "ring rank 3, batch 2.*: expected keys of ring rank 0, got other keys in b5"),
    # Rank 1 sends rank 2's gradients on, but what arrives there is thrown away.
    "gradients lost": (BACKWARD, lambda s: s.drop(s.find(Accumulate, 2, 5), 2, 5),
        "ring rank 2: expected gradients of all readers .* to return, got none of ring rank 3"),
    "gradients of a hop lost": (BACKWARD, gradients_of_a_hop_lost,
        "expected gradients of all readers .*, got none of ring rank [0-3] for 16 tokens"),
    "gradients twice": (BACKWARD, lambda s: s.insert(s.find(Accumulate, 2, 5), 2, 5),
        "ring rank 2, batch 5.*: expected each rank's gradients once, got those of ring rank"),
    # What arrives for rank 3's tokens is added to rank 2's.
    "gradients to other tokens": (BACKWARD, lambda s: s.change(Accumulate, 1, 3, buffer=RESULTS),
        "ring rank 1, batch 3.*: expected gradients of the tokens of results, got"),
}  # fmt: skip


# In stages ranks 0 to 3 compute with (own), (two others), (the last one).


@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_refused(fault: str) -> None:
    which, damage, message = FAULTS[fault]
    seeded = Seeded(**which)
    damage(seeded)
    with pytest.raises(RingScheduleError, match=message):
        validate_schedules(seeded.schedules, seeded.plan)


@pytest.mark.parametrize("backward", [False, True])
def test_the_same_schedules_without_a_fault_are_accepted(backward: bool) -> None:
    for ring_size in (2, 4):
        seeded = Seeded(backward, ring_size)
        validate_schedules(seeded.schedules, seeded.plan)


@pytest.mark.parametrize(("batch", "message"), [(4, "128 pairs left"), (0, "some are computed twice")])
def test_a_part_for_the_end_is_lost_or_computed_twice(batch: int, message: str) -> None:
    """In batch 4, after the last hop, each rank computes half of its own shard, and in batch 0 the rest."""
    with least_kept(1):
        seeded = Seeded(backward=True)
    validate_schedules(seeded.schedules, seeded.plan)
    if batch:
        seeded.drop(seeded.find(Compute, 2, batch), 2, batch)
    else:
        seeded.change(Compute, 2, batch, tiles=seeded.plan.rank(2).classes[0].hops[0].tiles)
    with pytest.raises(RingScheduleError, match=message):
        validate_schedules(seeded.schedules, seeded.plan)


def test_the_error_says_what_it_is_about_and_can_be_pickled() -> None:
    seeded = Seeded(**FORWARD)
    FAULTS["wrong size"][1](seeded)
    with pytest.raises(RingError) as caught:
        validate_schedules(seeded.schedules, seeded.plan)
    found = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(found, RingScheduleError) and str(found) == str(caught.value)
    assert (found.ring_rank, found.batch, found.expected) == (2, 0, "15 tokens")
    assert found.step.startswith("receive K/V of 1") and found.got.startswith("16: send K/V of 1")
