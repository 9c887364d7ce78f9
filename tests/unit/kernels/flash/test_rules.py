"""What torch's CUDA operators compute wrongly: no call of any plan is one of those, and calls that are split.

The rules are models of the kernels, written from their sources and public reports; a fault that is put in is
found. No GPU has run them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ds_ring import Causal, Documents, Full, SlidingWindow, make_layout
from ds_ring.errors import RingKernelError
from ds_ring.kernels.flash import executors
from ds_ring.kernels.flash import kernel as flash
from ds_ring.kernels.flash.calls import (
    OPEN,
    FlashCall,
    FlashWindow,
    join_windows,
    make_flash_calls,
    split_call,
)
from ds_ring.kernels.flash.executors import CallSizes, Cudnn, Executor, Flash, Platform, needs_equal_bits
from ds_ring.kernels.flash.kernel import FlashKernel, _assign_calls
from ds_ring.kernels.interface import Rows
from ds_ring.kernels.trials import try_kernel
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.tiles import Tiles
from ds_ring.schedule.plan import build_plan
from tests.cases import LAYOUTS, Shape, document_ids, layout_for, longnet, tensors
from tests.fake_cuda import fake_tensors
from tests.flash_operators import emulated
from tests.hops import ring_hops
from tests.mask_table import HEADS, KV_HEADS, MASKS, TOKENS
from tests.reference import dense_attention
from tests.unit.kernels.flash.test_flash import WINDOWS, kernel_of, worst_error

PLATFORMS = (Platform(9, 91900), Platform(9, 92600), Platform(10, 92600), Platform(12, 91900))


def find_fault(executor: Executor, call: FlashCall, sizes: CallSizes, platform: Platform) -> str:
    """Which rule of its operator a call breaks; "" for none."""
    if isinstance(executor, Cudnn):
        (queries, keys), *others = call.lengths
        if others or not (call.left == call.right == -1 or (call.is_causal and queries == keys)):
            return "no mask of cuDNN's"
        if platform.generation == 10 and sizes.kv_heads < 8:
            return "wrong tokens"
        if sizes.backward and queries == 1 and keys in (1, 128):
            return "one query"
        nan = platform.generation == 9 and platform.cudnn < 92600 and keys % 128 == 64
        return "NaN of dQ" if sizes.backward and nan and not call.is_causal else ""
    if not sizes.backward:
        return ""
    width = -(-sizes.head_dim // 32) * 32
    heads = sizes.heads if call.head_in_group < 0 else sizes.kv_heads
    heads *= sizes.samples if call.q_ends else 1
    # `128 * bidb` and `m_block * kBlockM` are ints, and so is their product with heads and D.
    for number, (queries, _) in enumerate(call.lengths):
        block = (max(queries, 1) - 1) // 128 * 128
        if (block + 128 * number * bool(call.q_ends)) * heads * width + heads * width >= 1 << 31:
            return "int32"
    return "int32" if -(-queries // 128) * 128 * heads * width >= 1 << 31 and not call.q_ends else ""


def all_tiles() -> Iterator[Tiles]:
    """The hops of every mask and layout, and of zigzag runs of 64 tokens."""
    for name, (layout_name, ring_size) in zip(
        WINDOWS * 2, itertools.cycle(itertools.product(LAYOUTS, range(1, 9))), strict=False
    ):
        pattern = MASKS[name].pattern
        layout = layout_for(layout_name, pattern, tokens=TOKENS, ring_size=ring_size)
        yield from rank_tiles(pattern, layout)
    long: dict[Pattern, int] = {
        Causal(): 1024, Full(): 64 * 7, SlidingWindow(200): 1024, longnet(4096, 512): 4096,
        Documents(document_ids(4096)): 4096, Documents(document_ids(1 << 13, 2)) & Causal(): 1 << 13,
    }  # fmt: skip
    for pattern, tokens in long.items():
        yield from rank_tiles(pattern, layout_for("zigzag", pattern, tokens=tokens, ring_size=8))


def rank_tiles(pattern: Pattern, layout: Any) -> Iterator[Tiles]:
    plan = build_plan(pattern, layout, query_heads=HEADS, kv_heads=KV_HEADS)
    for rank in range(layout.ring_size):
        for head_class in plan.rank(rank).classes:
            yield from (hop.tiles for hop in head_class.hops if len(hop.tiles))


SIZES = (
    CallSizes(1, 32, 8, 128, True), CallSizes(2, 32, 8, 128, True), CallSizes(1, 8, 2, 64, False),
    CallSizes(1, 8, 2, 128, True), CallSizes(64, 64, 8, 256, True),
)  # fmt: skip


PASSES = [(SIZES[0], platform) for platform in PLATFORMS] + [(sizes, PLATFORMS[0]) for sizes in SIZES[1:]]
PASSES.append((SIZES[3], PLATFORMS[2]))


class Unruled(Cudnn):
    """cuDNN's executor as it was: full or causal."""

    def takes(self, call: FlashCall, sizes: CallSizes) -> bool:
        return not call.q_ends and (call.left == call.right == -1 or call.q_rows.length == call.k_rows.length)


