"""Plans: nothing computed twice, nothing missing, nothing sent that is not read, and balanced."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_ring import (
    Causal,
    Full,
    RingLayoutError,
    RingPatternError,
    SlidingWindow,
    build_plan,
    make_layout,
)  # fmt: skip
from ds_ring.masks.branches import Branch
from ds_ring.masks.pattern import Pattern, QueryHead
from ds_ring.masks.slots import (
    SlotRanges,
    count_slots,
    expand_ranges,
    merge_progressions,
    no_slots,
)
from ds_ring.masks.tiles import Tiles
from ds_ring.schedule.head_class import ReadsOfShards, find_reads, map_tiles_to_payload
from ds_ring.schedule.layout import Layout, expand_runs
from ds_ring.schedule.lowering import get_query_heads
from ds_ring.schedule.plan import Plan, find_head_classes
from ds_ring.schedule.rank_plan import Direction, make_one_way
from tests.cases import LAYOUTS, PATTERNS, layout_for, rows_of
from tests.unit.masks.painting import in_order, paint, runs
from tests.unit.masks.test_slot_ranges import as_ranges

PLACED = [name for name in LAYOUTS if name != "auto"]  # which is one of the others
HEADS = (4, 2)  # query heads and K/V heads of the plans here
PatternOf = Callable[[int], Pattern]


def slots_of(ranges: np.ndarray) -> set[int]:
    return set(expand_ranges(ranges).tolist())


def attended(pattern: Pattern, head: int, q_positions: np.ndarray, k_positions: np.ndarray) -> np.ndarray:
    """The pattern's multiplicities; padding (-1) attends to nothing."""
    q, k = q_positions[:, None], k_positions[None, :]
    return pattern.multiplicity(head, *HEADS, q, k) * (q >= 0) * (k >= 0)


@dataclass(frozen=True)
class EverySecondHead(Pattern):
    """K/V heads with equal patterns are two apart."""

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        kv_head = head.number * head.kv_heads // head.query_heads
        return SlidingWindow(3 + kv_head % 2).branches(head)


@pytest.mark.parametrize(("query_heads", "kv_heads"), [(4, 4), (8, 4), (12, 4), (6, 2)])
def test_a_class_has_the_query_heads_that_share_its_kv_heads(query_heads: int, kv_heads: int) -> None:
    pattern, group, held = EverySecondHead(), query_heads // kv_heads, list[int]()
    for heads, bound in find_head_classes(pattern, query_heads, kv_heads):
        of_class = range(kv_heads)[heads]
        queries = range(query_heads)[get_query_heads(heads, group)]
        assert [*queries] == [group * head + number for head in of_class for number in range(group)]
        assert {pattern.bind((head,), query_heads, kv_heads) for head in queries} == {bound}
        held += of_class
    assert sorted(held) == [*range(kv_heads)]


