"""The questions that a GPU decides first (tools/results/gpu_h200.md), one kernel a row.

Each result is held against float64, or counts what is not a number. What needs CUDA says so on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from benchmarks.gpu_rates import ProductionPass, repeat, sdpa, seconds, significant, tile_kinds
from benchmarks.measuring import ResultRow
from common import in_turns
from torch import Tensor

from ds_ring import Causal
from ds_ring.compat.torch_kernels import derives_joint_graph
from ds_ring.kernels.flash.kernel import FlashKernel
from ds_ring.kernels.flex import block_mask
from ds_ring.kernels.flex.kernel import FlexKernel
from ds_ring.kernels.select import Kernel
from ds_ring.plugin import LAYOUTS
from tests.cases import layout_for
from tests.hops import ring_hops

from .kernels import (
    compute_errors,
    exact_tokens,
    get_limit,
    get_shape,
    is_cuda,
    judged,
    make_kernel,
    operands,
    reference,
)

NO_CUDA = {"not_shown": "needs CUDA"}
LOW_LSE = -120.0  # below ln of the least float32: exp(-lse) overflows


@contextmanager
def choose_tables(old: bool) -> Iterator[None]:
    """Let flex have tables of two widths, as before, which torch 2.11 reads wrongly; or those of today."""

    def trimmed(by_head: Any, rows: int) -> list[Any]:
        make = block_mask._TablePlan.from_intervals
        return [make([pair[full] for pair in by_head], rows) for full in (0, 1)]

    today = block_mask._make_plan_pair
    with mock.patch.object(block_mask, "_make_plan_pair", trimmed if old else today):
        yield


def make_flex(device: str, **options: Any) -> FlexKernel:
    """Return flex; on the CPU not compiled."""
    return FlexKernel(**options) if is_cuda(device) else FlexKernel(16, None, recompute=False)


def check_tables(device: str, mask: str, old: bool) -> Iterator[ResultRow]:
    """Yield flex's errors with today's tables, or how wrong the old ones are here."""
    pattern = tile_kinds(exact_tokens(device))[mask]
    layout = layout_for("zigzag", pattern, tokens=exact_tokens(device), ring_size=4)
    with choose_tables(old):
        got = ring_hops(make_flex(device), *operands(device), pattern, layout)
    errors = compute_errors(got._asdict(), reference(device, mask))
    case = {"kernel": "flex", "mask": mask, "tables": "old" if old else "today's"}
    yield judged(case, errors, math.inf if old else get_limit(get_shape(device).dtype))


def run_long_pass(device: str, kernel: str, mask: str, old: bool = False) -> Iterator[ResultRow]:
    """Yield whether a production pass of 32 Ki tokens ends, and with finite results."""
    tokens = 32_768 if is_cuda(device) else 256
    instance = make_flex(device) if kernel == "flex" else make_kernel(kernel, device)
    with choose_tables(old):
        rank = ProductionPass(get_shape(device), instance, tile_kinds(tokens)[mask], tokens)
        results = [*rank.forward(), *rank.backward()]
        finite = all(bool(x.isfinite().all()) for x in results)  # waits for the device
    case = {"kernel": kernel, "mask": mask, "tokens": tokens, "tables": "old" if old else "today's"}
    yield ResultRow(case, {"finite": finite}, "" if finite or old else "expected finite results")


def count_faults_at_low_lse(device: str, queries: int, keys: int) -> Iterator[ResultRow]:
    """Yield how many gradients of cuDNN's operator are not finite where every score is about -120."""
    case = {"kernel": "cuDNN", "queries": queries, "keys": keys, "lse": LOW_LSE}
    if not is_cuda(device):
        yield ResultRow(case, NO_CUDA)
        return
    shape, scale = get_shape(device), get_shape(device).head_dim ** -0.5
    q, grad = (shape.tensor(shape.heads, queries) for _ in range(2))
    k, v = (shape.tensor(shape.kv_heads, keys) for _ in range(2))
    q[..., 0], k[..., 0] = -LOW_LSE / scale, -1.0
    aten = torch.ops.aten
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, False, scale=scale)
    gradients = aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse, lse, lse, None, None, None, queries, keys, 0.0, False, scale=scale
    )
    counts = {name: int((~x.isfinite()).sum()) for name, x in zip(("dq", "dk", "dv"), gradients, strict=True)}
    yield ResultRow(case, {"not_finite": counts})


