"""Rings of intervals: at most four peers a rank in rings of every size, and what they share."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ds_ring import Causal, Documents, Full, SlidingWindow, make_layout
from ds_ring.comm.mesh import CallCounter, RingMesh
from ds_ring.comm.messages import Observers
from ds_ring.data.dynamic_ring import intervals
from ds_ring.data.dynamic_ring.intervals import (
    SubRings,
    are_linked,
    between_neighbours,
    ring_order,
    stays_linked,
)
from ds_ring.errors import RingMeshError
from ds_ring.health.failure_detector.wire import Fault
from ds_ring.health.stuck_waits import make_peer_error
from ds_ring.masks.pattern import Pattern
from ds_ring.memory.regions import ResultStore
from ds_ring.ops.context import ContextCache
from ds_ring.ring.pool import Buffers
from ds_ring.schedule.grid import Grid
from ds_ring.schedule.lowering import lower_rank
from ds_ring.schedule.plan import build_plan
from ds_ring.schedule.steps import Recv, Send


def test_neighbours_of_every_interval_are_at_most_two_ranks_apart() -> None:
    for ring_size in range(1, 20):
        peers: list[set[int]] = [set() for _ in range(ring_size)]
        rings = SubRings(RingMesh(Grid(ring_size, ring_size), 0))
        for first in range(ring_size):
            for ranks in range(1, ring_size - first + 1):
                numbers = rings.numbers(first, ranks)
                assert sorted(numbers) == list(range(first, first + ranks))
                for one, other in pairwise((*numbers, numbers[0])):
                    peers[one] |= {other} - {one}
                    peers[other] |= {one} - {other}
        for rank, some in enumerate(peers):
            assert some <= {(rank + apart) % ring_size for apart in (-2, -1, 1, 2)}


PATTERNS: dict[str, tuple[Pattern, str]] = {
    "causal": (Causal(), "zigzag"),
    "full": (Full(), "contiguous"),
    "causal contiguous": (Causal(), "contiguous"),
    "window": (SlidingWindow(9), "contiguous"),
    "wide window": (SlidingWindow(40), "contiguous"),
    "striped window": (SlidingWindow(9), "striped"),
    "documents": (Causal() & Documents([n // 21 for n in range(96)]), "balanced"),
}


@pytest.mark.parametrize("case", PATTERNS)
def test_a_pass_sends_between_linked_ranks_alone(case: str) -> None:
    """Every message of every rank's schedule; where pruning would send further, nothing is pruned."""
    pattern, name = PATTERNS[case]
    pruned = []
    for ranks in range(2, 9):
        numbers = ring_order(ranks)
        layout = make_layout(name, tokens=96, ring_size=ranks, pattern=pattern)
        plan = build_plan(pattern, layout)
        pruned.append(stays_linked(plan, numbers, 64))
        further = False
        around = between_neighbours(plan, numbers, 64)
        assert (around is plan) == pruned[-1]
        assert plan.tokens_sent <= around.tokens_sent <= build_plan(pattern, layout, prune=False).tokens_sent
        for one, allowed in ((plan, pruned[-1]), (around, True)):
            for rank in range(ranks):
                for backward in (False, True):
                    for chunk in lower_rank(one.rank(rank), backward=backward).chunks:
                        for step in (step for part in chunk.steps.rounds for step in part.posted):
                            assert isinstance(step, Send | Recv)
                            linked = are_linked(numbers[rank], numbers[step.peer], 64)
                            assert linked or not allowed, (case, ranks, rank, step)
                            further |= not linked
        assert further != pruned[-1], "what is refused would send further"
    assert all(pruned[:2]), "three ranks are all linked"
    assert all(pruned) == (case in ("full", "window")), pruned


@pytest.mark.parametrize(
    "more", [{"gradient_payload": "bfloat16"}, {"stage_shards": 3}, {"ranks_per_node": 4}]
)
def test_what_pruning_would_not_change_is_left_alone(more: dict[str, object]) -> None:
    layout = make_layout("zigzag", tokens=96, ring_size=8, pattern=Causal())
    assert stays_linked(build_plan(Causal(), layout, **more), range(8), 8)  # type: ignore[arg-type]


def test_smaller_rings_share_what_the_whole_one_keeps() -> None:
    """Two rings of four in an order of their own; checkpoints of small rings go to the host, too."""
    order = (4, 5, 6, 7, 0, 1, 2, 3)
    for rank in range(8):
        mesh = RingMesh(Grid(8, 4, 1, order), rank, "ring", None, "sequence", "data", "cpu", ranks_per_node=2)  # type: ignore[arg-type]
        rings, first = SubRings(mesh), order[rank] // 4 * 4
        for places in ([(0, 3), (3, 1)], [(0, 1), (1, 3)], [(0, 2), (2, 2)], [(0, 4)]):
            one = rings.get_ring(places)
            assert one is rings.get_ring(places) is not mesh
            begin, ranks = next(place for place in places if place[0] <= mesh.ring_rank < sum(place))
            assert one.ring_size == ranks and one.ring_rank_of(rank) in (one.ring_rank, None)
            numbers = [first + begin + n for n in (range(ranks) if ranks == 4 else ring_order(ranks))]
            if ranks > 1:
                assert [one.global_rank_of(n) for n in range(ranks)] == [order.index(n) for n in numbers]
                assert (one.ring_group, one.sequence_group, one.cpu_group) == ("ring", "sequence", "cpu")
                of_nodes = {(0, 2): 2, (2, 2): 2, (0, 4): 2}  # others have unequal parts of two nodes
                assert one.grid.ring_ranks_per_node(rank, 2) == of_nodes.get((begin, ranks))
            else:
                assert one.ring_group is None and one.detector is None
            for name in ("state", "timeouts"):
                assert getattr(one, name) is getattr(mesh, name), (ranks, name)
            for kind in (Buffers, ResultStore, Observers):
                assert one.owners[kind] is mesh.owners[kind], (ranks, kind)
            for kind in (CallCounter, ContextCache):
                assert one.owners[kind] is not mesh.owners[kind], (ranks, kind)


def test_all_ranks_forget_a_ring_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever rings a rank was in itself, or two ranks of one would count their calls differently."""
    monkeypatch.setattr(intervals, "KEPT_RINGS", 3)
    divisions = [[(first, ranks)] for ranks in range(1, 9) for first in range(9 - ranks)]
    alike = []
    for rank in range(0, 8, 3):
        rings = SubRings(RingMesh(Grid(8, 8), rank))
        first = rings.get_ring([(0, 8)])
        for places in divisions[:-1]:
            rings.get_ring(places)
        assert len(rings) == 32 < len(divisions)
        assert rings.get_ring([(0, 8)]) is not first
        alike.append(tuple(rings._meshes))
    assert len(set(alike)) == 1


def test_an_error_names_ranks_of_other_rings_by_the_world() -> None:
    rings = SubRings(RingMesh(Grid(4, 4), 1))
    grid = rings.get_ring([(0, 3)]).grid
    inside, outside = (make_peer_error(grid, 1, 5, Fault(rank, "it ended")) for rank in (2, 3))
    assert (inside.ring_rank, inside.peer) == (2, 1) and "rank 2 of the world" in str(inside)
    assert outside.peer is None and "rank 3 of the world" in str(outside)


def test_ulysses_ranks_are_refused() -> None:
    with pytest.raises(RingMeshError, match="expected no Ulysses ranks, got 2"):
        SubRings(RingMesh(Grid(4, 2, 2), 0))
