"""FlexAttention without a GPU: its masks against painted tiles, and the kernel on the CPU.

There Dynamo compiles it (torch.compile's backend "eager") and the operators' dense mathematics run. What only
CUDA runs is in tests/gpu.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from ds_ring import (
    Causal,
    Chunked,
    Dilated,
    Documents,
    PrefixLM,
    RingLayoutError,
    Sinks,
    SlidingWindow,
    make_layout,
)
from ds_ring.errors import RingConfigError, RingKernelError, RingShapeError
from ds_ring.kernels.flex import block_mask, layouts
from ds_ring.kernels.flex.block_mask import BlockTable, HopMasks, HopTensors, make_geometry
from ds_ring.kernels.flex.kernel import (
    FlexKernel,
    _count_backward_chunks,
    compile_call,
    try_flash_backend,
)
from ds_ring.kernels.flex.layouts import count_fullest_pairs
from ds_ring.kernels.flex.options import BLOCKS, check_options, choose_blocks, choose_options
from ds_ring.kernels.flex.workspace import KEPT_TABLE_BYTES
from ds_ring.kernels.interface import Operands
from ds_ring.kernels.reference import ReferenceKernel
from ds_ring.kernels.select import get_kernel
from ds_ring.kernels.trials import try_kernel
from ds_ring.kernels.workspace import HopShape, get_workspace_bytes
from ds_ring.layers.scores import Alibi, Softcap
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.tiles import Tiles
from ds_ring.patterns.captured.score_mod import ScoreMod
from ds_ring.ring.merge import merge_
from ds_ring.schedule.choose import EVEN, bind_one_head
from ds_ring.schedule.layout import Layout, expand_runs
from ds_ring.schedule.plan import build_plan
from tests.cases import PATTERNS, Shape, document_ids, layout_for, longnet, rows_of, tensors
from tests.fake_cuda import fake_gpu
from tests.hops import ring_hops, worst_relative_error
from tests.masks import MASKS, attention_by_mask, patterns
from tests.reference import dense_attention, relative_error
from tests.unit.masks.painting import paint
from tests.unit.masks.test_branches import Blocks

CPU, TOKENS = torch.device("cpu"), 203
MORE = {
    "two dilations": lambda tokens: Dilated((16, 48), (2, 3), True, "zero") & Dilated((20, 60), (1, 2)),
    "dilated documents": lambda tokens: Dilated((32, 64), (1, 2)) & Documents(document_ids(tokens)),
    "padding": lambda tokens: Documents(np.repeat([3, -1, 3, 8], [50, 20, 50, tokens - 120])) & Causal(),
}
RULES = {**PATTERNS, **MORE}


def seen(tensors: HopTensors, head_in_group: int) -> np.ndarray:
    """m of every pair as the kernel computes it, [queries, keys]."""
    q, k = tensors.q, tensors.k
    gap = q.position[:, None] - k.position[None]
    m = torch.zeros_like(gap)
    bands = tensors.bands * (len(q.labels) if len(tensors.bands) == 1 else 1)
    for ours, theirs, band in zip(q.labels, k.labels, bands, strict=True):
        ours, theirs = (x[head_in_group % len(x)] for x in (ours, theirs))
        shown = (ours[:, None] == theirs[None]) & (ours[:, None] >= 0)
        shown &= (gap >= band.least) & (gap <= band.most)
        for function in band.functions:
            pairs = torch.vmap(torch.vmap(function, (None, None, None, 0)), (None, None, 0, None))
            head = tensors.head_numbers[head_in_group % len(tensors.head_numbers)]
            shown &= pairs(torch.tensor(0), head, q.position, k.position)
        m += shown
    return m.numpy()


@pytest.mark.parametrize(
    "rule",
    [
        Causal(), SlidingWindow(9), PrefixLM(21), Chunked(20), Sinks(21) | SlidingWindow(4),
        Dilated((8, 16, 64), (1, 2, 4)),
    ],
    ids=str,
)  # fmt: skip
def test_hops_of_one_geometry_are_attended_alike(rule: Pattern) -> None:
    """All pairs of runs of 4 in some stretch; whatever only moves with its positions shares a table."""
    bound, known = rule.bind((0,), 1, 1), dict[Any, np.ndarray]()
    hops = 0
    for q, k in itertools.product(range(14, 32), repeat=2):
        tiles = bound.tiles(np.array([[q, 1, 4]]), np.array([[k, 1, 4]]))
        if len(tiles):
            hops += 1
            picture = paint(tiles, 4, 4)
            key = make_geometry(tiles, 4, 0, 0, False).key
            assert np.array_equal(known.setdefault(key, picture), picture), (q, k)
    assert len(known) < hops


def listed(table: BlockTable, head_in_group: int, columns: int) -> np.ndarray:
    """A table as a dense matrix of blocks, bool [rows, columns]."""
    count, index = (x[0, head_in_group].numpy() for x in table)
    dense = np.zeros((len(count), columns), dtype=int)
    for row, width in enumerate(count):
        np.add.at(dense[row], index[row, :width], 1)
    assert dense.max() <= 1, "a block twice"
    return dense.astype(bool)


def hops_of(pattern: Pattern, layout_name: str, ring_size: int) -> Iterator[Tiles]:
    layout = layout_for(layout_name, pattern, tokens=TOKENS, ring_size=ring_size)
    plan = build_plan(pattern, layout, query_heads=4, kv_heads=2)
    for rank in range(ring_size):
        for head_class in plan.rank(rank).classes:
            yield from (hop_plan.tiles for hop_plan in head_class.hops if len(hop_plan.tiles))


@pytest.mark.parametrize("layout_name", ["contiguous", "zigzag", "striped", "residue"])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.covering(1)
def test_masks_are_the_painted_tiles_and_blocks_cover_them(name: str, layout_name: str) -> None:
    block, pattern = 16, RULES[name](TOKENS)
    for tiles in (t for ring_size in (1, 3) for t in hops_of(pattern, layout_name, ring_size)):
        (q0, n), (k0, m), tensors, _ = HopMasks().get(tiles, block, CPU)
        rows, columns = -(-n // block), -(-m // block)
        for head_in_group in range(2):
            painted = paint(tiles, q0 + n, k0 + m, head_in_group)
            np.testing.assert_array_equal(seen(tensors, head_in_group), painted[q0:, k0:])
            assert not painted[:q0].any() and not painted[:, :k0].any()
            whole = np.zeros((rows * block, columns * block), dtype=int)
            whole[:n, :m] = painted[q0:, k0:]
            blocks = (whole > 0).reshape(rows, block, columns, block)
            at = head_in_group % tensors.partial_rows.counts.shape[1]
            partial, full = (listed(t, at, columns)[:rows] for t in (tensors.partial_rows, tensors.full_rows))
            assert not (partial & full).any()
            assert (blocks.any((1, 3)) <= (partial | full)).all(), "a block is missing"
            assert (full <= blocks.all((1, 3))).all(), "a block is not full"
            if not pattern.masks:
                assert ((partial | full) <= blocks.any((1, 3))).all(), "an empty block is visited"
            for table, want in ((tensors.partial_columns, partial), (tensors.full_columns, full)):
                np.testing.assert_array_equal(listed(table, at, rows)[:columns].T, want)


def test_full_blocks_are_found() -> None:
    """Causal and dilated in residue order: what is wholly attended needs no mask."""
    dilated = Dilated((256, 1024), (1, 4), False)
    for pattern, name, least in ((Causal(), "zigzag", 0.7), (dilated, "residue", 0.3)):
        layout = layout_for(name, pattern, tokens=2048, ring_size=1)
        tiles = build_plan(pattern, layout, query_heads=1, kv_heads=1).rank(0).classes[0].hops[0].tiles
        tensors = HopMasks().get(tiles, 64, CPU).tensors
        full, partial = int(tensors.full_rows.counts.sum()), int(tensors.partial_rows.counts.sum())
        assert full / (full + partial) > least, (pattern, full, partial)


def test_tables_are_as_wide_as_the_widest_row_and_kept() -> None:
    runs = np.array([[0, 1, 65536]])
    tiles = SlidingWindow(1000).tiles(runs, runs)
    masks = HopMasks()
    tensors = masks.get(tiles, 128, CPU).tensors
    assert masks.get(tiles, 128, CPU).tensors is tensors
    rows, columns = (tensors.partial_rows, tensors.full_rows), (tensors.partial_columns, tensors.full_columns)
    for table in (*rows, *columns):
        assert table.blocks.shape[3] <= 1000 // 128 + 2
    assert tensors.nbytes < 1 << 21


def test_a_table_without_tiles_is_no_call() -> None:
    """As "all_gather" hands over for the shard of a rank that sees none of its keys."""
    kernel, nothing = FlexKernel(16, "eager", recompute=False), Tiles.rectangles(*[build_runs(4)] * 2)
    nothing, q = nothing.rows(np.zeros(1, dtype=bool)), torch.ones(1, 2, 4, 16)
    assert len(nothing) == 0 and list(kernel.forward(q, q, q, nothing, 1.0)) == []
    assert list(kernel.backward(q, q, q, q, q, q[..., 0], nothing, 1.0)) == []
    assert kernel.count_executed_pairs(nothing) == 0


def test_rows_of_many_intervals_are_written_on_the_host_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layout_for("zigzag", Causal(), tokens=TOKENS, ring_size=1)
    pattern = Documents(document_ids(TOKENS)) & Causal()
    tiles = build_plan(pattern, layout).rank(0).classes[0].hops[0].tiles
    on_device = HopMasks().get(tiles, 16, CPU).tensors
    monkeypatch.setattr(block_mask, "FEW_INTERVALS", 0)
    on_host = HopMasks().get(tiles, 16, CPU).tensors
    for name in ("partial_rows", "full_rows", "partial_columns", "full_columns"):
        ours, theirs = getattr(on_device, name), getattr(on_host, name)
        assert torch.equal(ours.counts, theirs.counts), name
        shown = torch.arange(ours.blocks.shape[3]) < ours.counts[..., None]
        assert torch.equal(ours.blocks.where(shown, 0), theirs.blocks.where(shown, 0)), name


@pytest.mark.parametrize("rows", [16, 31])
def test_rows_of_blocks_are_sampled_evenly(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Of 40 rows, some at regular distances, each whole; few rows are all taken."""
    runs = np.array([[0, 1, 300], [1000, 2, 100]])
    assert layouts._sample_rows(runs, 20) == (pytest.approx(runs), 1.0)
    monkeypatch.setattr(layouts, "ROWS", rows)
    sampled, share = layouts._sample_rows(runs, 10)
    assert share == pytest.approx(rows / 40) and int(sampled[:, 2].sum()) == 10 * rows
    positions = expand_runs(sampled)
    assert {0, 1198} <= set(positions.tolist()) <= set(expand_runs(runs).tolist())


