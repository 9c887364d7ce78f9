"""Time kernels, hops of virtual rings and merges on one device.

FLOPs are those of attended pairs: 4 D forward and 10 D backward for each pair and query head, even if a
kernel really multiplies, so that waste shows as a lower rate.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from common import in_turns
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.measuring import ResultRow
from ds_ring import Causal, Dilated, Documents, Full, SlidingWindow, build_plan, make_layout
from ds_ring.errors import RingError
from ds_ring.kernels.flex.kernel import FlexKernel
from ds_ring.kernels.flex.options import Blocks, make_block_options
from ds_ring.kernels.select import Kernel, get_kernel
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.slots import count_slots
from ds_ring.masks.tiles import Tiles
from ds_ring.plugin import KERNELS
from ds_ring.ring.merge import get_accumulator_dtype, make_empty_results, merge_
from ds_ring.ring.ring_pass import RingPass
from ds_ring.schedule.lowering import get_query_heads
from ds_ring.schedule.rank_plan import HeadClassPlan

BASE = "torch SDPA"


def significant(value: float, digits: int = 4) -> float:
    """Return a number with so many significant digits."""
    return float(f"{value:.{digits}g}")


class Shape(NamedTuple):
    """Describe tensors of one sample: query heads H, K/V heads G, head_dim D, dtype and kind of device."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: str

    def tensor(self, heads: int, tokens: int) -> Tensor:
        """Return random values [1, heads, tokens, D]."""
        return torch.randn(1, heads, tokens, self.head_dim, device=self.device, dtype=self.dtype)

    def flops(self, pairs: int, backward: bool) -> float:
        """Return the floating-point operations of so many pairs per head."""
        return (10.0 if backward else 4.0) * self.head_dim * self.heads * pairs