@pytest.mark.parametrize("layout_name", PLACED)
@pytest.mark.parametrize("pattern_of", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize(
    ("tokens", "ring_size", "prune"), [(40, 1, True), (41, 3, False), (5, 8, True), (64, 5, True)]
)
@pytest.mark.covering(1)
def test_a_plan_computes_the_mask_and_every_key_is_there(
    layout_name: str, pattern_of: PatternOf, tokens: int, ring_size: int, prune: bool
) -> None:
    pattern = pattern_of(tokens)
    layout = layout_for(layout_name, pattern, tokens=tokens, ring_size=ring_size)
    plan = build_plan(pattern, layout, query_heads=HEADS[0], kv_heads=HEADS[1], prune=prune)
    for rank in range(ring_size):
        seen = np.zeros((HEADS[0], layout.local_tokens, tokens), dtype=int)
        for head_class in plan.rank(rank).classes:
            for hop_plan, kv_head in itertools.product(head_class.hops, range(HEADS[1])[head_class.kv_heads]):
                held = expand_ranges(hop_plan.held)
                positions = layout.positions(hop_plan.origin)[held]
                assert slots_of(hop_plan.forward) <= set(held.tolist())
                for head_in_group in range(plan.group):
                    cover = paint(hop_plan.tiles, layout.local_tokens, len(held), head_in_group)
                    seen[kv_head * plan.group + head_in_group][:, positions] += cover
        for head in range(HEADS[0]):
            want = attended(pattern, head, layout.positions(rank), np.arange(tokens))
            np.testing.assert_array_equal(seen[head], want)


@pytest.mark.parametrize("layout_name", PLACED)
@pytest.mark.parametrize("pattern_of", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("ring_size", [2, 5])
@pytest.mark.covering(1)
def test_what_is_sent_is_what_is_received_and_no_more_than_is_read(
    layout_name: str, pattern_of: PatternOf, ring_size: int
) -> None:
    tokens = 16 * ring_size - 3
    layout = layout_for(layout_name, pattern_of(tokens), tokens=tokens, ring_size=ring_size)
    plan = build_plan(pattern_of(tokens), layout, query_heads=HEADS[0], kv_heads=HEADS[1])
    ranks = [plan.rank(rank) for rank in range(ring_size)]
    assert sum(r.tokens_sent for r in ranks) == sum(r.tokens_received for r in ranks) == plan.tokens_sent
    assert plan.tokens_sent == plan.tokens_needed
    for index, head_class in enumerate(plan.classes):
        for number, direction in enumerate(head_class.directions):
            directions = [rank.classes[index].directions[number] for rank in ranks]
            for rank, hop in itertools.product(range(ring_size), range(1, ring_size)):
                here, before = (
                    directions[rank].at(hop),
                    directions[(rank - direction.sign) % ring_size].at(hop - 1),
                )
                origin = (rank - direction.sign * hop) % ring_size
                from_neighbour = before.forward if before is not None else no_slots()
                from_origin = [
                    d.slots for d in directions[origin].direct_sends if (d.hop, d.receiver) == (hop, rank)
                ]
                if here is None:
                    assert not len(from_neighbour) and not from_origin
                    continue
                np.testing.assert_array_equal(here.relayed, from_neighbour)
                np.testing.assert_array_equal(here.from_origin, np.concatenate([no_slots(), *from_origin]))
                held, keys = expand_ranges(here.held), here.tiles.k
                rows = np.stack([keys.slot, keys.slot_step, keys.length], axis=1)
                read = held[expand_ranges(merge_progressions(rows))]
                np.testing.assert_array_equal(read, held, "sent although it is not read here")


@pytest.mark.parametrize("layout_name", PLACED)
@pytest.mark.parametrize("pattern_of", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("ring_size", [2, 5])
@pytest.mark.covering(1)
def test_gradients_come_home_once_for_every_time_a_key_leaves(
    layout_name: str, pattern_of: PatternOf, ring_size: int
) -> None:
    pattern = pattern_of(100)
    layout = layout_for(layout_name, pattern, tokens=100, ring_size=ring_size)
    plan = build_plan(pattern, layout, query_heads=HEADS[0], kv_heads=HEADS[1])
    for rank, (index, head_class) in itertools.product(range(ring_size), enumerate(plan.classes)):
        for number in range(len(head_class.directions)):
            local = plan.rank(rank).classes[index].directions[number]
            left = [local.hops[0].forward, *(direct_send.slots for direct_send in local.direct_sends)]
            came = [home.slots for home in local.gradient_returns]
            left_slots, came_slots = (
                np.sort(np.concatenate([[], *map(expand_ranges, parts)])) for parts in (left, came)
            )
            np.testing.assert_array_equal(came_slots, left_slots)  # one way home for every way out
            for coming in local.gradient_returns:
                hop_plan = plan.rank(coming.sender).classes[index].directions[number].at(coming.hop)
                assert hop_plan is not None and hop_plan.origin == rank
                np.testing.assert_array_equal(hop_plan.ends_here, coming.slots)


@pytest.mark.parametrize("layout_name", PLACED)
@pytest.mark.parametrize("pattern_of", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("ring_size", [5])
@pytest.mark.covering(1)
def test_the_lanes_of_the_fewest_links_are_taken(
    layout_name: str, pattern_of: PatternOf, ring_size: int
) -> None:
    pattern = pattern_of(200)
    layout = layout_for(layout_name, pattern, tokens=200, ring_size=ring_size)
    ways = [
        make_one_way(ring_size),
        make_one_way(ring_size, -1),
        (Direction(1, ring_size // 2), Direction(-1, (ring_size - 1) // 2)),
    ]
    links = [links_of(build_plan(pattern, layout, directions=way)) for way in ways]
    assert links_of(build_plan(pattern, layout)) == min(links)


def links_of(plan: Plan) -> int:
    """Tokens times links of the ring, counted rank by rank."""
    total = 0
    for direction in (
        direction for rank in range(plan.ring_size) for direction in plan.rank(rank).classes[0].directions
    ):
        total += sum(count_slots(hop_plan.forward) for hop_plan in direction.hops if hop_plan is not None)
        total += sum(
            direct_send.hop * count_slots(direct_send.slots) for direct_send in direction.direct_sends
        )
    return total


@pytest.mark.parametrize("ring_size", [2, 4, 8, 64])
@pytest.mark.day("2", "4", "8")  # 64: the same arithmetic as 8, 64 times as many hops
def test_zigzag_balances_a_causal_mask(ring_size: int) -> None:
    layout = make_layout("zigzag", tokens=ring_size * 2048, ring_size=ring_size)
    plan = build_plan(Causal(), layout)
    planned = [plan.rank(rank).pairs for rank in range(ring_size)]
    assert sum(planned) == layout.tokens * (layout.tokens + 1) // 2
    assert max(planned) <= 1.01 * np.mean(planned)


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
    assert plan.classes[0].directions == (Direction(direction, 7),)
    assert plan.tokens_sent == pytest.approx(share * all_gather_tokens, rel=0.005)


def test_causal_contiguous_stops_where_nobody_reads_on() -> None:
    plan = build_plan(Causal(), make_layout("contiguous", tokens=64, ring_size=4))
    first, last = plan.rank(0), plan.rank(3)
    assert first.classes[0].directions[0].forward_batches == 1
    assert first.tokens_received == 0 and first.tokens_sent == 16
    assert last.tokens_sent == 0 and last.tokens_received == 48


def test_without_pruning_everything_goes_all_the_way_round() -> None:
    layout = make_layout("contiguous", tokens=64, ring_size=4)
    assert build_plan(Causal(), layout, prune=False).tokens_sent == 4 * 3 * 16


@pytest.mark.parametrize("tokens", [1024, 4096])
def test_a_window_sends_what_it_looks_back_and_no_more_however_long_the_sequence(tokens: int) -> None:
    layout = make_layout("contiguous", tokens=tokens, ring_size=8)
    for causal, ways in ((True, 1), (False, 2)):
        plan = build_plan(SlidingWindow(64, causal), layout)
        assert plan.tokens_sent == plan.tokens_needed == ways * 7 * 63


def test_a_plan_of_1024_ranks_is_built_for_one_rank_at_a_time() -> None:
    layout = make_layout("zigzag", tokens=1024 << 20, ring_size=1024)
    rank = build_plan(Causal(), layout, directions=(Direction(-1, 1023),)).rank(0)
    assert rank.classes[0].directions[0].forward_batches == 1024
    assert rank.pairs == pytest.approx(layout.tokens**2 / 2 / 1024, rel=1e-6)


def test_a_summary_names_every_hop() -> None:
    text = build_plan(Causal(), make_layout("zigzag", tokens=64, ring_size=2)).summary()
    assert "zigzag layout of 64 tokens over 2 ranks" in text and len(text.splitlines()) == 3 + 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"query_heads": 6, "kv_heads": 4}, "multiple of K/V heads: got 6 and 4"),
        ({"query_heads": 4, "kv_heads": 0}, "kv_heads: expected a positive integer, got 0"),
    ],
)
def test_plans_that_cannot_be(arguments: dict[str, int], said: str) -> None:
    layout: Layout = make_layout("zigzag", tokens=64, ring_size=2)
    with pytest.raises(RingLayoutError, match=said):
        build_plan(Full(), layout, **arguments)


@pytest.mark.parametrize(("causal", "read"), [(True, [1, 0, 0]), (False, [1, 0, 1])])
def test_a_window_that_reaches_one_token_of_a_neighbour_reads_it(causal: bool, read: list[int]) -> None:
    """Whether a reader is asked for alone, or all of a shard's are known."""
    layout = make_layout("contiguous", tokens=16, ring_size=4)
    pattern = SlidingWindow(2, causal=causal).bind((0,), 1, 1)
    others = (2, 3, 0)
    alone = [count_slots(ReadsOfShards(pattern, layout).slots(1, reader)) for reader in others]
    of_all = ReadsOfShards(pattern, layout)
    assert of_all.readers(1) == sorted(second for second, slots in zip(others, read, strict=True) if slots)
    assert alone == [count_slots(of_all.slots(1, reader)) for reader in others] == read


@pytest.mark.parametrize("ask", [ReadsOfShards.origins, ReadsOfShards.readers])
def test_another_thread_never_finds_a_part_of_a_list(ask: Callable[[ReadsOfShards, int], list[int]]) -> None:
    """A plan belongs to all threads: a loader plans the next batch, and two rings have one plan."""

    class Interrupted(dict[tuple[int, int], SlotRanges]):
        """Let another thread ask whenever the first one has kept something."""

        def __setitem__(self, key: tuple[int, int], slots: SlotRanges) -> None:
            super().__setitem__(key, slots)
            if not results:
                results.append([])  # the other thread is not interrupted itself
                results[0] += ask(reads, 2)

    layout = make_layout("zigzag", tokens=64, ring_size=4)
    pattern = Causal().bind((0,), 1, 1)
    want = ask(ReadsOfShards(pattern, layout), 2)
    results: list[list[int]] = []
    reads = ReadsOfShards(pattern, layout, Interrupted())
    assert ask(reads, 2) == want == [0, 1, 3]
    assert results == [want]


# --- payloads: tiles over what travels are the tiles over the shard, whatever was left out ---------------


PACKED: list[Pattern] = [
    Full(),
    Causal(),
    SlidingWindow(9),
    *rows_of(
        "Dilated",
        lambda dilated: {
            "nested": dilated((8, 16, 64), (1, 2, 4)),
            "not nested": dilated((7, 30), (2, 3), False, "zero"),
            "in a window": dilated((32, 128), (2, 4), True, "zero") & SlidingWindow(20),
        },
    ).values(),
]


@given(
    pattern=st.sampled_from(PACKED),
    q=runs,
    k=runs,
    extra=st.sets(st.integers(0, 47)),
    head=st.integers(0, 3),
)
def test_packing_changes_no_pair(
    pattern: Pattern,
    q: list[tuple[int, int, int]],
    k: list[tuple[int, int, int]],
    extra: set[int],
    head: int,
) -> None:
    """Held is what the tiles read and some slots more, which others read."""
    q_runs, k_runs = in_order(q), in_order(k)
    queries, keys = len(expand_runs(q_runs)), len(expand_runs(k_runs))
    for _, bound in find_head_classes(pattern, 4, 4)[head % 2 :]:
        tiles = bound.tiles(q_runs, k_runs)
        want = paint(tiles, queries, keys)
        held = set(np.flatnonzero(want.any(0)).tolist()) | {slot for slot in extra if slot < keys}
        if not held:
            continue
        packed = map_tiles_to_payload(tiles, as_ranges(held))
        np.testing.assert_array_equal(paint(packed, queries, len(held)), want[:, sorted(held)])


@pytest.mark.parametrize(
    ("run", "held"),
    [
        ((4, 1, 6), [[0, 8]]), ((4, 1, 6), [[5, 20]]), ((0, 1, 9), [[0, 4], [6, 9]]),
        ((0, 3, 3), [[0, 3], [4, 9]]), ((0, 1, 1), np.empty((0, 2))),
    ],
)  # fmt: skip
def test_a_tile_of_keys_that_do_not_travel_is_refused(
    run: tuple[int, int, int], held: list[list[int]]
) -> None:
    """A kernel would get a view of other keys, or of none."""
    first, step, length = run
    tiles = Tiles.rectangles(np.array([[0, 1, 5]]), np.array([[0, 1, 30]]))
    tiles = tiles.sides(tiles.q, tiles.k.take(first, np.array([length]), step))
    with pytest.raises(RingPatternError, match=r"tiles: expected keys among the \d+ slots of the payload"):
        map_tiles_to_payload(tiles, np.array(held, dtype=np.int64))


@pytest.mark.parametrize("pattern", PACKED, ids=str)
def test_reads_are_those_of_the_mask(pattern: Pattern) -> None:
    origin = np.array([[3, 2, 20], [60, 1, 25]])
    readers = [np.array([[50 * hop, 1, 30], [50 * hop + 31, 3, 6]]) for hop in range(4)]
    no_runs = np.empty((0, 3), dtype=np.int64)
    valid = len(expand_runs(origin))
    for _, bound in find_head_classes(pattern, 2, 2):
        reads = find_reads(bound, readers, [no_runs, origin])
        for number, reader in enumerate(readers):
            seen = paint(bound.tiles(reader, origin), len(expand_runs(reader)), valid)
            read = set(np.flatnonzero(seen.any(0)).tolist())
            np.testing.assert_array_equal(reads.get((number, 1), no_slots()), as_ranges(read))
        assert all(shard == 1 for _, shard in reads)


# --- long plans ------------------------------------------------------------------------------------------


WINDOW = 1 << 35


def pairs_of(pattern: Pattern, tokens: int) -> int:
    """Return the pairs of one head."""
    if isinstance(pattern, Full):
        return tokens**2
    width = min(WINDOW, tokens) if isinstance(pattern, SlidingWindow) else tokens
    return tokens * width - width * (width - 1) // 2


@pytest.mark.parametrize("pattern", [Causal(), Full(), SlidingWindow(WINDOW)], ids=str)
@pytest.mark.parametrize(
    "name", [name for name in ("contiguous", "zigzag", "striped", "balanced", "auto") if name in LAYOUTS]
)
@pytest.mark.parametrize("exponent", [20, 33, 36, 40])
@pytest.mark.situation("configurations", "a plan of 2^33 to 2^40 tokens on four ranks")
def test_pairs_are_counted_beyond_int64(exponent: int, name: str, pattern: Pattern) -> None:
    tokens = (1 << exponent) + 24
    layout = make_layout(name, tokens=tokens, ring_size=4, pattern=pattern)
    plan = build_plan(pattern, layout, query_heads=8, kv_heads=2)
    results = [plan.rank(rank).pairs for rank in range(4)]
    assert sum(results) == 8 * pairs_of(pattern, tokens)
    if name == "auto" and "balanced" in LAYOUTS:
        assert max(results) * 4 < 1.06 * sum(results)
    if name == "auto" and not isinstance(pattern, SlidingWindow):
        assert layout.name == make_layout(name, tokens=(1 << 20) + 24, ring_size=4, pattern=pattern).name
