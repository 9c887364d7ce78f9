"""The CPU kernel: its calls, their sizes, its options, and what it keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from ds_ring import Causal, Dilated, SlidingWindow, build_plan, make_layout
from ds_ring.comm.streams import is_fake
from ds_ring.errors import RingConfigError
from ds_ring.kernels.cpu import workspace
from ds_ring.kernels.cpu.calls import Sizes, calls, triangulate
from ds_ring.kernels.cpu.kernel import CpuKernel
from ds_ring.kernels.select import get_kernel
from ds_ring.masks.joins import select_distances
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.tiles import UNBOUNDED, Tiles
from tests.unit.kernels.test_kernels import (
    KINDS,
    PATTERNS,
    SIDES,
    check_forward_and_gradients,
    check_heads_of_their_own,
    tiles_of,
)  # fmt: skip
from tests.unit.masks.painting import paint
from tests.unit.masks.test_branches import Run, a_band, in_band

SMALL = CpuKernel(block=48, triangle=32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("queries", "keys"), SIDES)
def test_small_blocks(kind: str, queries: int, keys: int) -> None:
    check_forward_and_gradients(SMALL, kind, queries, keys)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_small_blocks_of_heads_of_their_own(pattern: Pattern, strided: bool) -> None:
    check_heads_of_their_own(SMALL, pattern, strided)


@pytest.mark.parametrize(
    "side",
    [
        *(1, 127, 128, 129, 255, 256, 257, 383, 500, 640, 1000, 2300),  # 2048 is a block
        *(pytest.param(side, marks=pytest.mark.night) for side in (4096, 4500)),
    ],
)
@pytest.mark.parametrize("below", [True, False])
def test_small_triangles_compute_little_more_than_the_pairs(side: int, below: bool) -> None:
    bounds = (0, UNBOUNDED) if below else (-UNBOUNDED, 0)
    tiles = select_distances(Tiles.rectangles(*[np.array([[0, 1, side]])] * 2), *bounds)
    assert CpuKernel().count_executed_pairs(tiles) <= side * (side + 256) // 2 + 256
    triangle = np.tril_indices(side) if below else np.triu_indices(side)
    for sizes in (Sizes(), Sizes(backward=True)):
        covered, _ = painted_calls(tiles, side, sizes)
        assert covered[triangle].min() == 1 and covered.sum() == len(triangle[0])


def painted_calls(tiles: Tiles, side: int, sizes: Sizes) -> tuple[np.ndarray, int]:
    """In how many calls each pair is attended, and how many pairs are computed, hidden ones included."""
    covered, computed = np.zeros((side, side), dtype=np.int8), 0
    slots = torch.arange(side)[None, None]
    for call in calls(tiles, sizes):
        q_slots, k_slots = (
            rows.select(slots).reshape(rows.repeats, rows.length).numpy() for rows in call[:2]
        )
        assert call.q_rows.repeats == call.k_rows.repeats
        gap = np.arange(q_slots.shape[1])[:, None] - np.arange(k_slots.shape[1])
        shown = (gap >= call.low) & (gap <= call.high)
        for q, k in zip(q_slots, k_slots, strict=True):
            covered[np.ix_(q, k)] += shown
            computed += shown.size
        # results are added up through views, which must not see an element twice
        assert len(np.unique(q_slots)) == q_slots.size
        assert len(np.unique(k_slots)) == k_slots.size or not sizes.backward
    return covered, computed


@given(
    side=st.integers(1, 300),
    steps=st.sampled_from([1, 2, 3]),
    bounds=st.tuples(st.integers(-90, 90), st.integers(-90, 90)),
    block=st.integers(16, 100),
    triangle=st.integers(1, 16),
    backward=st.booleans(),
)
def test_calls_cover_the_tiles_once_whatever_the_sizes(
    side: int, steps: int, bounds: tuple[int, int], block: int, triangle: int, backward: bool
) -> None:
    runs = np.array([[first, steps, len(range(first, side, steps))] for first in range(min(steps, side))])
    tiles = select_distances(Tiles.rectangles(runs, runs), min(bounds), max(bounds))
    covered, computed = painted_calls(tiles, side, Sizes(block, triangle, backward))
    np.testing.assert_array_equal(covered, paint(tiles, side, side))
    # a strip of keys is up to two triangles wide
    assert computed - int(covered.sum()) <= sum(2 * triangle * side for side in tiles.q.length.tolist())


@pytest.mark.parametrize("width", [3, 100, 1500, 3000])
def test_a_bands_calls_are_no_larger_than_their_memory_is_planned_for(width: int) -> None:
    """Of keys that a window is cut into, without its triangles at both ends."""
    side = 4000
    rows = np.array([[0, 1, side]]), np.array([[0, 1, side + width - 1]])
    tiles = select_distances(Tiles.rectangles(*rows), 1 - width, 0)
    assert (tiles.edges == 2).all()
    sizes = Sizes(backward=True)
    made = list(calls(tiles, sizes))
    queries, keys = workspace._call_sides(tiles)
    assert max(call.q_rows.length for call in made) <= queries
    assert max(call.k_rows.length for call in made) <= max(keys, queries)
    assert workspace._count_bias(tiles, backward=True) > 0


def test_low_precision_results_are_partial_sums_in_float32() -> None:
    q, k, v = (torch.randn(1, 2, 64, 16).bfloat16() for _ in range(3))
    tiles = tiles_of("full", 64, 64)
    part = next(iter(CpuKernel().forward(q, k, v, tiles, 1.0)))
    assert part.out_BHSD.dtype == torch.float32 and part.lse_BHS.dtype == torch.float32


@pytest.mark.parametrize(
    ("device", "options", "message"),
    [
        ("cpu", (("blok", 3),), "blok"),
        ("cpu", (("block", 64), ("triangle", 128)), "triangle: expected at most block 64, got 128"),
        ("cpu", (("triangle", 0),), "triangle: expected 1 token or more, got 0"),
        ("cpu", (("block", 64.0),), "block: expected 1 token or more, got 64.0"),
        ("cuda", (), "expected tensors on cpu, got cuda"),
    ],
)
def test_what_is_refused(device: str, options: tuple[tuple[str, int], ...], message: str) -> None:
    with pytest.raises(RingConfigError, match=message):
        get_kernel("cpu", device, options)


def test_small_triangles_of_many_segments_are_few_calls() -> None:
    """LongNet with rates far beyond its smallest segment: calls grow with blocks, not with segments."""
    pattern = Dilated(tuple(256 * 4**i for i in range(6)), tuple(4**i for i in range(6))).bind((0,), 1, 1)
    tiles = pattern.tiles(np.array([[1 << 16, 1, 1 << 14]]), np.array([[1 << 16, 1, 1 << 14]]))
    result = calls(tiles, Sizes())
    assert len(tiles) > 150 and len(result) < 40
    assert sum(call.q_rows.repeats * call.q_rows.length * call.k_rows.length for call in result) < (
        1.45 * tiles.pairs.sum()
    )


def test_a_fake_pass_leaves_nothing_that_a_real_one_meets() -> None:
    """Biases are kept from call to call: of each fake mode, and of real tensors, by themselves."""
    run, kernel = np.array([[0, 1, 512]]), CpuKernel()
    for pattern in (SlidingWindow(100), Dilated((64, 512), (1, 4))):
        tiles = pattern.bind((0,), 1, 1).tiles(run, run)
        for _ in range(2):
            with FakeTensorMode():
                q, k, v = (torch.empty(1, 1, 512, 16) for _ in range(3))
                assert all(is_fake(part.out_BHSD) for part in kernel.forward(q, k, v, tiles, 1.0))
            q, k, v = (torch.randn(1, 1, 512, 16) for _ in range(3))
            assert not any(is_fake(part.out_BHSD) for part in kernel.forward(q, k, v, tiles, 1.0))


def test_a_causal_zigzag_ring_computes_evenly() -> None:
    """The plan is even (`tests/unit/schedule/test_plan.py`), and so is what the kernel multiplies."""
    plan, kernel = build_plan(Causal(), make_layout("zigzag", tokens=8 * 2048, ring_size=8)), CpuKernel()
    hops = [plan.rank(rank).classes[0].hops for rank in range(8)]
    executed = [sum(kernel.count_executed_pairs(hop.tiles) for hop in of_rank) for of_rank in hops]
    assert max(executed) <= 1.01 * np.mean(executed)


# --- triangles -------------------------------------------------------------------------------------------


@a_band
def test_triangles_cover_every_pair_once(q: Run, k: Run, step: int, least: int, most: int) -> None:
    band, pairs = in_band(q, k, step, least, most)
    cut = triangulate(band)
    np.testing.assert_array_equal(paint(cut, q[1], k[1]), pairs)
    (low, high), rows, columns = cut.band, cut.q.length, cut.k.length
    assert (rows == columns)[cut.edges == 1].all() and ((low == 0) | (high == 0))[cut.edges == 1].all()
    assert ((high == 0) & (low == rows - columns))[cut.edges == 2].all()