def tile_kinds(tokens: int) -> dict[str, Pattern]:
    """Return the patterns whose tiles are of one kind each, for a sequence of so many tokens."""
    segments = [max(tokens >> shift, 2) for shift in (6, 4, 2, 0)]
    ids = np.repeat(np.arange(8), -(-tokens // 8))[:tokens]
    return {
        "full": Full(),
        "causal": Causal(),
        "window": SlidingWindow(max(tokens // 32, 1)),
        "documents": Documents(ids) & Causal(),
        "LongNet": Dilated(tuple(segments), (1, 4, 16, 64), causal=True),
    }


def seconds(work: Callable[[], object], device: str) -> float:
    """Return the seconds of some work, begun and ended with an idle device."""
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def medians(works: Mapping[str, Callable[[], object]], device: str, rounds: int) -> dict[str, float]:
    """Return the median seconds of each work: they take turns, after one round to warm up."""
    taken = in_turns({name: partial(seconds, work, device) for name, work in works.items()}, rounds)
    return {name: statistics.median(values) for name, values in taken.items()}


class Hop(NamedTuple):
    """Describe one hop of a rank: its heads, the keys that are there, and its tiles."""

    heads: slice
    k: Tensor
    v: Tensor
    tiles: Tiles


class Rank(NamedTuple):
    """Hold the inputs of a rank's passes: queries and their results, [1, H, S, D], and its hops."""

    grad: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor
    hops: list[Hop]

    @property
    def pairs(self) -> int:
        """Return the attended pairs of all hops, per query head."""
        counts = (int(hop.tiles.pairs.sum()) * self.q[:, hop.heads].shape[1] for hop in self.hops)
        return sum(counts) // self.q.shape[1]


def make_rank(shape: Shape, classes: Sequence[HeadClassPlan], local_tokens: int) -> Rank:
    """Return a rank with random tensors; `lse` is such that nothing overflows."""
    group = shape.heads // shape.kv_heads
    q, grad, out = (shape.tensor(shape.heads, local_tokens) for _ in range(3))
    lse = q.new_full(q.shape[:-1], 20.0, dtype=get_accumulator_dtype(q.dtype))
    hops = []
    for head_class in classes:
        kv = head_class.kv_heads
        for hop in head_class.hops:
            slots = local_tokens if hop.hop == 0 else count_slots(hop.held)
            if len(hop.tiles) and slots:
                k, v = (shape.tensor(shape.kv_heads, slots)[:, kv] for _ in range(2))
                hops.append(Hop(get_query_heads(kv, group), k, v, hop.tiles))
    return Rank(grad, q, out, lse, hops)


def attend(kernel: Kernel, rank: Rank) -> None:
    """Compute the forward pass of a rank's hops and merge them."""
    total, sums = make_empty_results(rank.q, rank.q.shape[-1], rank.lse.dtype)
    for hop in rank.hops:
        q, out, lse = (x[:, hop.heads] for x in (rank.q, total, sums))
        for part in kernel.forward(q, hop.k, hop.v, hop.tiles, q.shape[-1] ** -0.5):
            rows, heads = part.q_rows, part.heads
            merge_(rows.select(out[:, heads]), rows.select(lse[:, heads]), part.out_BHSD, part.lse_BHS)


def differentiate(kernel: Kernel, rank: Rank) -> None:
    """Compute the backward pass of a rank's hops and add the gradients up, those of keys for each hop."""
    total = torch.zeros_like(rank.q, dtype=rank.lse.dtype)
    for hop in rank.hops:
        grad, q, out, lse, dq = (x[:, hop.heads] for x in (rank.grad, rank.q, rank.out, rank.lse, total))
        dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (hop.k, hop.v))
        for part in kernel.backward(grad, q, hop.k, hop.v, out, lse, hop.tiles, q.shape[-1] ** -0.5):
            part.add_to(dq, dk, dv)


class ProductionPass:
    """The passes of a ring of one rank as users run them, with accumulators and results of q's dtype."""

    def __init__(self, shape: Shape, kernel: Kernel, pattern: Pattern, tokens: int) -> None:
        layout = make_layout("contiguous", tokens=tokens, ring_size=1, pattern=pattern)
        plan = build_plan(pattern, layout, query_heads=shape.heads, kv_heads=shape.kv_heads).rank(0)
        counts = (
            int(hop.tiles.pairs.sum()) * len(range(shape.kv_heads)[part.kv_heads])
            for part in plan.classes for hop in part.hops
        )  # fmt: skip
        self.pairs = sum(counts) // shape.kv_heads
        self._pass = RingPass(plan, kernel, None, shape.head_dim**-0.5)
        self.tiles = plan.classes[0].hops[0].tiles
        self.operands = [shape.tensor(heads, tokens) for heads in (shape.heads, *[shape.kv_heads] * 2)]
        self.grad = shape.tensor(shape.heads, tokens)
        self.results = self.forward()

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return out and lse."""
        return self._pass.forward(*self.operands)

    def backward(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv."""
        q, k, v = self.operands
        return self._pass.backward(self.grad, q, k, v, *self.results)


def repeat(work: Callable[[], object], device: str) -> tuple[Callable[[], object], int]:
    """Return the work several times over, for a device that is never idle meanwhile, and how many times."""
    count = 4 if device == "cuda" else 1
    return (lambda: [work() for _ in range(count)]), count


def both(kernel: Kernel, rank: Rank) -> None:
    """Compute both passes of a rank's hops."""
    attend(kernel, rank)
    differentiate(kernel, rank)


def measure_rates(
    shape: Shape, pairs: int, works: Sequence[Mapping[str, Callable[[], object]]], rounds: int
) -> dict[str, dict[str, float]]:
    """Return TFLOP/s by name, forward and backward; `works` are the forward and the backward passes."""
    count, times = repeat(list, shape.device)[1], []
    for passes in works:
        several = {name: repeat(work, shape.device)[0] for name, work in passes.items()}
        times.append(medians(several, shape.device, rounds))
    return {
        name: {
            f"{way}_tflops": significant(count * shape.flops(pairs, way == "backward") / taken[name] / 1e12)
            for way, taken in zip(("forward", "backward"), times, strict=True)
        }
        for name in works[0]
    }


def kernel_rates(
    shape: Shape, tokens: int, rounds: int, kinds: Collection[str] = (), kernels: Collection[str] = ()
) -> list[ResultRow]:
    """Return TFLOP/s of kernels on kinds of tiles, and of torch's own causal and full attention.

    Args:
        shape: of the tensors.
        tokens: of the sequence.
        rounds: of which the median counts.
        kinds: of tiles; all if there are none.
        kernels: by name; all if there are none.
    """
    rows: list[ResultRow] = []
    for kind, pattern in tile_kinds(tokens).items():
        if kinds and kind not in kinds:
            continue
        pairs = 0
        forward: dict[str, Callable[[], object]] = {}
        backward: dict[str, Callable[[], object]] = {}
        refused: dict[str, str] = {}
        for name, known in KERNELS.items():
            if name == "reference" or not known.runs_on(shape.device) or (kernels and name not in kernels):
                continue  # slow, of another device, or not asked for
            try:
                rank = ProductionPass(shape, get_kernel(name, shape.device), pattern, tokens)
                seconds(rank.backward, shape.device)  # a fault of this kernel is raised here
            except RingError as error:
                refused[name] = str(error)[:80]
                continue
            pairs, forward[name], backward[name] = rank.pairs, rank.forward, rank.backward
        if kind in ("full", "causal"):
            forward[BASE], backward[BASE] = sdpa(shape, tokens, kind == "causal")
        for name, rates in measure_rates(shape, pairs, (forward, backward), rounds).items():
            rows.append(ResultRow({"tiles": kind, "kernel": name}, {"pairs": pairs} | rates))
        rows += [
            ResultRow({"tiles": kind, "kernel": name}, {"refused": why}) for name, why in refused.items()
        ]
    return rows


def flex_rates(
    shape: Shape, tokens: int, rounds: int, others: Sequence[tuple[Blocks, Blocks]] = ()
) -> list[ResultRow]:
    """Return TFLOP/s of causal attention by flex with our blocks and warps, Inductor's, and others.

    Where the operator is not compiled backward (torch before 2.13), backward has a forward pass in it.
    """
    kernels = {"ours": FlexKernel(), "Inductor's": FlexKernel(device_blocks=False)}
    for fwd, bwd in others:
        options: dict[str, Any] = {**make_block_options({"fwd": fwd, "bwd": bwd})}
        kernels[f"{fwd}; {bwd}"] = FlexKernel(**options)
    refused: dict[str, dict[str, Any]] = {}
    ranks: dict[str, ProductionPass] = {}
    for name, kernel in kernels.items():
        try:
            ranks[name] = ProductionPass(shape, kernel, Causal(), tokens)
            seconds(ranks[name].backward, shape.device)
        except Exception as error:  # Triton's, for more shared memory than there is, come through Inductor
            ranks.pop(name, None)
            refused[name] = {"refused": " ".join(str(error).split())[:200]}
    pairs = max((rank.pairs for rank in ranks.values()), default=0)
    works = [{name: getattr(rank, way) for name, rank in ranks.items()} for way in ("forward", "backward")]
    rates = measure_rates(shape, pairs, works, rounds) | refused
    return [ResultRow({"head_dim": shape.head_dim, "blocks": name}, rates[name]) for name in kernels]


def sdpa(shape: Shape, tokens: int, causal: bool) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return the forward and the backward pass of torch's attention over a whole sequence."""
    q = shape.tensor(shape.heads, tokens).requires_grad_()
    k, v = (shape.tensor(shape.kv_heads, tokens).requires_grad_() for _ in range(2))
    grouped = shape.heads != shape.kv_heads

    def forward() -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    out = forward()
    grad = torch.randn_like(out)
    return forward, lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)


def ring_row(shape: Shape, tokens: int, ring_size: int, kernel_name: str, rounds: int) -> ResultRow:
    """Time the hops of a causal zigzag ring's slowest rank against one device's attention / ring size.

    Ranks run one after the other on this device, without transfers: the difference is the cost of smaller
    tiles, merges and launches. Of larger rings the first, the middle and the last rank are looked at.
    """
    kernel, pattern = get_kernel(kernel_name, shape.device), Causal()
    layout = make_layout("zigzag", tokens=tokens, ring_size=ring_size, pattern=pattern)
    plan = build_plan(pattern, layout, query_heads=shape.heads, kv_heads=shape.kv_heads)
    works: dict[str, Callable[[], object]] = {}
    for rank in sorted({0, ring_size // 2, ring_size - 1}):
        hops = make_rank(shape, plan.rank(rank).classes, layout.local_tokens)
        works[f"rank {rank}"] = partial(both, kernel, hops)
    forward, backward = sdpa(shape, tokens, True)
    works[BASE] = lambda: (forward(), backward())
    if shape.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = medians(works, shape.device, rounds)
    whole, slowest = times.pop(BASE), max(times.values())
    results = {"slowest_rank_s": round(slowest, 5), "one_device_s": round(whole, 5)}
    results["efficiency"] = round(whole / ring_size / slowest, 3)
    if shape.device == "cuda":
        results["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return ResultRow(
        {"ring_size": ring_size, "kernel": kernel_name, "local_tokens": layout.local_tokens}, results
    )


def merge_rate(shape: Shape, tokens: int, rounds: int) -> ResultRow:
    """Time one merge of as many rows: bytes that it must move (part read, accumulator read and written)."""
    part = shape.tensor(shape.heads, tokens)
    out = torch.zeros_like(part, dtype=get_accumulator_dtype(part.dtype))
    lse, part_lse = (out.new_zeros(out.shape[:-1]) for _ in range(2))
    taken = medians({"merge": lambda: merge_(out, lse, part, part_lse)}, shape.device, rounds)["merge"]
    least = part.nbytes + 2 * out.nbytes + 3 * lse.nbytes
    rate = round(least / taken / 1e9, 1)
    results = {"median_s": round(taken, 6), "element_bytes": least / part.numel(), "moved_gb_per_s": rate}
    return ResultRow({"tokens": tokens}, results)


def host_seconds(shape: Shape, kernel_name: str, tokens: int = 1024, times: int = 50) -> ResultRow:
    """Measure processor time of issuing a hop's kernel and merge, where nothing waits for the device."""
    kernel = get_kernel(kernel_name, shape.device)
    layout = make_layout("zigzag", tokens=4 * tokens, ring_size=4, pattern=Causal())
    plan = build_plan(Causal(), layout, query_heads=shape.heads, kv_heads=shape.kv_heads)
    rank = make_rank(shape, plan.rank(1).classes, layout.local_tokens)
    results = {}
    for name, work in (("forward", attend), ("backward", differentiate)):
        work(kernel, rank)
        begin = time.process_time()
        for _ in range(times):
            work(kernel, rank)
        results[f"{name}_us"] = round((time.process_time() - begin) / times / len(rank.hops) * 1e6)
        if shape.device == "cuda":
            torch.cuda.synchronize()
    return ResultRow({"kernel": kernel_name}, results)
