"""Simulate P ranks in one process, one after the other, with the ring pass that real ranks run.

Owns the public call, its argument checks and its result. The plan, the
ring pass, the kernel, the buffers and the merge are those of real ranks, so memory and bytes are measured,
not computed by a formula; only the exchange looks up the tokens that would arrive (`simulation/rank.py`).

A simulation is compared with attention of some rows in float64 by the definition. It knows nothing of tiles,
plans or kernels: it evaluates the pattern for every pair (`Pattern.multiplicity`).

Legend: n rows, T tokens, D head dim.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_ring.errors import (
    RingConfigError,
    RingError,
    RingLayoutError,
    RingPatternError,
    RingShapeError,
    check_bool,
    check_whole_number,
    shown,
)
from ds_ring.kernels.select import get_kernel
from ds_ring.limits import MAX_TOKENS
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.slots import IntArray
from ds_ring.measure.trace import Trace
from ds_ring.ops.checks import check_heads, check_operand, check_tensors
from ds_ring.ops.options import Options
from ds_ring.plugin import PASSES, load
from ds_ring.ring.merge import get_accumulator_dtype
from ds_ring.schedule.layout import Layout
from ds_ring.schedule.lowering import stage_shards
from ds_ring.schedule.plan import Plan, build_plan
from ds_ring.simulation.generate import GeneratedSource
from ds_ring.simulation.rank import (
    BytesSent,
    GlobalSizes,
    GradientSums,
    RankMemory,
    RankResult,
    Source,
    StepPeak,
    TensorSource,
    VirtualRanks,
    put_rows,
)

__all__ = [
    "BytesSent",
    "GeneratedSource",
    "RankMemory",
    "SimulationOptions",
    "SimulationResult",
    "Source",
    "StepPeak",
    "simulate",
]

PROGRESS_AFTER_S = 2.0
MAX_THREADS = 1024


@dataclass(frozen=True)
class SimulationResult:
    """Hold what all virtual ranks found, in the order of positions, padding stripped.

    Attributes:
        out: [B, H, T, D], in q's dtype. NaN at the tokens of ranks that were not simulated.
        lse: [B, H, T] natural log, float32 (float64 for float64 inputs); NaN likewise.
        memory: by ring rank, tensor memory; empty without `measure_memory`.
        bytes_sent: by ring rank, payload bytes that would leave it.
        dq: [B, H, T, D] in q's dtype, NaN likewise; None without grad_out.
        dk, dv: [B, G, T, D] in k's dtype; None without grad_out, or where not all ranks were simulated, since
            every rank may add to them.
        traces: by ring rank, what happened when; empty without `trace`.
    """

    out: Tensor
    lse: Tensor
    memory: dict[int, RankMemory]
    bytes_sent: dict[int, BytesSent]
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    traces: dict[int, Trace] = field(default_factory=dict, repr=False)

    @property
    def peak_bytes(self) -> int:
        """Return the memory of the rank that needs most; 0 where it was not measured."""
        return max((memory.peak_bytes for memory in self.memory.values()), default=0)


@dataclass(frozen=True)
class SimulationOptions:
    """Describe how virtual ranks run; none of it changes results by more than rounding.

    Attributes:
        kernel_options: of the kernel, by name; None for its defaults.
        chunk_bytes: least size of K, and of V, of the heads that travel together; None: as real CPU ranks.
        prune, gradient_payload: as in the JSON.
        ranks_per_node: neighbours on the ring that share a node, a divisor of the ring size: shards then
            travel on two levels where that sends less between nodes, as with `RingMesh.from_world`.
        stage_bytes: most bytes of K and V of one computation, as in the JSON; 0: hop by hop.
        transport: as in the JSON, "ring" or one that runs a plan of its own as the ring does.
        threads: of a virtual rank's kernel. None: one while memory is measured, else all threads of torch.
        progress: a bar on stderr once two seconds have passed.

    Raises:
        RingConfigError: a value that the option does not take.
    """

    kernel_options: Mapping[str, Any] | None = None
    chunk_bytes: int | None = None
    prune: bool = True
    gradient_payload: str = "float32"
    ranks_per_node: int | None = None
    stage_bytes: int | Literal["auto"] = 0
    transport: str = "ring"
    threads: int | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        for name in ("prune", "progress"):
            check_bool(getattr(self, name), name, RingConfigError)
        for name, most in (("threads", MAX_THREADS), ("chunk_bytes", MAX_TOKENS)):
            if getattr(self, name) is not None:
                object.__setattr__(
                    self, name, check_whole_number(getattr(self, name), name, RingConfigError, most)
                )
        kernel_options = {} if self.kernel_options is None else self.kernel_options
        if not isinstance(kernel_options, Mapping) or not all(
            isinstance(name, str) for name in kernel_options
        ):
            got = shown(self.kernel_options)
            raise RingConfigError(f"kernel_options: expected a dict of options by name, got {got}")

    def make_pass_options(self, scale: float | None, kernel: str) -> Options:
        """Return the options of a real call, checked."""
        known = [name for name, row in PASSES.items() if name == "ring" or row.plans is not None]
        if self.transport not in known:  # before options that have no effect on it
            expected = f"one of {', '.join(known)}"
            raise RingConfigError.wrong("transport", expected, self.transport, "use one of these")
        return Options(
            scale=scale, kernel=kernel, kernel_options=dict(self.kernel_options or {}),
            chunk_bytes=self.chunk_bytes, gradient_payload=self.gradient_payload,
            stage_bytes=self.stage_bytes, transport=self.transport,
        )  # fmt: skip


@torch.no_grad()
def simulate(
    q: Tensor | Source,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    pattern: Pattern,
    layout: Layout,
    grad_out: Tensor | bool | None = None,
    scale: float | None = None,
    kernel: str = "auto",
    ranks: Iterable[int] | None = None,
    measure_memory: bool = True,
    trace: bool = False,
    options: SimulationOptions | None = None,
) -> SimulationResult:
    """Run ring attention of a whole sequence with all its ranks in this process, one at a time.

    Args:
        q: global queries [B, H, T, D] on the CPU, in memory or mapped from a file; or a `Source`, which has k
            and v as well (`GeneratedSource` for more tokens than memory holds).
        k, v: global keys [B, G, T, D] and values [B, G, T, E]; H a multiple of G.
        pattern, layout: the pairs of positions that attend, and the rank of each position.
        grad_out: gradient of the output [B, H, T, E], for the backward pass; with a `Source` True.
        scale: of the scores; None is 1 / sqrt(D).
        kernel: "auto", "cpu" or "reference".
        ranks: ring ranks to simulate, None for all.
        measure_memory: count tensor memory (slower).
        trace: record the sends, computations and waits of every rank with their times.
        options: `SimulationOptions`; None for the defaults.

    Raises:
        RingShapeError, RingLayoutError, RingPatternError: tensors, layout and pattern that do not fit.
        RingConfigError: unknown kernel, scale, ranks or options.
    """
    source = _checked_source(q, k, v, grad_out, pattern, layout)
    sizes, wanted = source.geometry, _check_ranks(ranks, layout.ring_size)
    settings = options if options is not None else SimulationOptions()
    pass_options = settings.make_pass_options(scale, kernel)
    for name, flag in {"measure_memory": measure_memory, "trace": trace}.items():
        check_bool(flag, name, RingConfigError)
    threads = settings.threads
    if threads is None:  # each thread of a kernel takes workspace, and a real rank on the CPU has one
        threads = 1 if measure_memory else torch.get_num_threads()
    backward = grad_out is not None and grad_out is not False
    job = VirtualRanks(
        source,
        _make_plan(pattern, layout, sizes, settings, pass_options),
        get_kernel(pass_options.kernel, "cpu", pass_options.kernel_pairs, pass_options.block_size),
        pass_options.scale if pass_options.scale is not None else 1.0 / math.sqrt(sizes.head_dim),
        pass_options.chunk_bytes_on("cpu", layout.ring_size),
        GradientSums(sizes, get_accumulator_dtype(sizes.dtype)) if backward else None,
        measure_memory,
        trace,
    )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _collected(job, wanted, settings.progress)
    finally:
        torch.set_num_threads(before)


def _show_progress(ranks: list[int]) -> Iterable[int]:
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        return ranks
    # a bar below another one disappears at its end
    return tqdm(ranks, desc="ranks", unit="rank", delay=PROGRESS_AFTER_S, leave=None)


def _make_plan(
    pattern: Pattern, layout: Layout, sizes: GlobalSizes, settings: SimulationOptions, options: Options
) -> Plan:
    """Return the plan that the virtual ranks run."""
    width = sizes.width("k") + sizes.width("v")
    token_bytes = sizes.batch * sizes.kv_heads * width * sizes.dtype.itemsize
    row, size, stages = options.transport_spec, layout.ring_size, None
    if row.plans is None:
        shard_bytes = token_bytes * layout.local_tokens
        stages = stage_shards(options.stage_bytes, "cpu", size, None, shard_bytes)
    plan = build_plan(
        pattern, layout, query_heads=sizes.query_heads, kv_heads=sizes.kv_heads, prune=settings.prune,
        gradient_payload=options.gradient_payload,
        ranks_per_node=settings.ranks_per_node, stage_shards=stages,
    )  # fmt: skip
    if row.plans is None:
        return plan
    direct: Plan = load(row.plans)(plan, settings.ranks_per_node, options.stage_bytes or "auto", token_bytes)
    return direct


def _collected(job: VirtualRanks, ranks: list[int], progress: bool) -> SimulationResult:
    """Run all ranks one after the other and put their results together."""
    sizes, layout = job.source.geometry, job.plan.layout
    shape, nan = (sizes.batch, sizes.query_heads, sizes.tokens), torch.nan
    out = torch.full((*shape, sizes.width("out")), nan, dtype=sizes.dtype, device="cpu")
    lse = torch.full(shape, nan, dtype=get_accumulator_dtype(sizes.dtype), device="cpu")
    dq = (
        None
        if job.sums is None
        else torch.full((*shape, sizes.head_dim), nan, dtype=sizes.dtype, device="cpu")
    )
    memory: dict[int, RankMemory] = {}
    bytes_sent: dict[int, BytesSent] = {}
    traces: dict[int, Trace] = {}
    for rank in _show_progress(ranks) if progress and sys.stderr.isatty() else ranks:
        result: RankResult = job.run(rank)
        valid = layout.valid_tokens(rank)
        for whole_tensor, part in ((out, result.out), (lse, result.lse), (dq, result.dq)):
            if whole_tensor is not None and part is not None and valid:
                put_rows(whole_tensor, layout.runs(rank), part[:, :, :valid])
        bytes_sent[rank] = result.bytes_sent
        if result.memory is not None:
            memory[rank] = result.memory
        if result.trace is not None:
            traces[rank] = result.trace
    dk = dv = None
    if job.sums is not None and len(ranks) == layout.ring_size:  # each rank may add to any token
        dk, dv = job.sums.dk.to(sizes.dtype), job.sums.dv.to(sizes.dtype)
    return SimulationResult(out, lse, memory, bytes_sent, dq, dk, dv, traces)


def _checked_source(
    q: Tensor | Source, k: Any, v: Any, grad_out: Any, pattern: Pattern, layout: Layout
) -> Source:
    """Return the one source of all tensors, which pattern and layout fit."""
    checks: tuple[tuple[str, object, type, type[RingError], str], ...] = (
        ("pattern", pattern, Pattern, RingPatternError, "use ds_ring.Causal() or ds_ring.Full()"),
        ("layout", layout, Layout, RingLayoutError, "use make_layout(name, tokens=T, ring_size=P)"),
    )
    for name, value, kind, error, advice in checks:
        if not isinstance(value, kind):
            raise error(f"{name}: expected a {name}, got {shown(value)}; {advice}")
    source = _make_source(q, k, v, grad_out)
    sizes = source.geometry
    if sizes.tokens != layout.tokens:
        raise RingShapeError.wrong(
            "layout", f"{sizes.tokens} tokens, as q has", layout.tokens, "pass global tensors"
        )
    pattern.check_unchanged()
    pattern.check(sizes.tokens, sizes.batch, sizes.query_heads, "cpu")
    return source


def _make_source(
    q: Tensor | Source, k: Tensor | None, v: Tensor | None, grad_out: Tensor | bool | None
) -> Source:
    """Return one checked source of all tensors."""
    if not isinstance(q, Tensor) and hasattr(q, "fill") and hasattr(q, "geometry"):
        if k is not None or v is not None or isinstance(grad_out, Tensor):
            raise RingShapeError("simulate: expected a source alone, got tensors, too; use grad_out=True")
        return q
    for name, x in (("q", q), ("k", k), ("v", v), *([] if grad_out is None else [("grad_out", grad_out)])):
        check_operand(name, x)
        assert isinstance(x, Tensor)
        if x.device.type != "cpu":
            raise RingShapeError(f"{name}: expected a tensor on the CPU, got {x.device}; call .cpu() first")
    assert isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
    check_tensors(q, k, v)
    check_heads(q.shape[1], k.shape[1], 1)
    if q.shape[2] != k.shape[2]:
        raise RingShapeError(f"expected q and k of one length, got {q.shape[2]} and {k.shape[2]} tokens")
    shape = (*q.shape[:3], v.shape[3])
    if isinstance(grad_out, Tensor) and (grad_out.shape, grad_out.dtype) != (shape, q.dtype):
        raise RingShapeError(
            f"grad_out: expected {shape} of {q.dtype}, got {tuple(grad_out.shape)} of {grad_out.dtype}"
        )
    return TensorSource(q, k, v, grad_out if isinstance(grad_out, Tensor) else None)


def _check_ranks(ranks: Iterable[int] | None, ring_size: int) -> list[int]:
    """Return the ranks to simulate."""
    if ranks is None:
        return list(range(ring_size))
    if not isinstance(ranks, Iterable) or isinstance(ranks, (str, bytes)):
        raise RingConfigError(f"ranks: expected a list of ring ranks, got {shown(ranks)}")
    # One more than there can be: an endless iterable is refused, too.
    wanted = list(itertools.islice(ranks, ring_size + 1))
    fits = all(isinstance(rank, int) and not isinstance(rank, bool) for rank in wanted)
    if not fits or not set(wanted) <= set(range(ring_size)) or len(set(wanted)) < len(wanted):
        got = shown(wanted).removeprefix("list ")
        raise RingConfigError(f"ranks: expected each of 0 to {ring_size - 1} at most once, got {got}")
    return wanted


PAIRS_AT_ONCE = 1 << 22  # of one head: 32 MiB for each float64 matrix of them


class Exact(NamedTuple):
    """Hold exact attention of n queries, float64: out, dq [B, H, n, D], lse [B, H, n].

    dk, dv [B, G, T, D] are those of a loss over these rows alone; None, like dq, without a gradient.
    """

    out: Tensor
    lse: Tensor
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None


def sampled_rows(tokens: int, count: int, seed: int = 0) -> IntArray:
    """Return `count` positions in ascending order, the first and last included; all if there are no more."""
    if count >= tokens:
        return np.arange(tokens)
    drawn = np.random.default_rng(seed).choice(tokens, size=count, replace=False)
    return np.unique([0, tokens - 1, *drawn[2:].tolist()])


def exact_rows(source: Source, pattern: Pattern, rows: IntArray, scale: float, backward: bool) -> Exact:
    """Return exact attention of the queries at `rows` over all tokens, computed head by head.

    Args:
        source: q, k, v, and grad_out for the backward pass.
        pattern: what attends to what.
        rows: positions of queries, int64 [n].
        scale: of the scores.
        backward: also the gradients.
    """
    sizes = source.geometry
    group, count = sizes.query_heads // sizes.kv_heads, len(rows)
    out = torch.zeros(
        sizes.batch, sizes.query_heads, count, sizes.width("out"), dtype=torch.float64, device="cpu"
    )
    lse = torch.full(out.shape[:-1], -torch.inf, dtype=torch.float64, device="cpu")
    dq = lse.new_zeros(*lse.shape, sizes.head_dim) if backward else None
    everything = (sizes.batch, sizes.kv_heads, sizes.tokens)
    dk, dv = (lse.new_zeros(*everything, sizes.width(name)) if backward else None for name in ("k", "v"))
    # Bounds the memory of the scores at every length.
    at_once = max(PAIRS_AT_ONCE // sizes.tokens, 1)
    for head in range(sizes.query_heads):
        shared = head // group
        k, v = (_read(source, name, shared, np.arange(sizes.tokens)) for name in ("k", "v"))
        for first in range(0, count, at_once):
            part = slice(first, first + at_once)
            q = _read(source, "q", head, rows[part])
            weights, lse[:, head, part] = _weights(pattern, q, k, rows[part], head, source, scale)
            out[:, head, part] = weights @ v
            if dq is not None and dk is not None and dv is not None:
                grad = _read(source, "grad_out", head, rows[part])
                delta = (grad * out[:, head, part]).sum(-1, keepdim=True)
                ds = weights * (grad @ v.mT - delta) * scale
                dq[:, head, part] = ds @ k
                dk[:, shared] += ds.mT @ q
                dv[:, shared] += weights.mT @ grad
    return Exact(out, lse, dq, dk, dv)


def _weights(
    pattern: Pattern, q: Tensor, k: Tensor, rows: IntArray, head: int, source: Source, scale: float
) -> tuple[Tensor, Tensor]:
    """Return softmax weights [B, n, T] and lse [B, n] of one head's rows."""
    sizes = source.geometry
    columns = np.arange(sizes.tokens)[None, :]
    counts = pattern.multiplicity(head, sizes.query_heads, sizes.kv_heads, rows[:, None], columns)
    scores = q @ k.mT
    scores.mul_(scale).add_(torch.from_numpy(counts).double().log_())
    lse = torch.logsumexp(scores, dim=-1)
    # A row that sees no key has lse -inf: clamped, its weights are 0 and not NaN.
    weights = scores.sub_(lse.clamp_min(torch.finfo(torch.float64).min).unsqueeze(-1)).exp_()
    return weights, lse


def _read(source: Source, name: str, head: int, positions: IntArray) -> Tensor:
    """Return one head at some positions, float64 [B, n, D]."""
    sizes = source.geometry
    x = torch.empty(sizes.batch, 1, len(positions), sizes.width(name), dtype=sizes.dtype, device="cpu")
    runs = np.stack([positions, np.ones_like(positions), np.ones_like(positions)], axis=1)
    source.fill(name, slice(head, head + 1), runs, x)
    return x[:, 0].double()
