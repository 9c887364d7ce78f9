"""Plans: nothing computed twice, nothing missing, nothing sent that is not read, and balanced."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ds_ring import Causal, Full, RingLayoutError, build_plan, make_layout
from ds_ring.runtime.kernels.cpu import CpuKernel
from ds_ring.schedule.layout import Layout
from ds_ring.schedule.pattern import Pattern
from ds_ring.schedule.plan import Plan, count_slots, locate_slots, subtract_slots
from tests.cases import LAYOUTS, PATTERNS
from tests.unit.schedule.test_tiles import paint


def ranges_to_slots(ranges: np.ndarray) -> np.ndarray:
    return np.concatenate([np.arange(a, b) for a, b in ranges]) if len(ranges) else np.empty(0, dtype=int)


@pytest.mark.parametrize("layout_name", LAYOUTS)
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize(("tokens", "ring_size"), [(40, 1), (40, 2), (41, 3), (64, 4), (5, 8), (83, 8)])
@pytest.mark.parametrize("prune", [True, False])
def test_a_plan_computes_the_mask_and_every_key_is_there(
    layout_name: str, pattern: Pattern, tokens: int, ring_size: int, prune: bool
) -> None:
    layout = make_layout(layout_name, tokens=tokens, ring_size=ring_size)
    plan = build_plan(pattern, layout, prune=prune)
    for rank in range(ring_size):
        seen = np.zeros((layout.local_tokens, tokens), dtype=int)
        for visit in filter(None, plan.rank(rank).visits):
            held = ranges_to_slots(visit.held)
            positions = layout.positions(visit.origin)[held]
            cover = paint(visit.tiles, layout.local_tokens, len(held))
            seen[:, positions] += cover
            assert set(ranges_to_slots(visit.forward)) <= set(held)
        np.testing.assert_array_equal(seen, pattern.mask(layout.positions(rank), np.arange(tokens)))


@pytest.mark.parametrize("layout_name", LAYOUTS)
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("ring_size", [2, 3, 8])
def test_what_is_sent_is_what_is_received_and_no_more_than_is_read(
    layout_name: str, pattern: Pattern, ring_size: int
) -> None:
    layout = make_layout(layout_name, tokens=16 * ring_size - 3, ring_size=ring_size)
    plan = build_plan(pattern, layout)
    ranks = [plan.rank(rank) for rank in range(ring_size)]
    for rank, hop in itertools.product(range(ring_size), range(ring_size)):
        visit, following = ranks[rank].visit(hop), ranks[(rank + plan.direction) % ring_size].visit(hop + 1)
        sent = visit.forward if visit is not None else np.empty((0, 2), dtype=np.int64)
        held = following.held if following is not None else np.empty((0, 2), dtype=np.int64)
        np.testing.assert_array_equal(sent, held)
    assert sum(r.tokens_sent for r in ranks) == sum(r.tokens_received for r in ranks) == plan.tokens_sent
    for origin in range(ring_size):
        read_later: set[int] = set()
        for hop in range(ring_size - 1, 0, -1):
            visit = ranks[(origin + plan.direction * hop) % ring_size].visit(hop)
            if visit is None:
                assert not read_later
                continue
            held, table = ranges_to_slots(visit.held), visit.tiles.k
            for slot, length in zip(table.slot, table.length, strict=True):
                read_later |= set(held[slot : slot + length])
            assert set(held) == read_later, "sent although nobody reads it"


@pytest.mark.parametrize("layout_name", LAYOUTS)
@pytest.mark.parametrize("ring_size", [2, 3, 8])
def test_every_gradient_comes_home_once(layout_name: str, ring_size: int) -> None:
    layout = make_layout(layout_name, tokens=100, ring_size=ring_size)
    plan = build_plan(Causal(), layout)
    for rank in range(ring_size):
        own = plan.rank(rank)
        home = [ranges_to_slots(coming.slots) for coming in own.homecomings]
        came = np.concatenate(home) if home else np.empty(0, dtype=int)
        assert len(came) == len(set(came)), "a gradient that comes home twice"
        np.testing.assert_array_equal(np.sort(came), ranges_to_slots(plan.held(rank, 1)))
        for coming in own.homecomings:
            visit = plan.rank(coming.sender).visit(coming.hop)
            assert visit is not None and visit.origin == rank
            np.testing.assert_array_equal(visit.ends_here, coming.slots)


def executed_pairs(plan: Plan, rank: int) -> int:
    kernel = CpuKernel()
    return sum(kernel.executed_pairs(visit.tiles) for visit in plan.rank(rank).visits if visit is not None)


@pytest.mark.parametrize("ring_size", [2, 4, 8, 64])
def test_zigzag_balances_a_causal_mask(ring_size: int) -> None:
    layout = make_layout("zigzag", tokens=ring_size * 2048, ring_size=ring_size)
    plan = build_plan(Causal(), layout)
    planned = [plan.rank(rank).pairs for rank in range(ring_size)]
    assert sum(planned) == layout.tokens * (layout.tokens + 1) // 2
    assert max(planned) <= 1.01 * np.mean(planned)
    executed = [executed_pairs(plan, rank) for rank in range(ring_size)]
    assert max(executed) <= 1.01 * np.mean(executed)


def test_contiguous_is_what_zigzag_is_for() -> None:
    plan = build_plan(Causal(), make_layout("contiguous", tokens=64 * 128, ring_size=64))
    pairs = [plan.rank(rank).pairs for rank in range(64)]
    assert max(pairs) / np.mean(pairs) > 1.9


@pytest.mark.parametrize(
    ("name", "share", "direction"), [("zigzag", 0.75, -1), ("contiguous", 0.5, 1), ("striped", 1.0, 1)]
)
def test_the_direction_that_sends_less_is_taken(name: str, share: float, direction: int) -> None:
    layout = make_layout(name, tokens=8 * 128, ring_size=8)
    plan = build_plan(Causal(), layout)
    all_gather_tokens = 8 * 7 * 128
    assert plan.direction == direction
    assert plan.tokens_sent == pytest.approx(share * all_gather_tokens, rel=0.005)


def test_causal_contiguous_stops_where_nobody_reads_on() -> None:
    plan = build_plan(Causal(), make_layout("contiguous", tokens=64, ring_size=4))
    first, last = plan.rank(0), plan.rank(3)
    assert first.hops == 1 and first.tokens_received == 0 and first.tokens_sent == 16
    assert last.tokens_sent == 0 and last.tokens_received == 48


def test_without_pruning_everything_goes_all_the_way_round() -> None:
    layout = make_layout("contiguous", tokens=64, ring_size=4)
    assert build_plan(Causal(), layout, prune=False).tokens_sent == 4 * 3 * 16


def test_a_plan_of_1024_ranks_is_built_for_one_rank_at_a_time() -> None:
    layout = make_layout("zigzag", tokens=1024 << 20, ring_size=1024)
    rank = build_plan(Causal(), layout, direction=-1).rank(0)
    assert rank.hops == 1024
    assert rank.pairs == pytest.approx(layout.tokens**2 / 2 / 1024, rel=1e-6)


def test_a_summary_names_every_hop() -> None:
    text = build_plan(Causal(), make_layout("zigzag", tokens=64, ring_size=2)).summary()
    assert "zigzag layout of 64 tokens over 2 ranks" in text and len(text.splitlines()) == 2 + 4


def test_slot_arithmetic() -> None:
    whole = np.array([[0, 10], [20, 30]])
    np.testing.assert_array_equal(
        subtract_slots(whole, np.array([[3, 5], [20, 25]])), [[0, 3], [5, 10], [25, 30]]
    )
    np.testing.assert_array_equal(subtract_slots(whole, whole), np.empty((0, 2)))
    np.testing.assert_array_equal(locate_slots(np.array([0, 9, 20, 29]), whole), [0, 9, 10, 19])
    assert count_slots(whole) == 20


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"query_heads": 6, "kv_heads": 4}, "multiple of K/V heads: got 6 and 4"),
        ({"direction": 2}, "direction: expected"),
    ],
)
def test_plans_that_cannot_be(arguments: dict[str, int], said: str) -> None:
    layout: Layout = make_layout("zigzag", tokens=64, ring_size=2)
    with pytest.raises(RingLayoutError, match=said):
        build_plan(Full(), layout, **arguments)