class Unsplit(Flash):
    """FlashAttention's executor as it was: whole calls."""

    def fits(self, call: FlashCall, sizes: CallSizes) -> bool:
        return True


def test_no_call_of_any_plan_breaks_a_rule() -> None:
    """Each seeded executor breaks some; ours none, and cuDNN still has calls."""
    faults: dict[str, set[str]] = {"rules": set(), "cuDNN": set(), "FlashAttention": set()}
    by_cudnn = 0
    for tiles in all_tiles():
        for sizes, platform in PASSES:
            choices = {
                "rules": (Cudnn(platform=platform), Flash()), "cuDNN": (Unruled(platform=platform), Flash()),
                "FlashAttention": (Unsplit(),),
            }  # fmt: skip
            for name, choice in choices.items():
                for call, executor, _ in _assign_calls.__wrapped__(tiles, choice, sizes):
                    faults[name].add(find_fault(executor, call, sizes, platform))
                    by_cudnn += name == "rules" and isinstance(executor, Cudnn)
    assert faults.pop("rules") == {""} and by_cudnn > 1000
    assert faults == {
        "cuDNN": {"", "no mask of cuDNN's", "wrong tokens", "one query", "NaN of dQ"},
        "FlashAttention": {"", "int32"},
    }


def test_zigzag_runs_of_64_tokens_made_calls_that_give_nan() -> None:
    layout = make_layout("zigzag", tokens=1024, ring_size=8, pattern=Causal())
    platform, sizes, nan = Platform(9, 91900), SIZES[0], []
    for executor in (Unruled(platform=platform), Cudnn(platform=platform)):
        calls = [call for tiles in rank_tiles(Causal(), layout) for call in make_flash_calls(tiles)]
        taken = [call for call in calls if executor.takes(call, sizes)]
        nan.append(sum(find_fault(executor, call, sizes, platform) == "NaN of dQ" for call in taken))
    assert nan == [28, 0] and len(calls) == 64


def rows(length: int) -> Rows:
    return Rows(0, 1, length)


def packed(sequences: int, length: int = 1) -> FlashCall:
    ends = tuple(range(0, sequences * length + 1, length))
    return FlashCall(rows(sequences * length), rows(sequences * length), -1, 0, -1, 0.0, ends, ends)


@pytest.mark.parametrize(
    ("fitting", "split", "sizes"),
    [
        (FlashCall(rows(524_160), rows(99)), FlashCall(rows(524_161), rows(99)), SIZES[0]),
        (packed(4064), packed(4065), SIZES[0]), (packed(2031), packed(2033), SIZES[1]),
        (packed(2047, 128), packed(2048, 128), SIZES[0]), (packed(4096), packed(4096), SIZES[2]),
    ],
    ids=["rows", "sequences", "samples", "both", "forward"],
)  # fmt: skip
def test_calls_are_split_from_the_bound_on(fitting: FlashCall, split: FlashCall, sizes: CallSizes) -> None:
    flash = Flash()
    parts = list(split_call(split, lambda call: flash.fits(call, sizes)))
    assert flash.fits(fitting, sizes) and flash.fits(split, sizes) == (len(parts) == 1) == (
        not sizes.backward
    )
    assert all(flash.fits(part, sizes) for part in parts)
    assert not any(find_fault(flash, call, sizes, PLATFORMS[0]) for call in (fitting, *parts))
    assert sum(part.pairs for part in parts) == split.pairs