def test_tables_of_a_long_shard_are_small_and_shared_by_geometry() -> None:
    """256 Ki tokens a shard, 64 ranks, causal zigzag: a hop below 16 MiB, three geometries, few operators.

    (Measured: 6 to 7 MiB a hop, three tables for 64 hops, 10 to 20 ms each. Made block by block by the host
    they were 3.4 s a hop and 1.24 GiB for the ring.)
    """
    shard, ring_size, rank = 1 << 18, 64, 20
    layout = layout_for("zigzag", Causal(), tokens=shard * ring_size, ring_size=ring_size)
    plan = build_plan(Causal(), layout, query_heads=8, kv_heads=8).rank(rank)
    hops = [hop.tiles for hop in plan.classes[0].hops]
    assert len(hops) == ring_size
    saved, masks, seconds = HopMasks(), {}, []
    for tiles in hops:
        before = time.process_time()
        with OperatorCount() as count:
            result = saved.get(tiles, 128, CPU, 128, shard)
        seconds.append(time.process_time() - before)
        assert count.operators < 100, count.operators
        masks[id(result.tensors)] = result
    sizes = [mask.tensors.nbytes for mask in masks.values()]
    assert len(masks) == 3 and max(sizes) <= 16 << 20, (len(masks), sizes)
    # Processor time: 10 to 13 ms, 16 to 20 on a busy machine. The rest comes from the cache: about 1 ms.
    assert sorted(seconds)[-1] < 0.2 and sorted(seconds)[-4] < 2e-2, sorted(seconds)[-4:]
    for tiles in hops[:: ring_size // 4]:
        tensors, block = saved.get(tiles, 128, CPU, 128, shard)[2:]
        visited = int(tensors.partial_rows.counts.sum() + tensors.full_rows.counts.sum()) * block**2
        assert visited <= 1.01 * tiles.pairs.sum()


def test_tables_of_documents_are_measured_once_each_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch has new ones: a sum over all that are kept took 0.76 s a batch after 6,400 batches."""
    measured, nbytes = [], HopTensors.nbytes.fget
    monkeypatch.setattr(HopTensors, "nbytes", property(lambda x: measured.append(x) or nbytes(x)))
    masks = HopMasks(40_000)
    saved = masks.by_geometry
    layout = layout_for("zigzag", Causal(), tokens=TOKENS, ring_size=1)
    for seed in range(50):
        pattern = Documents(document_ids(TOKENS, seed=seed)) & Causal()
        tiles = build_plan(pattern, layout).rank(0).classes[0].hops[0].tiles
        assert masks.get(tiles, 16, CPU) is masks.get(tiles, 16, CPU)
    assert len(measured) == 50
    assert 1 < len(saved) < 50 and saved.nbytes <= 40_000
    assert saved.nbytes == sum(nbytes(value.tensors) for value, _ in saved._entries.values())
    assert KEPT_TABLE_BYTES == 64 << 20


class OperatorCount(TorchDispatchMode):
    """Counts operators."""

    operators = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", list(PATTERNS))
@pytest.mark.day("dilated")
def test_kernel_equals_float64_over_a_ring(name: str) -> None:
    """Operators on the CPU: dense, but with our masks; gradients by the recomputed hop."""
    pattern = PATTERNS[name](TOKENS)
    torch._dynamo.reset()
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, heads, TOKENS, 16) for heads in (4, 2, 2, 4))
    layout = layout_for("zigzag", pattern, tokens=TOKENS, ring_size=3)
    got = ring_hops(FlexKernel(32, "eager", recompute=True), q, k, v, grad, pattern, layout)
    assert worst_relative_error(got, dense_attention(q, k, v, grad, pattern)) < 2e-6


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_flex_attention_are_exact_here_too(name: str) -> None:
    """The kernel as it is, not compiled; the truth is FlexAttention's create_mask."""
    pattern, mask = patterns(name, "& Causal()", 64 if name == "natten" else 65)
    shape = Shape(2, 4, 2, mask.shape[-1], 16)
    layout = layout_for("zigzag", pattern, tokens=shape.tokens, ring_size=2)
    got = ring_hops(FlexKernel(32, None, recompute=False), *tensors(shape), pattern, layout)
    want = attention_by_mask(shape, mask)
    sees = want.lse.isfinite()
    assert torch.equal(got.lse.isfinite(), sees) and got.out[~sees].eq(0).all()
    for part, expected in zip(
        (got.lse[sees], *got[:1], *got[2:]), (want.lse[sees], *want[:1], *want[2:]), strict=True
    ):
        assert float((part - expected).abs().max()) < 5e-6


def test_the_backward_operator_takes_the_global_out_and_lse_and_all_hops_are_one_compilation() -> None:
    """Hops of other lengths, ranks and windows, windows that leave a rank without keys: two graphs in all."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, heads, TOKENS, 16) for heads in (2, 1, 1, 2))
    kernel = FlexKernel(16, "eager", recompute=False)
    for pattern, name, ring_size in (
        (SlidingWindow(50), "contiguous", 4),
        (Causal(), "zigzag", 2),
        (Documents(document_ids(TOKENS)), "contiguous", 3),
    ):
        layout = layout_for(name, pattern, tokens=TOKENS, ring_size=ring_size)
        got = ring_hops(kernel, q, k, v, grad, pattern, layout)
        assert worst_relative_error(got, dense_attention(q, k, v, grad, pattern)) < 2e-6
    assert counters["stats"]["unique_graphs"] == 2  # forward and backward


def test_labels_of_several_branches_are_one_compilation_on_all_ranks() -> None:
    """(Labels that were views of one tensor differed in their offsets: six graphs on three ranks.)"""
    torch._dynamo.reset()
    counters.clear()
    q, k, v, grad = (torch.randn(1, heads, 450, 16) for heads in (4, 2, 2, 4))
    pattern = PATTERNS["dilated"](450)
    layout = layout_for("residue", pattern, tokens=450, ring_size=3)
    ring_hops(FlexKernel(64, "eager", recompute=False), q, k, v, grad, pattern, layout)
    assert counters["stats"]["unique_graphs"] == 2  # forward and backward


def test_options_are_checked() -> None:
    with pytest.raises(RingConfigError, match="unknown option 'BLOK_M'"):
        FlexKernel(BLOK_M=64)
    with pytest.raises(RingConfigError, match='"flex": expected tensors on cuda, got cpu'):
        get_kernel("flex", "cpu")
    FlexKernel(bwd_BLOCK_M1=64, num_warps=4)
    assert get_kernel("auto", "cpu").name == "cpu" and get_kernel("auto", "cuda").name == "flex"
    scores = ScoreMod(Softcap(2.0)).for_heads(range(4))
    assert get_kernel("auto", "cpu", scores=scores).name == "reference"
    assert get_kernel("auto", "cuda", scores=scores).name == "flex"


@pytest.fixture
def a_gpu() -> Iterator[None]:
    choose_options.cache_clear()
    with fake_gpu():
        yield
    choose_options.cache_clear()


@pytest.mark.usefixtures("a_gpu")
@pytest.mark.parametrize(
    ("inputs", "fwd", "bwd"),
    [
        ({}, True, True), ({"fwd_BLOCK_M": 64}, False, True), ({"BLOCK_M1": 64}, True, False),
        ({"bwd_num_warps": 4}, True, False), ({"num_stages": 2}, False, False),
        ({"PRESCALE_QK": True}, True, True), ({"BACKEND": "FLASH"}, False, False),
    ],
)  # fmt: skip
def test_blocks_of_the_device_where_none_are_given(inputs: dict[str, Any], fwd: bool, bwd: bool) -> None:
    device, pairs = torch.device("cuda", 0), tuple(check_options(inputs).items())
    result = choose_options(pairs, device, 128, torch.bfloat16, 128)
    assert result[: len(pairs)] == pairs
    added = {name for name, _ in result[len(pairs) :]}
    assert {name[:3] for name in added} == {way for way, there in (("fwd", fwd), ("bwd", bwd)) if there}
    for another in ((torch.device("cpu"), 128, torch.bfloat16), (device, 128, torch.float32)):
        assert choose_options(pairs, *another, 128) == pairs


def test_blocks_divide_those_of_the_mask_and_each_other() -> None:
    """As FlexAttention's lowering asks: of the side of a block of the mask, and in the backward pass."""
    for capability, rows in BLOCKS.items():
        for head_dim, side in itertools.product((16, 64, 80, 128, 192, 256), (32, 64, 128, 256)):
            result = choose_blocks(capability, head_dim, side)
            sides = {name: value for name, value in result.items() if "BLOCK" in name}
            assert len(sides) == 6 and all(side % value == 0 for value in sides.values())
            assert result["bwd_BLOCK_N1"] % result["bwd_BLOCK_M1"] == 0
            assert result["bwd_BLOCK_M2"] % result["bwd_BLOCK_N2"] == 0
        assert max(rows) == 256 and choose_blocks(capability, 512, 128) == {}
    assert choose_blocks(75, 64, 128) == {}


def cap_and_slope(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return Alibi((0.5, 0.25, 0.125, 0.0625))(
        Softcap(2.0)(score, batch, head, query, key), 0, head, query, key
    )


@pytest.mark.parametrize(("backend", "changed"), [(None, True), ("eager", True), ("eager", False)])
@pytest.mark.day("None-True", "eager-True")
def test_scores_values_of_another_width_and_the_gradient_of_the_lse(
    backend: str | None, changed: bool
) -> None:
    """As the reference kernel has them, of two heads that are not the first ones."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, h, TOKENS, d) for h, d in ((2, 16), (1, 16), (1, 24), (2, 24)))
    grad_lse = torch.randn(2, 2, TOKENS)
    scores = ScoreMod(cap_and_slope).for_heads(range(4)).select(slice(2, 4)) if changed else None
    layout = layout_for("zigzag", Causal(), tokens=TOKENS, ring_size=1)
    tiles = build_plan(Causal(), layout, query_heads=2, kv_heads=1).rank(0).classes[0].hops[0].tiles
    reference = ReferenceKernel(scores)
    out, lse = q.new_zeros(2, 2, TOKENS, 24), q.new_full((2, 2, TOKENS), -torch.inf)
    for part in reference.forward(q, k, v, tiles, 0.25):
        merge_(part.q_rows.select(out), part.q_rows.select(lse), part.out_BHSD, part.lse_BHS)
    flex = FlexKernel(32, backend, scores=scores)
    (got,) = flex.forward(q, k, v, tiles, 0.25)
    assert relative_error(got.out_BHSD, out) < 2e-6 and relative_error(got.lse_BHS, lse) < 2e-6
    totals = []
    for kernel in (reference, flex):
        results = [torch.zeros_like(x) for x in (q, k, v)]
        for grads in kernel.backward(grad, q, k, v, out, lse, tiles, 0.25, grad_lse):
            for total, rows, x in zip(results, (grads.q_rows, *[grads.k_rows] * 2), grads[3:6], strict=True):
                rows.select(total).add_(x)
        totals.append(results)
    for want, part in zip(*totals, strict=True):
        assert relative_error(part, want) < 5e-6


def test_what_one_head_alone_attends_to_is_not_full_for_the_others() -> None:
    """Of LongNet's heads the first one reads even tokens, the second one odd ones: here are even ones."""
    evens = np.array([[0, 2, 4]])
    tiles = Dilated((8,), (2,), causal=False).bind((0, 1), 2, 1).tiles(evens, evens)
    tensors = HopMasks().get(tiles, 16, CPU).tensors
    results = [seen(tensors, head) for head in range(2)]
    assert results[0].all() and not results[1].any()


def test_each_constant_has_code_of_its_own() -> None:
    """Dynamo makes a number symbolic at the second value that it sees in one code object."""
    q = torch.zeros(1, 2, 64, 16)
    kernel, (tiles, *_) = FlexKernel(16, "eager"), list(hops_of(Causal(), "contiguous", 1))
    codes = set()
    for scale in (0.5, 1.0):
        constants = kernel._collect_hop_constants(Operands(q, q, q), tiles, scale)
        codes.add(compile_call("eager", constants, 16)._torchdynamo_orig_callable.__code__.co_name)
    assert len(codes) == 2


@pytest.mark.parametrize("pattern", [Blocks(16), Blocks(16) & Causal(), Causal() & Blocks(16)], ids=str)
def test_labels_are_those_of_the_pattern(pattern: Pattern) -> None:
    """Of a pattern that only lists its branches."""
    whole, at = np.array([[0, 1, 64]]), np.arange(64)
    tiles = pattern.tiles(whole, whole)
    np.testing.assert_array_equal(seen(HopMasks().get(tiles, 16, CPU).tensors, 0), pattern.mask(at, at))


HEADS_AND_DIM = ((32, 128), (8, 128), (8, 128))


@pytest.mark.parametrize(("tokens", "samples", "chunks"), [(524_287, 1, 1), (524_288, 1, 2), (524_288, 4, 8)])
def test_heads_are_split_where_int32_counts_too_few_elements(tokens: int, samples: int, chunks: int) -> None:
    """Above 2^31 elements of a tensor the backward kernel's offsets overflow (pytorch 190857)."""
    shapes = [(samples, heads, tokens, head_dim) for heads, head_dim in HEADS_AND_DIM]
    assert _count_backward_chunks(*shapes) == chunks
    with pytest.raises(RingShapeError, match=r"fewer than 2147483648 elements .* use more ranks"):
        _count_backward_chunks((samples, 32, tokens * 8, 128), (samples, 1, tokens * 8, 128))


@pytest.mark.parametrize(("backend", "compilations"), [(None, 0), ("eager", 2)])
def test_split_heads_are_the_same_gradients(
    backend: str | None, compilations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bound of the elements of one K/V head and its queries, whose parts share a compilation."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, heads, TOKENS, 16) for heads in (6, 3, 3, 6))
    layout = layout_for("zigzag", Causal(), tokens=TOKENS, ring_size=2)
    monkeypatch.setattr("ds_ring.kernels.flex.kernel.OFFSETS", 2 * TOKENS * 16)
    kernel = FlexKernel(32, backend, recompute=False)
    got = ring_hops(kernel, q, k, v, grad, Causal(), layout)
    assert worst_relative_error(got, dense_attention(q, k, v, grad, Causal())) < 2e-6
    assert counters["stats"]["unique_graphs"] == compilations


def test_a_kernel_that_fails_is_named_with_its_shapes() -> None:
    def fails(*inputs: Any) -> Any:
        raise RuntimeError("an illegal memory access")

    kernel, (tiles, *_) = FlexKernel(16, None), list(hops_of(Causal(), "contiguous", 1))
    q = torch.zeros(1, 2, TOKENS, 16)
    kernel._attend = fails  # type: ignore[method-assign]
    shapes = rf'kernel "flex": expected a pass over q \(1, 2, {TOKENS}, 16\) torch.float32 on cpu, .*'
    with pytest.raises(RingKernelError, match=shapes + 'illegal memory access; set "kernel": "flash"'):
        list(kernel.forward(q, q, q, tiles, 0.1))


def test_flash_attn_4_is_tried_and_refused_where_it_is_wrong() -> None:
    """Uncompiled, the operator's lse has base 2, where FLASH promises a natural one."""
    here = (CPU, torch.float32, 32, 32)
    try_kernel(FlexKernel(32, None, recompute=False), *here)
    says = r'"FLASH": expected flash-attn-4 that works .* lse of Causal\(\) differs .*leave "BACKEND" out'
    with pytest.raises(RingConfigError, match=says):
        try_flash_backend((("BACKEND", "FLASH"),), *here, backend=None)
    q, (tiles, *_) = torch.zeros(1, 2, TOKENS, 16), list(hops_of(Causal(), "contiguous", 1))
    kernel = FlexKernel(16, None, BACKEND="FLASH")
    with pytest.raises(RingConfigError, match=r'FLASH has no gradient, got one that does; use "TRITON"'):
        list(kernel.backward(q, q, q, q, q, q[..., 0], tiles, 0.1, q[..., 0]))


# --- layouts ---------------------------------------------------------------------------------------------


OTHERS = ("contiguous", "zigzag", "balanced", "residue")
BLOCK = 32
CASES: dict[str, Callable[[int], Pattern]] = {
    **PATTERNS,
    **rows_of(
        "Dilated",
        lambda _: {
            "LongNet": lambda tokens: longnet(tokens, 256),
            "LongNet, both ways": lambda tokens: longnet(tokens, 256, 4, causal=False),
        },
    ),
}


def executed(pattern: Pattern, layout: Layout, block: int) -> int:
    """Pairs of head 0 that the fullest rank executes by the kernel's own count: flex's tables, or exactly."""
    plan = build_plan(bind_one_head(pattern), layout)
    kernel = get_kernel("flex", "cuda", block_size=block)
    ranks = (plan.rank(rank).classes[0] for rank in range(layout.ring_size))
    tiles = [[hop.tiles for hop in rank.hops] for rank in ranks]
    if block > 1:
        return max(sum(map(kernel.count_executed_pairs, hops)) for hops in tiles)
    return max(sum(int(item.pairs.sum()) for item in hops) for hops in tiles)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("block", [1, BLOCK])
@pytest.mark.covering(1)
def test_auto_executes_least(name: str, block: int) -> None:
    """Over the registry of patterns; what executes 5 % more at most is as good, there traffic decides."""
    tokens, ring_size = 2048, 4
    pattern, result = CASES[name](tokens), {}
    sizes = {"tokens": tokens, "ring_size": ring_size, "pattern": pattern}
    for another in OTHERS:
        try:
            result[another] = executed(pattern, make_layout(another, **sizes), block)
        except RingLayoutError:
            continue
    auto = make_layout("auto", **sizes, block_size=block)
    assert executed(pattern, auto, block) <= EVEN * min(result.values()), (auto, result)


@pytest.mark.parametrize(
    "name", [item for item in ("causal", "window", "documents, causal", "LongNet") if item in CASES]
)
def test_blocks_are_counted_as_flex_counts_them(name: str) -> None:
    pattern = CASES[name](2000)
    for layout_name in ("zigzag", "residue" if name == "LongNet" else "balanced"):
        layout = make_layout(layout_name, tokens=2000, ring_size=4, pattern=pattern)
        counted = count_fullest_pairs(bind_one_head(pattern), layout, BLOCK)
        assert counted == executed(pattern, layout, BLOCK)


# --- the workspace ---------------------------------------------------------------------------------------


def test_workspace_of_flex_has_the_tables_that_are_kept() -> None:
    tiles, shape = Tiles.rectangles(*(build_runs(n) for n in (8, 4))), HopShape(2, 1, 8, 4, 16, 2, 12)
    tables = (64 << 20) + 4 * (16 + 12) * 2  # and contiguous copies of K and V
    assert get_workspace_bytes("flex", tiles, shape, False) == tables + 2 * 8 * (12 * (2 + 4) + 24)
    gradients = (2 * 8 * 16 + 4 * (16 + 12)) * 2 + 2 * 2 * 8 * 4
    assert get_workspace_bytes("flex", tiles, shape, True) == tables + gradients
    wide = shape._replace(queries=1 << 28)  # heads in parts, and all of them once more
    elements = 2 * (1 << 28) * 16 + 4 * (16 + 12)
    expected = tables + 2 * elements * 2 + 2 * 2 * (1 << 28) * 4
    assert get_workspace_bytes("flex", tiles, wide, True) == expected


def build_runs(length: int) -> np.ndarray:
    return np.array([[0, 1, length]])
