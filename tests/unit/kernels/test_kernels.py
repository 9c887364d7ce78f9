"""Every kernel against dense float64 mathematics, tile kind by tile kind."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ds_ring import Dilated, Documents, SlidingWindow
from ds_ring.errors import RingConfigError
from ds_ring.kernels.cpu.kernel import CpuKernel, Sizes, calls
from ds_ring.kernels.select import Kernel, get_kernel
from ds_ring.masks.catalog import Causal
from ds_ring.masks.cuts import within_distances
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.tiles import UNBOUNDED, Tiles
from ds_ring.registry import KERNELS as KERNEL_ROWS
from ds_ring.registry import load
from ds_ring.ring.merge import merge_
from ds_ring.ring.trace import is_fake
from ds_ring.schedule.layout import expand_runs
from ds_ring.schedule.lowering import query_heads_of
from ds_ring.schedule.plan import head_classes
from tests.cases import document_ids
from tests.reference import dense_attention, relative_error
from tests.unit.masks.painting import paint

KERNELS = [get_kernel("reference", "cpu"), CpuKernel(), CpuKernel(block=48, triangle=32)]


def tiles_of(kind: str, queries: int, keys: int) -> Tiles:
    whole = Tiles.rectangles(np.array([[0, 1, queries]]), np.array([[0, 1, keys]]))
    bounds = {
        "full": (-UNBOUNDED, UNBOUNDED),
        "causal": (0, UNBOUNDED),
        "strict": (1, UNBOUNDED),
        "inverse-causal": (-UNBOUNDED, 20),
        "band": (-10, 70),
    }
    return within_distances(whole, *bounds[kind])


def mask_of(kind: str, queries: int, keys: int) -> torch.Tensor:
    gap = torch.arange(queries)[:, None] - torch.arange(keys)[None, :]
    rules = {
        "full": gap == gap,
        "causal": gap >= 0,
        "strict": gap >= 1,
        "inverse-causal": gap <= 20,
        "band": (gap >= -10) & (gap <= 70),
    }
    return rules[kind]


def run_kernel(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, tiles: Tiles
) -> tuple[Tensor, ...]:
    """Out, lse, dq, dk, dv: the parts added up as the ring pass does."""
    out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], -torch.inf)
    for part in kernel.forward(q, k, v, tiles, 0.25):
        rows = part.q_rows
        merge_(rows.of(out[:, part.heads]), rows.of(lse[:, part.heads]), part.out_BHSD, part.lse_BHS)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for grads in kernel.backward(grad_out, q, k, v, out, lse, tiles, 0.25):
        grads.q_rows.of(dq[:, grads.heads]).add_(grads.dq_BHSD)
        grads.k_rows.of(dk).add_(grads.dk_BGSD)
        grads.k_rows.of(dv).add_(grads.dv_BGSD)
    return out, lse, dq, dk, dv


@pytest.mark.parametrize("kernel", KERNELS, ids=["reference", "cpu", "cpu-small-blocks"])
@pytest.mark.parametrize("kind", ["full", "causal", "strict", "inverse-causal", "band"])
@pytest.mark.parametrize(("queries", "keys"), [(300, 300), (130, 259), (259, 130), (1, 1)])
def test_forward_and_gradients(kernel: CpuKernel, kind: str, queries: int, keys: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, n, 16, dtype=torch.float64) for h, n in ((4, queries), (2, keys), (2, keys)))
    grad = torch.randn_like(q)
    for x in (q, k, v):
        x.requires_grad_()
    mask = mask_of(kind, queries, keys)
    sees = mask.any(-1)
    scores = (q @ k.repeat_interleave(2, 1).mT * 0.25).masked_fill(~mask, -torch.inf)
    weights = torch.softmax(scores.masked_fill(~sees[:, None], 0), -1) * sees[:, None]
    want = weights @ v.repeat_interleave(2, 1)
    want.backward(grad)

    tiles = tiles_of(kind, queries, keys)
    q32, k32, v32, grad32 = (x.detach().float() for x in (q, k, v, grad))
    out, lse, dq, dk, dv = run_kernel(kernel, q32, k32, v32, grad32, tiles)
    if mask.any():
        assert relative_error(out, want) < 3e-6
        want_lse = torch.logsumexp(scores, -1)
        assert relative_error(lse[:, :, sees], want_lse[:, :, sees]) < 3e-6
        for got, x in ((dq, q), (dk, k), (dv, v)):
            assert x.grad is not None
            assert relative_error(got, x.grad) < 5e-6 or float(x.grad.abs().max()) < 1e-12
    assert out[:, :, ~sees].eq(0).all() and lse[:, :, ~sees].eq(-torch.inf).all()


@pytest.mark.parametrize("kernel", KERNELS, ids=["reference", "cpu", "cpu-small-blocks"])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(
    "pattern",
    [
        Dilated((32, 64, 256), (1, 2, 4)),
        Dilated((30, 60), (3, 5), False, "torchscale"),
        Dilated((16, 48), (2, 3), True, "zero") & SlidingWindow(40),
        Documents(np.repeat(np.arange(10), 26)) & Causal(),
        Documents(document_ids(260, mean=20)),
    ],
    ids=str,
)
@pytest.mark.covering(1)
def test_heads_of_their_own_and_multiplicities(kernel: Kernel, pattern: Pattern, strided: bool) -> None:
    """Tables by head, log m, and equal tiles that repeat, against a dense softmax with log m added."""
    tokens, (heads, kv_heads) = 260, (4, 2)
    torch.manual_seed(0)
    sizes = [(2, heads), (2, kv_heads), (2, kv_heads), (2, heads)]
    q, k, v, grad = (torch.randn(*size, tokens, 16, dtype=torch.float64) for size in sizes)
    want = dense_attention(q, k, v, grad, pattern)
    found = [torch.zeros_like(x) for x in (want.out, want.lse, want.dq, want.dk, want.dv)]
    runs = np.array([[0, 1, tokens]])
    if strided:
        runs = np.array([[0, 2, tokens // 2], [1, 2, tokens // 2]])
    order = torch.from_numpy(expand_runs(runs))
    for own, bound in head_classes(pattern, heads, kv_heads):
        tiles = bound.tiles(runs, runs)
        queries = query_heads_of(own, heads // kv_heads)
        which = (queries, own, own, queries)
        parts = [x[:, h][:, :, order].float() for x, h in zip((q, k, v, grad), which, strict=True)]
        results = run_kernel(kernel, *parts, tiles)
        for whole, part, h in zip(found, results, (queries, queries, queries, own, own), strict=True):
            whole[:, h] = whole[:, h].index_copy(2, order, part.double())
    assert relative_error(found[0], want.out) < 3e-6
    sees = want.lse.isfinite()
    assert torch.equal(found[1].isfinite(), sees) and found[0][~sees].eq(0).all()
    assert relative_error(found[1][sees], want.lse[sees]) < 3e-6
    for got, expected in zip(found[2:], want[2:], strict=True):
        assert relative_error(got, expected) < 5e-6


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
    tiles = within_distances(Tiles.rectangles(*[np.array([[0, 1, side]])] * 2), *bounds)
    assert CpuKernel().executed_pairs(tiles) <= side * (side + 256) // 2 + 256
    triangle = np.tril_indices(side) if below else np.triu_indices(side)
    for sizes in (Sizes(), Sizes(backward=True)):
        covered, _ = painted_calls(tiles, side, sizes)
        assert covered[triangle].min() == 1 and covered.sum() == len(triangle[0])


def painted_calls(tiles: Tiles, side: int, sizes: Sizes) -> tuple[np.ndarray, int]:
    """In how many calls each pair is attended, and how many pairs are computed, hidden ones included."""
    covered, computed = np.zeros((side, side), dtype=np.int8), 0
    slots = torch.arange(side)[None, None]
    for call in calls(tiles, sizes):
        q_slots, k_slots = (rows.of(slots).reshape(rows.repeats, rows.length).numpy() for rows in call[:2])
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
    tiles = within_distances(Tiles.rectangles(runs, runs), min(bounds), max(bounds))
    covered, computed = painted_calls(tiles, side, Sizes(block, triangle, backward))
    np.testing.assert_array_equal(covered, paint(tiles, side, side))
    # a strip of keys is up to two triangles wide
    assert computed - int(covered.sum()) <= sum(2 * triangle * side for side in tiles.q.length.tolist())


def test_low_precision_results_are_partial_sums_in_float32() -> None:
    q, k, v = (torch.randn(1, 2, 64, 16).bfloat16() for _ in range(3))
    tiles = tiles_of("full", 64, 64)
    part = next(iter(CpuKernel().forward(q, k, v, tiles, 1.0)))
    assert part.out_BHSD.dtype == torch.float32 and part.lse_BHS.dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "device", "options", "said"),
    [
        ("flesh", "cpu", (), "expected one of auto, cpu, flash, flex, reference"),
        ("cpu", "cuda", (), "got cuda tensors"),
        ("cpu", "cpu", (("blok", 3),), "blok"),
        (
            "cpu",
            "cpu",
            (("block", 64), ("triangle", 128)),
            "triangle: expected at most block 64, got 128",
        ),
        ("cpu", "cpu", (("triangle", 0),), "triangle: expected .* at least 1, got 0"),
        ("cpu", "cpu", (("block", 64.0),), "block: expected .* at least 1, got 64.0"),
    ],
)
def test_kernels_that_cannot_be(
    name: str, device: str, options: tuple[tuple[str, int], ...], said: str
) -> None:
    with pytest.raises(RingConfigError, match=said):
        get_kernel(name, device, options)


def test_small_triangles_of_many_segments_are_few_calls() -> None:
    """LongNet with rates far beyond its smallest segment: calls grow with blocks, not with segments."""
    pattern = Dilated(tuple(256 * 4**i for i in range(6)), tuple(4**i for i in range(6))).bind((0,), 1, 1)
    tiles = pattern.tiles(np.array([[1 << 16, 1, 1 << 14]]), np.array([[1 << 16, 1, 1 << 14]]))
    found = calls(tiles, Sizes())
    assert len(tiles) > 150 and len(found) < 40
    assert sum(call.q_rows.repeats * call.q_rows.length * call.k_rows.length for call in found) < (
        1.45 * tiles.pairs.sum()
    )


def test_a_fake_pass_leaves_nothing_that_a_real_one_meets() -> None:
    """Biases are kept from call to call: of each fake mode, and of real tensors, by themselves."""
    run = np.array([[0, 1, 512]])
    for pattern in (SlidingWindow(100), Dilated((64, 512), (1, 4))):
        tiles = pattern.bind((0,), 1, 1).tiles(run, run)
        for _ in range(2):
            with FakeTensorMode():
                q, k, v = (torch.empty(1, 1, 512, 16) for _ in range(3))
                assert all(is_fake(part.out_BHSD) for part in CpuKernel().forward(q, k, v, tiles, 1.0))
            q, k, v = (torch.randn(1, 1, 512, 16) for _ in range(3))
            assert not any(is_fake(part.out_BHSD) for part in CpuKernel().forward(q, k, v, tiles, 1.0))


@pytest.mark.parametrize("name", KERNEL_ROWS)
def test_a_row_of_the_registry_is_a_kernel_of_its_name(name: str) -> None:
    row = KERNEL_ROWS[name]
    assert load(row.home).name == name
    # what `ds-ring plan` must know; "reference" is for comparisons and is never planned
    assert (name == "reference") == (row.workspace is None) and (row.workspace is None or load(row.workspace))