def test_windows_of_one_head_are_not_joined_with_those_of_another() -> None:
    first, second = Rows(0, 1, 4), Rows(4, 1, 4)
    triangles = [FlashWindow(rows, rows, OPEN, 0, head, 0.0) for rows in (first, second) for head in (0, 1)]
    squares = [FlashWindow(second, first, OPEN, OPEN, head, 0.0) for head in (0, 1)]
    pairs = dict.fromkeys((0, 1), 0)
    for window in join_windows([*triangles, *squares]):
        pairs[window.head_in_group] += FlashCall(*window).pairs
    assert pairs == dict.fromkeys((0, 1), 8 * 9 // 2)


@pytest.mark.day("2-SlidingWindow(window=400, causal=True)")  # splits a call that one side alone cuts
@pytest.mark.parametrize(
    "pattern",
    [
        Causal(), Full(), SlidingWindow(200), SlidingWindow(400), SlidingWindow(150, causal=False),
        Documents(document_ids(700, 100)) & Causal(), Documents(document_ids(700, 300)),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("ring_size", [1, 2])
def test_split_calls_are_the_same_attention(pattern: Pattern, ring_size: int) -> None:
    """A bound of 256 rows in place of 524,287; by the operators' contracts, in float64."""
    values = [x.double() for x in tensors(Shape(1, 4, 2, 700, 8))]
    layout = make_layout("contiguous", tokens=700, ring_size=ring_size, pattern=pattern)
    want, calls = dense_attention(*values, pattern), []
    for most in (1 << 31, 4 * 32 * 256 + 1):
        _assign_calls.cache_clear()
        operators = emulated()
        counted = mock.Mock(side_effect=operators.flash_backward)
        with mock.patch.object(executors, "OFFSETS", most):
            kernel = kernel_of(Flash(operators._replace(flash_backward=counted)))
            got = ring_hops(kernel, *values, pattern, layout)
        assert worst_error(got, want) < 1e-12
        calls.append(counted.call_count)
    _assign_calls.cache_clear()
    assert calls[1] > calls[0] or ring_size == 2  # whose shards of 350 tokens have shorter windows


@pytest.mark.parametrize(("name", "platform"), [("dq", Platform(9, 92600)), ("dk", Platform(8, 92600))])
def test_the_try_sees_nan_where_the_version_was_believed(name: str, platform: Platform) -> None:
    """An operator that makes NaN, of a version or device of which no fault is known."""
    cudnn = Cudnn(emulated(), platform)
    here = (torch.device("cpu"), torch.float32, 64, 64)
    try_kernel(kernel_of(Cudnn(emulated()), Flash(emulated())), *here)
    one_query = mock.patch.object(Cudnn, "takes", lambda self, call, sizes: call.q_rows.length == 1)
    with (
        one_query if name == "dk" else nullcontext(),
        pytest.raises(ArithmeticError, match=rf"{name} of Full\(\) differs by nan"),
    ):
        try_kernel(kernel_of(cudnn, Flash(emulated())), *here)


class LargeCopies(TorchDispatchMode):
    """Lists operators that copy a tensor with at least so many elements."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.copies = least, list[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.name()
        if name in ("aten::clone", "aten::copy_", "aten::_to_copy") and args[0].numel() >= self.least:
            self.copies.append(name)
        return result


@pytest.mark.parametrize(
    ("implementation", "ring_size", "copies"),
    [("cuDNN", 1, 0), ("cuDNN", 4, 2), ("FA2", 1, 2), ("FA2", 4, 2)],
)
def test_copies_of_a_backward_pass(implementation: str, ring_size: int, copies: int) -> None:
    """None where cuDNN computes all; half of out and of its gradient for hops of half of the queries.

    FlashAttention wants both in [B, S, H, D] order, once a pass. (Four copies were made for cuDNN.)
    """
    tokens = 1024
    layout = make_layout("zigzag", tokens=tokens * ring_size, ring_size=ring_size, pattern=Causal())
    hops = build_plan(Causal(), layout, query_heads=8, kv_heads=8).rank(0).classes[0].hops
    kernel = FlashKernel(implementation).select_heads(slice(None))
    with fake_tensors():
        q, k, v, out, grad = (
            torch.empty(1, 8, tokens, 64, dtype=torch.bfloat16, device="cuda") for _ in range(5)
        )
        lse = torch.empty(1, 8, tokens, device="cuda")
        with LargeCopies(q.numel() // 2) as counted:
            for hop in hops:
                held = slice(None) if hop.hop == 0 else slice(int(hop.held[:, 1].sum()))
                inputs = (k[:, :, held], v[:, :, held], out, lse, hop.tiles, 0.1)
                for _ in kernel.backward(grad, q, *inputs):
                    pass
    assert len(counted.copies) == copies, counted.copies


def test_warn_only_is_no_demand_for_equal_bits_and_cudnn_warns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Torch's FlashAttention 2 is not deterministic then, either: nothing is gained by leaving cuDNN."""
    demands: list[bool] = []

    def choose(*arguments: Any) -> tuple[Executor, ...]:
        demands.append(arguments[-1])
        return Cudnn(), Flash()

    monkeypatch.setattr(flash, "_choose_executors", choose)
    flash._warn_of_bits.cache_clear()
    q = mock.Mock(is_cpu=False, is_cuda=True, shape=(1, 2, 8, 64))
    try:
        for demanded, warn_only in ((False, False), (True, False), (True, True), (True, True)):
            torch.use_deterministic_algorithms(demanded, warn_only=warn_only)
            assert needs_equal_bits() == (demanded and not warn_only)
            FlashKernel("cuDNN")._get_executors(q, 64)
    finally:
        torch.use_deterministic_algorithms(False)
    assert demands == [False, True, False, False]
    assert [line for line in caplog.messages if "other bits" in line] == caplog.messages != []
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    ("name", "advice"), [("FA2", '"kernel": "flex"'), ("FA3", '"implementation": "FA2"')]
)
def test_an_operator_that_fails_is_named_with_shapes_and_what_to_set(name: str, advice: str) -> None:
    def fails(*inputs: Any, **options: Any) -> Any:
        raise RuntimeError("CUDA error: misaligned address")

    q, tiles = torch.zeros(1, 4, 96, 64), next(rank_tiles(Causal(), layout_for(
        "contiguous", Causal(), tokens=96, ring_size=1
    )))  # fmt: skip
    kernel = kernel_of(Flash(emulated()._replace(flash_forward=fails, flash_backward=fails), name=name))
    says = rf'kernel "flash" \({name}\): expected a pass over .*q \(1, 4, 96, 64\) .*misaligned address; .*'
    with pytest.raises(RingKernelError, match=says + advice):
        list(kernel.forward(q, q, q, tiles, 0.1))
    with pytest.raises(RingKernelError, match=says + advice):
        list(kernel.backward(q, q, q, q, q, q[..., 0], tiles, 0.1))


def test_a_device_without_memory_stays_that_error() -> None:
    def fails(*inputs: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("16 GiB")

    q, tiles = torch.zeros(1, 4, 96, 64), next(all_tiles())
    with pytest.raises(torch.OutOfMemoryError, match="16 GiB"):
        list(kernel_of(Flash(emulated()._replace(flash_forward=fails))).forward(q, q, q, tiles, 0.1))
    kernel = kernel_of(Flash(emulated()._replace(flash_backward=fails)))
    with pytest.raises(torch.OutOfMemoryError, match="16 GiB"):
        list(kernel.backward(q, q, q, q, q, q[..., 0], tiles, 0.1))
