"""Kernel "flash": its list of calls, for every mask and layout, by the operators' contracts in float64.

A GPU is not needed: `tests/flash_operators.py` computes what the CUDA operators are documented to, and fake
CUDA tensors show that the real ones take the shapes. A run takes one layout for each mask;
DS_RING_WHOLE_REGISTRY=1 takes every mask x layout x 1 to 8 ranks x head dimension: 10,416 cases, an hour.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch
from torch import Tensor

from ds_ring import Causal, Chunked, Dilated, DilatedWindow, Documents, Full, SlidingWindow, make_layout
from ds_ring.errors import RingConfigError, RingShapeError
from ds_ring.kernels.flash.calls import (
    OPEN,
    FlashCall,
    FlashWindow,
    get_branch_form,
    join_windows,
    make_flash_calls,
)
from ds_ring.kernels.flash.executors import Cudnn, Executor, Flash
from ds_ring.kernels.flash.kernel import FlashKernel
from ds_ring.kernels.interface import Kernel, Rows, each_tile
from ds_ring.kernels.reference import ReferenceKernel
from ds_ring.kernels.select import KernelNeeds, get_kernel
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.tiles import Tiles
from ds_ring.schedule.plan import build_plan
from tests.cases import LAYOUTS, Shape, document_ids, layout_for, longnet, tensors
from tests.fake_cuda import fake_tensors
from tests.flash_operators import emulated
from tests.hops import ring_hops
from tests.mask_table import HEADS, KV_HEADS, MASKS, TOKENS
from tests.reference import Dense, dense_attention
from tests.refusals import refuse

WHOLE = "DS_RING_WHOLE_REGISTRY" in os.environ
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
RANKS = range(1, 9)
WINDOWS = [name for name, mask in MASKS.items() if not mask.pattern.masks]


def kernel_of(*executors: Executor) -> FlashKernel:
    """The kernel with these in the place of aten's operator for the CPU."""
    kernel = FlashKernel()
    kernel.executors = executors
    return kernel


def cases() -> list[tuple[str, str, int, int]]:
    """Mask, layout, ranks, head_dim."""
    if WHOLE:
        return [  # in the order in which `truth` keeps what it found
            (name, layout_name, ring_size, head_dim)
            for name, head_dim, layout_name, ring_size in itertools.product(
                WINDOWS, HEAD_DIMS, LAYOUTS, RANKS
            )
        ]
    # the cycles have no common length, so that all choices meet others
    turns = zip(itertools.cycle(LAYOUTS), itertools.cycle(RANKS), itertools.cycle(HEAD_DIMS), strict=False)
    return [(name, *next(turns)) for name in WINDOWS]


@lru_cache(maxsize=2 if WHOLE else 64)
def truth(name: str, head_dim: int) -> tuple[list[Tensor], Dense]:
    shape = Shape(1, HEADS, KV_HEADS, TOKENS, head_dim)
    values = [x.double() for x in tensors(shape)]
    return values, dense_attention(*values, MASKS[name].pattern)


def worst_error(got: Dense, want: Dense) -> float:
    """Largest difference in out, lse, dq, dk, dv, over the largest value of each, at least 1."""
    sees = want.lse.isfinite()
    assert torch.equal(got.lse.isfinite(), sees) and got.out[~sees].eq(0).all()
    assert got.lse[~sees].eq(-torch.inf).all()
    errors = [float((got.lse[sees] - want.lse[sees]).abs().max())]
    for a, b in zip((got.out, *got[2:]), (want.out, *want[2:]), strict=True):
        errors.append(float((a - b).abs().max()) / max(float(b.abs().max()), 1.0))
    return max(error if error == error else float("inf") for error in errors)


