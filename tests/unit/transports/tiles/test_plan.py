"""The plan of tiles: bytes, balance, the choice of a grid, up to 1,024 ranks; no tensors."""

from __future__ import annotations

import numpy as np
import pytest

from ds_ring import Causal, Documents, Full, SlidingWindow, make_layout
from ds_ring.masks.pattern import Pattern
from ds_ring.transports.tiles.grid import PassGrid
from ds_ring.transports.tiles.plan import TokenBytes, choose_grid, list_grids, tile_plan
from tests.cases import document_ids

HEADS, KV_HEADS, DIM, SHARD = 32, 8, 128, 8192
FORWARD, BACKWARD = (TokenBytes.for_pass(backward, DIM, DIM, 2, 4) for backward in (False, True))
KV = SHARD * KV_HEADS * FORWARD.key  # bytes of a shard's K and V


def test_bytes_of_a_token() -> None:
    """bfloat16, D 128: K and V 512, q 256, out with its lse 260; gradients in float32."""
    assert FORWARD == (512, 0, 256, 260)
    assert BACKWARD == (512, 1024, 3 * 256 + 4, 512)
    assert TokenBytes.for_pass(True, 128, 64, 2, 4, lses=2) == (384, 768, 2 * 256 + 8, 512)


@pytest.mark.parametrize(
    ("ranks", "forward", "backward"),
    [(8, (8, 1), (4, 2)), (64, (16, 4), (16, 4)), (256, (32, 8), (32, 8))],
)
def test_the_grid_of_the_fewest_bytes(
    ranks: int, forward: tuple[int, int], backward: tuple[int, int]
) -> None:
    """(a - 1) KV + (b - 1)(Q + out), with 32 query heads and 8 K/V heads."""
    layout = make_layout("zigzag", tokens=ranks * 256, ring_size=ranks)
    for size, (a, b) in ((FORWARD, forward), (BACKWARD, backward)):
        grid = choose_grid(Full(), layout, HEADS, KV_HEADS, size)
        assert grid == PassGrid(a, b)
        traffic = tile_plan(Full(), layout, HEADS, KV_HEADS, grid).traffic(0, size)
        of_keys = (a - 1) * KV_HEADS * (size.key + size.key_back)
        of_queries = (b - 1) * HEADS * (size.query + size.query_back)
        assert traffic.received == traffic.sent == 256 * (of_keys + of_queries)


def test_a_thousand_ranks_in_seconds() -> None:
    """Causal zigzag on 1,024 ranks of 8 Ki: equal pairs; 217 shards of K, in a ring 2,046."""
    layout = make_layout("zigzag", tokens=1024 * SHARD, ring_size=1024)
    plan = tile_plan(Causal(), layout, HEADS, KV_HEADS, PassGrid(64, 16))
    every = [plan.traffic(rank, FORWARD) for rank in range(1024)]
    pairs = [one.pairs for one in every]
    assert max(pairs) == min(pairs)
    tokens = 1024 * SHARD
    assert sum(pairs) == HEADS * tokens * (tokens + 1) // 2
    received, sent = ([getattr(one, name) for one in every] for name in ("received", "sent"))
    # less than (a - 1) KV + (b - 1)(Q + out): not all keys are read by queries of a column
    assert max(received) < 63 * KV + 15 * SHARD * HEADS * (FORWARD.query + FORWARD.query_back)
    assert max(received) == max(sent) == pytest.approx(216.9 * KV / 2, rel=1e-3)
    assert sum(received) == sum(sent)
    backward = [plan.traffic(rank, BACKWARD).received for rank in range(0, 1024, 31)]
    assert max(backward) == pytest.approx(616.9 * KV / 2, rel=1e-3)