def check_layouts(device: str, mask: str) -> Iterator[ResultRow]:
    """Yield cuDNN's errors under every layout."""
    pattern, tokens = tile_kinds(exact_tokens(device))[mask], exact_tokens(device)
    instance = FlashKernel("cuDNN")
    for name in LAYOUTS:
        layout = layout_for(name, pattern, tokens=tokens, ring_size=4)
        got = ring_hops(instance, *operands(device), pattern, layout)
        errors = compute_errors(got._asdict(), reference(device, mask))
        case = {"kernel": "cuDNN", "mask": mask, "layout": name}
        yield judged(case, errors, get_limit(get_shape(device).dtype))


def time_production(device: str, kernel: str) -> Iterator[ResultRow]:
    """Yield ms of a production pass of one rank, of its operators alone, and of torch's attention."""
    tokens = 16_384 if is_cuda(device) else 256
    shape, instance = get_shape(device), make_kernel(kernel, device)
    rank = ProductionPass(shape, instance, Causal(), tokens)
    works: dict[str, Callable[[], object]] = {"forward": rank.forward, "backward": rank.backward}
    works |= dict(zip(("SDPA forward", "SDPA backward"), sdpa(shape, tokens, True), strict=True))
    works |= make_calls_alone(instance, rank)
    yield ResultRow({"kernel": kernel, "tokens": tokens}, time_works(works, device))


def make_calls_alone(kernel: Kernel, rank: ProductionPass) -> dict[str, Callable[[], object]]:
    """Return the calls of a kernel's only hop, whose results nobody adds up."""
    (q, k, v), (out, lse), tiles = rank.operands, rank.results, rank.tiles
    scale = q.shape[-1] ** -0.5
    return {
        "forward alone": lambda: list(kernel.forward(q, k, v, tiles, scale)),
        "backward alone": lambda: list(kernel.backward(rank.grad, q, k, v, out, lse, tiles, scale)),
    }


def time_works(works: dict[str, Callable[[], object]], device: str) -> dict[str, float]:
    """Return the median milliseconds of each work; they take turns, on a device that is not idle."""
    several = {name: repeat(work, device) for name, work in works.items()}
    taken = in_turns({name: partial(seconds, work, device) for name, (work, _) in several.items()}, 10, 2)
    return {
        f"{name}_ms": significant(1e3 * sorted(times)[len(times) // 2] / several[name][1])
        for name, times in taken.items()
    }


def time_flex_backward(device: str, blocks: str) -> Iterator[ResultRow]:
    """Yield ms of flex with our blocks or Inductor's, and whether torch compiles the backward operator."""
    tokens = 16_384 if is_cuda(device) else 256
    instance = make_flex(device, device_blocks=blocks == "ours")
    rank = ProductionPass(get_shape(device), instance, Causal(), tokens)
    results: dict[str, Any] = time_works({"forward": rank.forward, "backward": rank.backward}, device)
    yield ResultRow(
        {"kernel": "flex", "blocks": blocks, "tokens": tokens}, results | {"operator": derives_joint_graph()}
    )


def check_sequences(device: str, count: int) -> Iterator[ResultRow]:
    """Yield how far FlashAttention 2's dQ of so many sequences is from that of the same in two calls."""
    case = {"kernel": "FA2", "sequences": count}
    if not is_cuda(device):
        yield ResultRow(case, NO_CUDA)
        return
    length, (heads, head_dim) = 130, (32, 128)  # the second block of a sequence begins at row 128
    rows = count * length
    q, k, v, grad = (
        torch.randn(rows, heads, head_dim, device=device, dtype=torch.bfloat16) for _ in range(4)
    )
    whole = compute_packed_gradient(q, k, v, grad, length)
    half = rows // length // 2 * length
    parts = []
    for at in (slice(half), slice(half, None)):
        parts.append(compute_packed_gradient(q[at], k[at], v[at], grad[at], length))
    error = float((whole.float() - torch.cat(parts).float()).abs().max())
    yield ResultRow(case, {"dq_off_by": significant(error), "finite": bool(whole.isfinite().all())})


def compute_packed_gradient(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, length: int) -> Tensor:
    """Return dQ of packed sequences of one length, by torch's operator."""
    aten, scale = torch.ops.aten, q.shape[-1] ** -0.5
    ends = torch.arange(0, len(q) + 1, length, device=q.device, dtype=torch.int32)
    lengths = (ends, ends, length, length, 0.0, True)
    options = {"scale": scale, "window_size_left": -1, "window_size_right": -1}
    out, lse, *_ = aten._flash_attention_forward(q, k, v, *lengths, False, **options)
    gradients = aten._flash_attention_backward(grad, q, k, v, out, lse, *lengths, lse, lse, **options)
    return gradients[0]
