"""Private keys stay: masks of the papers, out and gradients on rings, and no byte of a private key sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ds_ring import (
    BlockDiffusion,
    Causal,
    Documents,
    Drafter,
    RingLayoutError,
    RingPatternError,
    SlidingWindow,
    build_plan,
    make_layout,
    simulate,
)
from ds_ring.masks.pattern import Pattern
from ds_ring.patterns.private.private_layout import PrivateLayout, beside, private_table
from ds_ring.patterns.private.ranges import seen_ranges
from ds_ring.schedule.choose import rated
from ds_ring.schedule.layout import Layout
from ds_ring.simulation.simulate import SimulationOptions
from tests.reference import attend_by_counts
from tests.refusals import refuse
from tests.unit.patterns.private import masks

PACKED = np.repeat([4, 0, -1, 7], [17, 5, 3, 14])  # 39 tokens
ANCHORS = (20, 3, 38, -1, 3, 23, 11)  # in any order; one is none, 23 is in padding
Case = tuple[Pattern, np.ndarray]

CASES: dict[str, Case] = {
    "diffusion": (BlockDiffusion(8, 45), masks.block_diffusion(8, 45)),
    "diffusion packed": (
        BlockDiffusion(4, 39, Documents(PACKED), padding=2),
        masks.block_diffusion(4, 39, PACKED, padding=2),
    ),
    "diffusion causal, window": (
        BlockDiffusion(6, 40, window=11, causal=True),
        masks.block_diffusion(6, 40, window=11, causal=True),
    ),
    "diffusion window, packed": (
        BlockDiffusion(5, 39, Documents(PACKED), window=9, corrupted_first=True),
        masks.block_diffusion(5, 39, PACKED, 9, corrupted_first=True),
    ),
    "eagle": (Drafter(31, 3), masks.eagle(31, 3)),
    "eagle packed": (Drafter(39, 2, documents=Documents(PACKED)), masks.eagle(39, 2, PACKED)),
    "dflash": (Drafter(41, 5, ANCHORS), masks.dflash(41, 5, ANCHORS)),
    "dflash packed": (
        Drafter(39, 4, ANCHORS, Documents(PACKED), causal=True),
        masks.dflash(39, 4, ANCHORS, PACKED, True),
    ),
}  # fmt: skip


def private_slots_sent(pattern: Pattern, layout: Layout) -> tuple[int, int]:
    """The private and the shared tokens that arrive anywhere, by the plan."""
    table = private_table(((pattern, 1),))
    plan, result = build_plan(pattern, layout), [0, 0]
    for rank in range(layout.ring_size):
        for hop in (hop for item in plan.rank(rank).classes for hop in item.hops if hop.hop):
            positions = layout.positions(hop.origin)
            for start, end in hop.held.tolist():
                is_private = table.labels(positions[start:end]) >= 0
                if not table.whole:  # the table has labels of the trunk, too
                    is_private &= positions[start:end] >= table.shared[1]
                result[0] += int(is_private.sum())
                result[1] += int((~is_private).sum())
    return result[0], result[1]


@pytest.mark.parametrize("name", CASES)
def test_the_pattern_is_the_papers_mask(name: str) -> None:
    pattern, seen = CASES[name]
    at = np.arange(len(seen))
    assert np.array_equal(pattern.multiplicity(0, 1, 1, at[:, None], at[None]), seen)


@pytest.mark.parametrize("ring_size", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_out_and_gradients_are_dense_and_no_private_key_is_sent(name: str, ring_size: int) -> None:
    pattern, seen = CASES[name]
    tokens = len(seen)
    generator = torch.Generator().manual_seed(tokens)
    sizes = [(1, heads, tokens, 8) for heads in (4, 2, 2, 4)]
    q, k, v, grad = (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
    layout = make_layout("private", tokens=tokens, ring_size=ring_size, pattern=pattern)
    result = simulate(
        q, k, v, pattern=pattern, layout=layout, grad_out=grad, measure_memory=False,
        options=SimulationOptions(progress=False),
    )  # fmt: skip
    exact = attend_by_counts(q, k, v, grad, torch.from_numpy(seen))
    for part in ("out", "dq", "dk", "dv"):
        assert float((getattr(result, part) - getattr(exact, part)).abs().max()) < 1e-12, part
    private, shared = private_slots_sent(pattern, layout)
    forward = sum(item.forward for item in result.bytes_sent.values())
    # K and V of 2 heads of 8 numbers in float64: all that is sent is shared
    assert private == 0 and forward == shared * 2 * 2 * 8 * 8
    assert (shared > 0) == (ring_size > 1)


@pytest.mark.parametrize("seed", range(200))
@pytest.mark.day("0", "1", "2")
def test_random_patterns(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens, size = int(rng.integers(1, 40)), int(rng.integers(1, 9))
    ids = np.sort(rng.integers(0, 4, tokens))
    ids = np.where(ids == rng.integers(0, 8), -1, ids)
    documents = {"documents": Documents(ids)} if rng.random() < 0.6 else {}
    options = {"ids": ids} if documents else {}
    extra: dict[str, Any] = {"causal": bool(rng.integers(2))}
    kind = seed % 3
    if kind == 0:
        extra |= {"corrupted_first": bool(rng.integers(2)), "padding": int(rng.integers(0, 4))}
        extra |= {"window": int(rng.integers(1, 20))} if rng.random() < 0.4 else {}
        pattern: Pattern = BlockDiffusion(size, tokens, **documents, **extra)
        seen = masks.block_diffusion(size, tokens, **options, **extra)
    elif kind == 1:
        pattern, seen = Drafter(tokens, size, **documents), masks.eagle(tokens, size, **options)
    else:
        anchors = tuple(rng.integers(-1, tokens, int(rng.integers(1, 9))).tolist())
        pattern = Drafter(tokens, size, anchors, **documents, **extra)
        seen = masks.dflash(tokens, size, anchors, **options, **extra)
    at = np.arange(len(seen))
    assert np.array_equal(pattern.multiplicity(0, 1, 1, at[:, None], at[None]), seen)
    for ring_size in (2, 3, 4):
        layout = make_layout("private", tokens=len(seen), ring_size=ring_size, pattern=pattern)
        assert sorted(layout.slots_by_position().tolist()) == sorted(set(layout.slots_by_position().tolist()))
        assert private_slots_sent(pattern, layout)[0] == 0
        plan = build_plan(pattern, layout)
        assert sum(plan.rank(rank).pairs for rank in range(ring_size)) == seen.sum()


def test_queries_that_see_nothing_have_no_branch() -> None:
    queries, nothing = np.array([[0, 4], [4, 8]]), np.array([[0, 0], [3, 3]])
    assert seen_ranges(queries, nothing, 8) == ()


def test_a_step_of_eagle_is_a_pass_of_its_own() -> None:
    drafter, seen = Drafter(23, 3, documents=Documents(PACKED[:23])), masks.eagle(23, 3, PACKED[:23])
    for number in (1, 2, 3):
        tokens = 23 * (number + 1)
        rows = np.arange(tokens) // 23 == number
        at = np.arange(tokens)
        got = drafter.step(number).multiplicity(0, 1, 1, at[:, None], at[None])
        assert np.array_equal(got, seen[:tokens, :tokens] & rows[:, None])
    layouts = [
        make_layout("private", tokens=23 * (n + 1), ring_size=4, pattern=drafter.step(n)) for n in (1, 2)
    ]
    trunk = make_layout("zigzag", tokens=23, ring_size=4)
    for rank in range(4):
        mine = trunk.positions(rank)[: trunk.valid_tokens(rank)]
        for copies, layout in enumerate(layouts, 2):
            whole = np.concatenate([mine + 23 * copy for copy in range(copies)])
            assert layout.positions(rank)[: len(whole)].tolist() == whole.tolist()


def test_a_layout_beside_one_of_the_shared_sequence() -> None:
    pattern = Drafter(41, 5, ANCHORS)
    shared = make_layout("contiguous", tokens=41, ring_size=3)
    layout = beside(shared, ((pattern, 1),))
    assert private_slots_sent(pattern, layout)[0] == 0
    for rank in range(3):
        assert layout.copy(0, 41).runs(rank).tolist() == shared.runs(rank).tolist()
    with pytest.raises(RingLayoutError, match="beside 40 shared ones"):
        beside(make_layout("contiguous", tokens=40, ring_size=3), ((pattern, 1),))
    with pytest.raises(RingLayoutError, match="runs of consecutive tokens"):
        beside(make_layout("striped", tokens=41, ring_size=3), ((pattern, 1),))


@pytest.mark.parametrize("ring_size", [2, 4, 8])
def test_auto_takes_it_where_it_is_even(ring_size: int) -> None:
    for pattern, tokens in ((BlockDiffusion(16, 4096), 8192), (Drafter(2048, 3), 8192)):
        layout = make_layout("auto", tokens=tokens, ring_size=ring_size, pattern=pattern)
        assert isinstance(layout, PrivateLayout) and layout.longest_shard == tokens // ring_size
        assert rated(((pattern, 1),), layout).imbalance < 1.01
        zigzag = make_layout("zigzag", tokens=tokens, ring_size=ring_size)
        assert build_plan(pattern, layout).tokens_sent < build_plan(pattern, zigzag).tokens_sent


def test_a_layer_narrows_block_diffusion_by_its_window() -> None:
    pattern = BlockDiffusion(4, 20, window=9)
    assert pattern.narrowed(Causal()) == pattern
    assert pattern.narrowed(SlidingWindow(5)).window == 5 and pattern.narrowed(SlidingWindow(12)).window == 9
    with pytest.raises(RingPatternError, match="a SlidingWindow with block diffusion"):
        pattern.narrowed(Drafter(3, 1))


test_what_cannot_be_is_refused = refuse(
    {
        "no block": (lambda: BlockDiffusion(0, 8), RingPatternError, "block"),
        "short documents": (
            lambda: BlockDiffusion(2, 8, Documents([0] * 7)), RingPatternError, "Documents of 8 tokens"
        ),
        "a document in two places": (
            lambda: BlockDiffusion(2, 3, Documents([0, 1, 0])), RingPatternError, "each in one place"
        ),
        "causal is a number": (lambda: BlockDiffusion(2, 8, causal=1), RingPatternError, "True or False"),
        "an anchor behind": (lambda: Drafter(8, 2, (8,)), RingPatternError, "trunk positions from -1"),
        "no anchor": (lambda: Drafter(8, 2, ()), RingPatternError, "trunk positions from -1"),
        "a step too many": (lambda: Drafter(8, 2).step(3), RingPatternError, "at most 2"),
        "a step of anchors": (lambda: Drafter(8, 2, (1,)).step(1), RingPatternError, "expected no anchors"),
        "a layout without private tokens": (
            lambda: make_layout("private", tokens=8, ring_size=2, pattern=Causal()),
            RingLayoutError, "BlockDiffusion or Drafter",
        ),
    }
)  # fmt: skip