@pytest.mark.parametrize(
    ("ranks", "ring", "tiles"),
    [(8, (14, 35), (14, 32)), (64, (126, 315), (48.2, 136.2)), (256, (510, 1275), (104.4, 296.4))],
)
@pytest.mark.day("8-ring0-tiles0", "64-ring1-tiles1")
def test_the_table_of_bytes(ranks: int, ring: tuple[float, float], tiles: tuple[float, float]) -> None:
    """README.md's: what the busiest rank receives, in shards of K."""
    layout = make_layout("zigzag", tokens=ranks * SHARD, ring_size=ranks)
    for size, of_ring, of_tiles in zip((FORWARD, BACKWARD), ring, tiles, strict=True):
        chosen = choose_grid(Causal(), layout, HEADS, KV_HEADS, size)
        for grid, want in ((PassGrid(ranks, 1), of_ring), (chosen, of_tiles)):
            plan = tile_plan(Causal(), layout, HEADS, KV_HEADS, grid)
            looked_at = (0, 1, ranks // 2, ranks - 1) if grid.query_ranks == 1 else range(ranks)
            found = max(plan.traffic(rank, size).received for rank in looked_at)
            assert found == pytest.approx(want * KV / 2, rel=2e-3)


@pytest.mark.parametrize(
    ("pattern", "layout", "most"),
    [(Causal(), "zigzag", 1.0), (Full(), "contiguous", 1.0), (SlidingWindow(100), "contiguous", 1.1)],
)
def test_every_grid_is_balanced(pattern: Pattern, layout: str, most: float) -> None:
    made = make_layout(layout, tokens=16 * 64, ring_size=16)
    for grid in list_grids(16):
        plan = tile_plan(pattern, made, 4, 2, grid)
        pairs = [plan.traffic(rank, FORWARD).pairs for rank in range(16)]
        assert max(pairs) <= most * np.mean(pairs)


def test_what_no_pair_reads_is_not_sent() -> None:
    """A window of a shard: its keys, and queries at the borders of columns; own documents: nothing."""
    layout = make_layout("contiguous", tokens=16 * 64, ring_size=16)
    window = tile_plan(SlidingWindow(65), layout, 4, 2, PassGrid(4, 4))
    for rank in range(16):
        reads = window.reads(0, rank)
        counts = [
            sum(int((x[:, 1] - x[:, 0]).sum()) for x in side[1:]) for side in (reads.queries, reads.keys)
        ]
        assert max(counts) <= 64, (rank, counts)
    apart = Documents(np.arange(16 * 64) // 64)
    for grid in list_grids(16):
        plan = tile_plan(apart, layout, 4, 2, grid)
        assert all(plan.traffic(rank, BACKWARD).sent == 0 for rank in range(16))


def test_a_narrow_window_takes_the_ring() -> None:
    layout = make_layout("contiguous", tokens=64 * 64, ring_size=64)
    assert choose_grid(SlidingWindow(16), layout, HEADS, KV_HEADS, FORWARD).query_ranks == 1


def test_fewer_bytes_are_no_reason_for_uneven_work() -> None:
    """Documents on `balanced`: the ring has even work, 4 x 4 has 1.5 times the mean and more on one rank."""
    tokens = 16 * 256
    pattern = Documents(document_ids(tokens, 400)) & Causal()
    layout = make_layout("balanced", tokens=tokens, ring_size=16, pattern=pattern)
    most = {}
    for grid in list_grids(16):
        plan = tile_plan(pattern, layout, HEADS, KV_HEADS, grid)
        pairs = [plan.pairs(rank) for rank in range(16)]
        most[grid] = max(pairs) / np.mean(pairs)
    assert most[PassGrid(16, 1)] < 1.05 and most[PassGrid(4, 4)] > 1.5
    grid = choose_grid(pattern, layout, HEADS, KV_HEADS, FORWARD)
    assert most[grid] <= 1.05 * most[PassGrid(16, 1)]


def test_nodes_come_first() -> None:
    """Between nodes of 8 the fewest bytes cross where queries stay inside a node."""
    layout = make_layout("zigzag", tokens=64 * 64, ring_size=64)
    grid = choose_grid(Causal(), layout, HEADS, KV_HEADS, FORWARD, 8)
    far = {
        one: tile_plan(Causal(), layout, HEADS, KV_HEADS, one).read_bytes(0, FORWARD, 8)
        for one in list_grids(64)
    }
    assert far[grid][0] == min(each for each, _ in far.values())
    assert not grid.keys_are_near and grid.query_ranks == 8


@pytest.mark.parametrize("grid", list_grids(6), ids=str)
def test_both_sides_of_a_message_agree(grid: PassGrid) -> None:
    """What all ranks send is what all receive, and what is read is what goes and returns."""
    tokens = 6 * 50
    pattern = Documents(document_ids(tokens)) & Causal()
    layout = make_layout("balanced", tokens=tokens, ring_size=6, pattern=pattern)
    plan = tile_plan(pattern, layout, 4, 2, grid)
    every = [plan.traffic(rank, BACKWARD, 3) for rank in range(6)]
    read = [plan.read_bytes(rank, BACKWARD, 3) for rank in range(6)]
    assert (
        sum(one.received for one in every) == sum(one.sent for one in every) == sum(all_ for _, all_ in read)
    )
    assert sum(one.far for one in every) == sum(far for far, _ in read)