@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.day("1")
def test_every_mask_and_layout_by_the_contracts_of_the_operators(most: int) -> None:
    """1e-12 by FlashAttention's contract and by cuDNN's, 1e-5 in float32 by aten's operator for the CPU."""
    operators = emulated()
    by_layout: set[str] = set()
    worst = [0.0, 0.0, 0.0]
    chosen = cases()
    for number, (name, layout_name, ring_size, head_dim) in enumerate(chosen):
        pattern, (values, want) = MASKS[name].pattern, truth(name, head_dim)
        layout = layout_for(layout_name, pattern, tokens=TOKENS, ring_size=ring_size)
        by_layout.add(layout_name)
        kernels = [kernel_of(Flash(operators)), kernel_of(Cudnn(operators), Flash(operators)), FlashKernel()]
        for which, kernel in enumerate(kernels):
            if not WHOLE and (which - number) % 3 >= most:  # so many contracts, in turn
                continue
            inputs = [x.float() for x in values] if which == 2 else values
            got = ring_hops(kernel.select_heads(slice(None)), *inputs, pattern, layout)
            error = worst_error(Dense(*(x.double() for x in got)), want)
            limit = 1e-5 if which == 2 else 1e-12
            assert error < limit, (name, layout_name, ring_size, head_dim, which, error)
            worst[which] = max(worst[which], error)
    print(f"{len(chosen)} cases: flash {worst[0]:.1e}, cudnn {worst[1]:.1e}, cpu {worst[2]:.1e}")
    assert by_layout == set(LAYOUTS)


def hops_of(pattern: Pattern, layout_name: str, ring_size: int, tokens: int) -> Iterator[tuple[int, Tiles]]:
    """Keys and tiles of all hops of the last rank but one, for one class of K/V heads."""
    layout = layout_for(layout_name, pattern, tokens=tokens, ring_size=ring_size)
    plan = build_plan(pattern, layout, query_heads=HEADS, kv_heads=KV_HEADS)
    for hop in plan.rank(max(ring_size - 2, 0)).classes[0].hops:
        if len(hop.tiles):
            yield int(hop.held[:, 1].sum() if hop.held.ndim == 2 else 0), hop.tiles


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_the_real_operators_take_the_shapes_and_strides(device: str) -> None:
    """Forward and backward on meta tensors, every mask; on fake CUDA tensors, which are slow, some."""
    choices = itertools.cycle(itertools.product(HEAD_DIMS, (torch.bfloat16, torch.float16), ("FA2", "cuDNN")))
    chosen = WINDOWS if WHOLE or device == "meta" else ["causal", "window", "documents", "dilated", "full"]
    for number, name in enumerate(chosen):
        head_dim, dtype, implementation = next(choices)
        kernel, seen = FlashKernel(implementation), 0
        samples = 1 + number % 2
        for _, tiles in hops_of(MASKS[name].pattern, LAYOUTS[number % len(LAYOUTS)], 3, TOKENS):
            with fake_tensors() if device == "cuda" else nullcontext():
                seen += take(kernel, tiles, samples, head_dim, dtype, device)
        assert seen, name


def take(
    kernel: FlashKernel, tiles: Tiles, samples: int, head_dim: int, dtype: torch.dtype, device: str
) -> int:
    """Run both passes on fake tensors; every result has the shape of what it is added to."""
    (queries, keys), heads = (last_slot(side) + 3 for side in (tiles.q, tiles.k)), (4, 2, 2)
    sizes = zip(heads, (queries, keys, keys), strict=True)
    q, k, v = (torch.empty(samples, h, n, head_dim, dtype=dtype, device=device) for h, n in sizes)
    out, lse, grad = torch.empty_like(q), torch.empty(q.shape[:3], device=device), torch.empty_like(q)
    seen = 0
    for part in kernel.forward(q, k, v, tiles, 0.1):
        assert part.out_BHSD.shape == part.q_rows.select(q[:, part.heads]).shape
        assert part.lse_BHS.shape == part.q_rows.select(lse[:, part.heads]).shape
        assert part.out_BHSD.dtype == dtype and part.lse_BHS.dtype == torch.float32
        seen += 1
    for grads in kernel.backward(grad, q, k, v, out, lse, tiles, 0.1):
        dq, dk, dv = grads.heads_first
        assert dq.shape == grads.q_rows.select(q[:, grads.heads]).shape
        assert dk.shape == grads.k_rows.select(k).shape == dv.shape
        assert dq.device.type == device
    return seen


def last_slot(side: object) -> int:
    return int((side.slot + side.slot_step * (side.length - 1)).max()) + 1  # type: ignore[attr-defined]


def calls_of(
    pattern: Pattern, layout_name: str = "zigzag", tokens: int = 1 << 13
) -> list[tuple[FlashCall, ...]]:
    return [make_flash_calls(tiles) for _, tiles in hops_of(pattern, layout_name, 4, tokens)]


