"""Virtual ranks in blocks of queries: equal to whole ones, and to the plan's hops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from streamed.blocks import BlockPlanner, primitive_key, shift_key
from streamed.ranks import PendingGradients, StreamedRanks
from streamed.sparse_oracle import SparseOracle

from ds_ring import (
    Causal,
    Chunked,
    Dilated,
    Documents,
    PrefixLM,
    RingError,
    Sinks,
    Slices,
    SlidingWindow,
    build_plan,
    make_layout,
    simulate,
)
from ds_ring.kernels.select import get_kernel
from ds_ring.masks.branches import Primitive
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.slots import expand_ranges
from ds_ring.simulation.generate import GeneratedSource
from ds_ring.simulation.rank import put_rows
from ds_ring.simulation.simulate import exact_rows
from tests.cases import document_ids
from tests.reference import relative_error
from tests.unit.masks.test_branches import PRIMITIVES

TOKENS, HEAD_DIM = 1024, 8
SCALE = HEAD_DIM**-0.5
LONGNET = Dilated((16, 64, 256, 1024, 4096), (1, 4, 16, 64, 256))
PATTERNS: dict[str, Pattern] = {
    "longnet": LONGNET,
    "not nested": Dilated((60, 210), (3, 5)),
    "causal": Causal(),
    "window": SlidingWindow(300),
    "dilated window": Dilated((2048,), (3,), False) & SlidingWindow(300),
    "documents": Documents(document_ids(TOKENS, 200)) & Causal(),
}
NAMES = ("out", "lse", "dq", "dk", "dv")


@pytest.mark.parametrize(("ring_size", "query_block"), [(4, 300), (16, 64), (1, 1000)])
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.day("longnet-4-300", "causal-1-1000", "window-4-300", "dilated window-4-300", "documents-4-300")
def test_blocks_of_queries_are_whole_ranks(name: str, ring_size: int, query_block: int) -> None:
    source = GeneratedSource(TOKENS, head_dim=HEAD_DIM)
    layout = make_layout("contiguous", tokens=TOKENS, ring_size=ring_size)
    ranks = StreamedRanks(source, PATTERNS[name], layout, get_kernel("cpu", "cpu"), SCALE, query_block)
    pending = PendingGradients(HEAD_DIM)
    got = {n: torch.zeros(1, 1, TOKENS, HEAD_DIM) for n in NAMES} | {"lse": torch.zeros(1, 1, TOKENS)}
    for rank in reversed(range(ring_size)):
        for part in ranks.forward_and_backward(rank, pending):
            for n, whole in got.items():
                if (x := getattr(part, n)) is not None:
                    put_rows(whole, part.runs, x, add=True)
    assert not len(pending.table()[0])
    want = simulate(source, pattern=PATTERNS[name], layout=layout, grad_out=True, measure_memory=False)
    exact = exact_rows(source, PATTERNS[name], np.arange(TOKENS), SCALE, backward=True)
    seen = exact.lse.isfinite()
    for n in NAMES:
        ours, theirs, oracle = got[n], getattr(want, n), getattr(exact, n)
        if n == "lse":
            assert torch.equal(ours.isneginf(), ~seen)
            ours, theirs, oracle = ours[seen], theirs[seen], oracle[seen]
        assert relative_error(ours, theirs) < 2e-6, n
        assert relative_error(ours, oracle) < 2e-6, n


@pytest.mark.parametrize("name", ["longnet", "window"])
def test_what_is_read_of_other_shards_is_what_the_plan_says(name: str) -> None:
    layout = make_layout("contiguous", tokens=TOKENS, ring_size=16)
    plan = build_plan(PATTERNS[name], layout)
    planner = BlockPlanner(PATTERNS[name].bind((0,), 1, 1), layout)
    for rank in range(16):
        (head_class,) = plan.rank(rank).classes
        planned = {
            hop_plan.origin: hop_plan for hop_plan in head_class.hops if hop_plan.hop and len(hop_plan.held)
        }
        remote = planner.remote(rank)
        found = {v.origin: v for v in remote.plan.classes[0].hops if v.hop}
        assert set(found) == set(planned)
        rows = expand_ranges(remote.queries)
        for origin, hop_plan in found.items():
            assert np.array_equal(hop_plan.held, planned[origin].held)
            assert hop_plan.tiles.pairs.sum() == planned[origin].tiles.pairs.sum()
            first = rows[hop_plan.tiles.q.slot]  # packed, and back
            assert np.array_equal(np.sort(first), np.sort(planned[origin].tiles.q.slot))


def test_stretches_that_are_alike_have_the_same_tiles() -> None:
    bound = Dilated((16, 64, 250, 1024), (1, 4, 10, 64)).bind((0,), 1, 1)
    seen: dict[object, np.ndarray] = {}
    repeated = 0
    for start in range(0, 5000, 8):
        at = np.arange(start, start + 128)
        mask = bound.labels(at, at)[0]
        counts = sum(((row[:, None] == row[None]) & (row[:, None] >= 0)).astype(int) for row in mask[0])
        key = shift_key(bound, start, 128)
        repeated += key in seen
        assert np.array_equal(seen.setdefault(key, counts), counts), start
    assert repeated > 100
    assert shift_key(PATTERNS["documents"].bind((0,), 1, 1), 0, 10) is None


def test_rows_by_the_definition_are_dense_rows() -> None:
    source = GeneratedSource(TOKENS, head_dim=HEAD_DIM, seed=3)
    pattern = Dilated((60, 210, 4000), (3, 5, 64))
    dense = exact_rows(source, pattern, np.arange(TOKENS), SCALE, backward=True)
    oracle = SparseOracle(source, pattern, SCALE)
    assert dense.dq is not None and dense.dk is not None and dense.dv is not None
    for position in (0, 1, 15, 64, 640, 960, TOKENS - 1):
        row, (dk, dv) = oracle.row(position), oracle.key_gradients(position)
        assert row.lse == pytest.approx(float(dense.lse[0, 0, position]), abs=1e-12)
        for got, want in (
            (row.out, dense.out),
            (oracle.query_gradient(position), dense.dq),
            (dk, dense.dk),
            (dv, dense.dv),
        ):
            assert torch.allclose(got, want[0, 0, position], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("case", ["heads", "dtype", "layout"])
def test_what_cannot_be_streamed(case: str) -> None:
    source = GeneratedSource(
        TOKENS, 2 if case == "heads" else 1, dtype=torch.bfloat16 if case == "dtype" else torch.float32
    )
    layout = make_layout("zigzag" if case == "layout" else "contiguous", tokens=TOKENS, ring_size=4)
    with pytest.raises(RingError, match="expected"):
        StreamedRanks(source, Causal(), layout, get_kernel("cpu", "cpu"), SCALE)


@pytest.mark.parametrize("primitive", [one for one in PRIMITIVES if one.only_length is None], ids=str)
def test_stretches_of_one_phase_have_the_same_labels_in_common(primitive: Primitive) -> None:
    known: dict[object, np.ndarray] = {}
    for start in range(200):
        labels = primitive.labels(np.arange(start, start + 9))
        common = (labels[:, None] == labels[None]) & (labels[:, None] >= 0)
        assert np.array_equal(known.setdefault(primitive_key(primitive, start, 9), common), common), start
    assert len(known) < 200


@pytest.mark.parametrize(
    "pattern",
    [
        Sinks(5) | SlidingWindow(4),
        PrefixLM(17),
        Chunked(20) & SlidingWindow(6),
        Slices((((10, 60), (5, 80), "causal"), ((60, 90), (3, 7), "full"))),
        Dilated((8, 16, 64), (1, 2, 4)),
    ],
    ids=str,
)
def test_stretches_of_one_phase_are_attended_alike(pattern: Pattern) -> None:
    bound = pattern.bind((0,), 1, 1)
    known: dict[object, np.ndarray] = {}
    for start in range(100):
        at = np.arange(start, start + 9)
        counts = bound.multiplicity(0, 1, 1, at[:, None], at[None])
        assert np.array_equal(known.setdefault(shift_key(bound, start, 9), counts), counts), start
    assert len(known) < 100