ONE_CALL = [Causal(), Full(), SlidingWindow(100), Chunked(256), Chunked(4096, False), DilatedWindow(8, 16)]


@pytest.mark.parametrize("layout_name", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("pattern", ONE_CALL, ids=str)
def test_a_hop_is_one_call(pattern: Pattern, layout_name: str) -> None:
    """Chunks of a shard, the triangle before a band, repeated segments and residue classes are joined."""
    most = 2 if isinstance(pattern, DilatedWindow) else 1  # two chunks, each a batch of residue classes
    results = calls_of(pattern, layout_name)
    assert results and max(map(len, results)) <= most, [len(calls) for calls in results]


def test_the_first_hop_of_causal_attention_is_one_triangle_over_the_whole_shard() -> None:
    (call,) = calls_of(Causal())[0]
    assert (call.q_rows.length, call.k_rows.length, call.left, call.right) == (2048, 2048, OPEN, 0)


def test_documents_are_one_variable_length_call_a_hop() -> None:
    ids = document_ids(1 << 13, mean=100)
    for calls in calls_of(Documents(ids) & Causal(), "contiguous"):
        assert len(calls) == 1
    whole = calls_of(Documents(ids) & Causal(), "contiguous")[0][0]
    assert len(whole.q_ends) > 10 and whole.q_ends[-1] == whole.q_rows.length
    assert len(calls_of(Documents(ids), "striped")[0]) == 1


def test_longnet_is_one_call_a_branch() -> None:
    """On strided views [segments, w / r], and 1.33 times the pairs at growth 2; no weights."""
    pattern = longnet(1 << 15, 512)
    layout = make_layout("contiguous", tokens=1 << 15, ring_size=1, pattern=pattern)
    tiles = build_plan(pattern, layout, query_heads=1, kv_heads=1).rank(0).classes[0].hops[0].tiles
    calls = make_flash_calls(tiles)
    branches = len(pattern.segment_lengths)  # type: ignore[attr-defined]
    assert len(calls) == branches < len(tiles)
    assert [call.q_rows.step for call in calls] == [2**i for i in range(branches)]
    assert all(call.q_rows.repeats * call.q_rows.length * call.q_rows.step == 1 << 15 for call in calls)
    assert 1.25 < sum(call.pairs for call in calls) / int(tiles.pairs.sum()) < 1.45


def test_both_ways_to_the_branch_form_are_the_same_sum() -> None:
    """Weighted tiles class by class, and the rule cut anew: every pair as often as m says."""
    pattern = Dilated((16, 32, 96), (1, 2, 4)).bind((0, 1), 2, 1)
    runs = np.array([[0, 1, 50], [60, 1, 36]])
    tiles = pattern.tiles(runs, runs)
    assert (tiles.weight >= 0).any()
    anew, by_class = get_branch_form(tiles), get_branch_form(replace(tiles, rule=None))
    q, k, v = (torch.randn(1, heads, 86, 8, dtype=torch.float64) for heads in (2, 1, 1))
    for results in (anew, by_class):
        assert (results.weight < 0).all()
        got = merged(results, q, k, v)
        assert float((got - merged(tiles, q, k, v)).abs().max()) < 1e-13
    assert len(anew) < len(by_class)


def merged(tiles: Tiles, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The log-sum-exp over all tiles."""
    lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float64)
    for part in ReferenceKernel().forward(q, k, v, tiles, 1.0):
        where = part.q_rows.select(lse[:, part.heads])
        where.copy_(torch.logaddexp(where, part.lse_BHS))
    assert all(tile.bias == 0 or tile.inside is None for tile in each_tile(tiles))
    return lse


@pytest.mark.parametrize("empty_lse", [torch.inf, -torch.inf])
def test_rows_without_keys_of_either_convention(empty_lse: float) -> None:
    """Padding between documents: gaps of a variable-length call see nothing, forward and backward."""
    ids = np.repeat([0, -1, 1, -1, 2], [40, 20, 13, 5, 15])
    pattern = Documents(ids) & Causal()
    layout = make_layout("contiguous", tokens=93, ring_size=1, pattern=pattern)
    values = [x.double() for x in tensors(Shape(2, 4, 2, 93, 16))]
    kernel = kernel_of(Flash(emulated(empty_lse)))
    got = ring_hops(kernel, *values, pattern, layout)
    assert worst_error(got, dense_attention(*values, pattern)) < 1e-12
    tiles = build_plan(pattern, layout, query_heads=4, kv_heads=2).rank(0).classes[0].hops[0].tiles
    (call,) = make_flash_calls(tiles)
    assert call.has_empty_rows and call.pairs == int(tiles.pairs.sum())


@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0])
def test_scales_values_of_another_width_and_the_gradient_of_the_lse(scale: float) -> None:
    pattern = Documents(document_ids(93, 10)) & SlidingWindow(9)
    layout = make_layout("contiguous", tokens=93, ring_size=1, pattern=pattern)
    tiles = build_plan(pattern, layout, query_heads=4, kv_heads=2).rank(0).classes[0].hops[0].tiles
    sizes = ((4, 24), (2, 24), (2, 12), (4, 12))
    q, k, v, grad = (torch.randn(2, heads, 93, width, dtype=torch.float64) for heads, width in sizes)
    grad_lse = torch.randn(2, 4, 93, dtype=torch.float64)
    results = []
    for kernel in (ReferenceKernel(), kernel_of(Flash(emulated())), FlashKernel()):
        out, lse = torch.zeros_like(grad), torch.full_like(grad_lse, -torch.inf)
        for part in kernel.forward(q, k, v, tiles, scale):
            rows = part.q_rows
            lse_before, new = rows.select(lse[:, part.heads]), part.lse_BHS
            total = torch.logaddexp(lse_before, new)
            view = rows.select(out[:, part.heads])
            weights = [torch.exp(x - total.clamp_min(-1e300))[..., None] for x in (lse_before, new)]
            view.copy_(view * weights[0] + part.out_BHSD * weights[1])
            lse_before.copy_(total)
        sums = [torch.zeros_like(x) for x in (q, k, v)]
        for grads in kernel.backward(grad, q, k, v, out, lse, tiles, scale, grad_lse):
            grads.add_to(*sums)
        results.append((out, lse, *sums))
    for got in results[1:]:
        for a, b in zip(got, results[0], strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-11, equal_nan=True)


MASKED = next(mask.pattern for name, mask in MASKS.items() if name not in WINDOWS)


def flash_for(dtype: torch.dtype, head_dim: int, pattern: Pattern) -> Kernel:
    return get_kernel("flash", "cuda", needs=KernelNeeds("cuda", dtype, head_dim, pattern))


def attend_masked() -> None:
    _, tiles = next(hops_of(MASKED, "contiguous", 1, 93))
    list(FlashKernel().forward(*(torch.zeros(1, 2, 93, 8) for _ in range(3)), tiles, 1.0))


test_what_is_refused_names_flex = refuse({
    "a mask function": (lambda: flash_for(torch.bfloat16, 64, MASKED), RingConfigError,
        r'MaskMod.*"kernel": "flex"'),
    "float32": (lambda: flash_for(torch.float32, 64, Causal()), RingShapeError,
        r'expected bfloat16 or float16 on cuda, got torch.float32.*"flex"'),
    "wide heads": (lambda: flash_for(torch.bfloat16, 320, Causal()), RingShapeError,
        'head_dim of at most 256, got 320; set "kernel": "flex"'),
    "no implementation": (lambda: get_kernel("flash", "cpu", (("implementation", "FA5"),)), RingConfigError,
        "implementation: expected one of FA2, cuDNN, cuDNN-flex, FA3, FA4, got 'FA5'"),
    "tiles of a mask function": (attend_masked, RingConfigError, '"kernel": "flex"'),
})  # fmt: skip


def test_a_triangle_and_a_rectangle_whose_last_query_sees_all_stay_two_windows() -> None:
    """Positions 0-3 and 8-9 attend to 0-3 and 5-9: query 8 sees 5-8, and 0-3 in the other one."""
    first = FlashWindow(Rows(0, 1, 4), Rows(0, 1, 4), OPEN, 0, -1, 0.0)
    below = FlashWindow(Rows(4, 1, 2), Rows(0, 1, 4), OPEN, OPEN, -1, 0.0)
    last = FlashWindow(Rows(4, 1, 2), Rows(4, 1, 5), OPEN, 0, -1, 0.0)
    assert len(join_windows([first, below, last])) == 3
    assert len(join_windows([first, below, last._replace(k=Rows(4, 1, 2))])) == 1
