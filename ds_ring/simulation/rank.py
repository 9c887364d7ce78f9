"""Run the passes of one virtual rank over its shards, and measure them.

A virtual rank allocates in the order of a real one: q, k, v, the forward pass, then grad_out, then the
backward pass, with one set of message buffers for both. Legend: B batch, H query heads, G K/V heads, T global
tokens, D head dim (E of values and outputs), n tokens at some positions.

[Note: one rank at a time]
Keys and values that arrive are a copy of what the origin has, so they are filled in from the source of all
tokens. Gradients that arrive are sums of what other ranks have found, which this rank only adds its own to
and sends on: here they arrive as zeros, and every gradient that is sent is added to the sums of all ranks at
the tokens that it belongs to. A rank's own contribution leaves it exactly once, to the next reader or to the
owner, or stays in the accumulators of its own shard, which are added at the end of a head chunk
(`RingPass.on_gradients_final`). So each is counted once, and no two ranks have to be alive together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ds_ring.comm.messages import (
    BatchSizes,
    Counters,
    Label,
    Message,
    TokenRange,
    check_messages,
    compute_batch_sizes,
)
from ds_ring.comm.streams import HOST, Streams
from ds_ring.kernels.interface import drop_cached
from ds_ring.kernels.select import Kernel
from ds_ring.masks.slots import IntArray, progressions_at
from ds_ring.measure.memory import MemoryPeak, measure_cpu_memory
from ds_ring.measure.trace import Trace
from ds_ring.ring.pool import Buffers
from ds_ring.ring.ring_pass import RingPass
from ds_ring.schedule.layout import Layout, expand_runs
from ds_ring.schedule.plan import Plan

FEW_RUNS = 16  # up to here slices are copied, beyond an index is used


class GlobalSizes(NamedTuple):
    """Hold global sizes of q [B, H, T, D], k [B, G, T, D] and v [B, G, T, E]."""

    batch: int
    query_heads: int
    kv_heads: int
    tokens: int
    head_dim: int
    dtype: torch.dtype
    v_head_dim: int | None = None  # E; None is D

    def width(self, name: str) -> int:
        """Return the head dim of "q", "k" (D), "v", "out" or "grad_out" (E)."""
        of_values = None if name in ("q", "k") else self.v_head_dim
        return self.head_dim if of_values is None else of_values

    def heads(self, name: str) -> int:
        """Return the heads of "q", "grad_out" (H), "k" or "v" (G)."""
        return self.kv_heads if name in ("k", "v") else self.query_heads


class Source(Protocol):
    """Read global q, k, v and grad_out at any positions; all in one dtype, on the CPU."""

    @property
    def geometry(self) -> GlobalSizes:
        """Return the sizes."""

    def fill(self, name: str, heads: slice, runs: IntArray, out: Tensor) -> None:
        """Write tokens of "q", "k", "v" or "grad_out" into `out`.

        Args:
            name: which tensor.
            heads: of all that it has.
            runs: positions, int64 [m, 3] of (start, step, length).
            out: [B, heads, n, D or E] for the n positions one after the other; any strides.
        """


class TensorSource:
    """Read from global tensors, which may be mapped from files (`torch.from_file`, `numpy.memmap`).

    Args:
        q: [B, H, T, D].
        k, v: [B, G, T, D] and [B, G, T, E].
        grad_out: [B, H, T, E]; None where no backward pass is wanted.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor | None = None) -> None:
        self._tensors = {"q": q.detach(), "k": k.detach(), "v": v.detach()}
        if grad_out is not None:
            self._tensors["grad_out"] = grad_out.detach()
        batch, heads, tokens, head_dim = q.shape
        self.geometry = GlobalSizes(batch, heads, k.shape[1], tokens, head_dim, q.dtype, v.shape[3])

    def fill(self, name: str, heads: slice, runs: IntArray, out: Tensor) -> None:
        take_rows(self._tensors[name][:, heads], runs, out)


def read_shard(source: Source, layout: Layout, name: str, ring_rank: int) -> Tensor:
    """Return a rank's tokens, zeros in padding slots, as `shard_sequence` cuts them.

    Returns:
        [B, H, S, D or E], for "k" and "v" [B, G, S, D or E].
    """
    sizes = source.geometry
    shape = (sizes.batch, sizes.heads(name), layout.local_tokens, sizes.width(name))
    x = torch.zeros(shape, dtype=sizes.dtype, device="cpu")
    valid = layout.valid_tokens(ring_rank)
    if valid:
        source.fill(name, slice(None), layout.runs(ring_rank), x[:, :, :valid])
    return x


def take_rows(x: Tensor, runs: IntArray, out: Tensor) -> None:
    """Copy tokens of x [B, h, T, ...] at `runs` into out [B, h, n, ...], without a temporary."""
    if len(runs) > FEW_RUNS:
        torch.index_select(x, 2, torch.from_numpy(expand_runs(runs)), out=out)
        return
    offset = 0
    for start, step, length in runs.tolist():
        there = x[:, :, start : start + (length - 1) * step + 1 : step]
        out[:, :, offset : offset + length].copy_(there)
        offset += length


def put_rows(x: Tensor, runs: IntArray, part: Tensor, *, add: bool = False) -> None:
    """Copy (or add) packed tokens part [B, h, n, ...] to their positions in x [B, h, T, ...]."""
    if len(runs) > FEW_RUNS:
        index = torch.from_numpy(expand_runs(runs))
        (x.index_add_ if add else x.index_copy_)(2, index, part)
        return
    offset = 0
    for start, step, length in runs.tolist():
        there, piece = x[:, :, start : start + (length - 1) * step + 1 : step], part[:, :, offset:]
        (there.add_ if add else there.copy_)(piece[:, :, :length])
        offset += length


KEYS = ("K/V", "K", "V")  # messages whose contents the source has

# Takes gradients that leave a virtual rank: "dK" or "dV", whose tokens, their positions as runs (int64 [m, 3]
# of start, step, length), and the tensor [B, heads, n, D or E], which is used again after the call.
AddGradients = Callable[[str, TokenRange, IntArray, Tensor], None]


class GradientSums:
    """Sum dK and dV of all tokens over the ranks that were simulated.

    Args:
        geometry: of the global tensors.
        dtype: of the sums, float32 or float64.

    Attributes:
        dk, dv: [B, G, T, D] and [B, G, T, E], in the order of positions.
    """

    def __init__(self, geometry: GlobalSizes, dtype: torch.dtype) -> None:
        shape = (geometry.batch, geometry.kv_heads, geometry.tokens)
        self.dk, self.dv = (
            torch.zeros(*shape, geometry.width(name), dtype=dtype, device="cpu") for name in ("k", "v")
        )

    def add(self, what: str, tokens: TokenRange, runs: IntArray, part: Tensor) -> None:
        """Add gradients of some tokens; see `AddGradients`."""
        put_rows((self.dk if what == "dK" else self.dv)[:, tokens.heads], runs, part, add=True)


@dataclass
class VirtualWork:
    """Call `arrive` when a batch is waited for, once: so this takes no time of anything else."""

    arrive: Callable[[], None] | None  # fills the received tensors, collects the sent ones

    def wait(self) -> None:
        arrive, self.arrive = self.arrive, None
        if arrive is not None:
            arrive()


class VirtualRoute(NamedTuple):
    """The common properties of all batches of a kind: labels, and increments of the counters."""

    sends: tuple[Label, ...]
    receives: tuple[Label, ...]
    sizes: BatchSizes


class VirtualExchange:
    """The exchange of a ring pass without other processes; [Note: one rank at a time].

    Args:
        source: K and V of all tokens.
        layout: of the tokens.
        add: takes the gradients that are sent; None for a forward pass.
    """

    def __init__(self, source: Source, layout: Layout, add: AddGradients | None = None) -> None:
        self.source, self.layout, self.add = source, layout, add
        self.counters = Counters()

    def route(self, sends: Sequence[Message], receives: Sequence[Message]) -> VirtualRoute:
        """Return the common properties of all batches like this one.

        Raises:
            RingMismatchError: a message is not as planned, as in the real exchange.
        """
        check_messages(sends)
        check_messages(receives)
        to, of = (tuple(Label(*message[1:]) for message in side) for side in (sends, receives))
        return VirtualRoute(to, of, compute_batch_sizes(sends, receives))

    def start(
        self, route: VirtualRoute, sent: Sequence[Tensor], received: Sequence[Tensor], hop: int | None = None
    ) -> VirtualWork:
        """Return a batch that is filled and collected when it is waited for."""
        self.counters.count(route.sizes)
        sends, receives = (
            [Message(tensor, *label) for tensor, label in zip(tensors, labels, strict=True)]
            for tensors, labels in ((sent, route.sends), (received, route.receives))
        )
        return VirtualWork(partial(self._arrive, sends, receives))

    def streams(self, tensor: Tensor) -> Streams:
        """Return none to order: nothing travels."""
        return HOST

    def _arrive(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        for message in sends:
            # K and V that are sent need no copy: the reader looks them up in the source itself.
            if message.what not in KEYS:
                assert self.add is not None, "gradients in a forward pass"
                for what, part in self._parts(message):
                    self.add(what, *self._find_tokens(message), part)
        for message in receives:
            if message.what in KEYS:
                self.look_up(message)
            else:
                # Another rank's sum would arrive here; it is counted where that rank sends it.
                message.tensor.zero_()

    def look_up(self, message: Message) -> None:
        """Fill a message with the keys and values of its tokens."""
        tokens, runs = self._find_tokens(message)
        for what, part in self._parts(message):
            self.source.fill(what.lower(), tokens.heads, runs, part)

    def _parts(self, message: Message) -> list[tuple[str, Tensor]]:
        """Return the names and the tensors [B, heads, n, D or E] of a message: of both, or of one of them."""
        names = message.what.split("/")
        if len(names) == 1:
            return [(names[0], message.tensor.permute(1, 2, 0, 3))]
        head_dim = self.source.geometry.head_dim
        both = message.tensor.permute(1, 2, 0, 3).tensor_split((head_dim,), dim=-1)
        return list(zip(names, both, strict=True))

    def _find_tokens(self, message: Message) -> tuple[TokenRange, IntArray]:
        tokens = message.tokens
        assert tokens is not None, "a message of a pass says what it carries"
        return tokens, progressions_at(self.layout.runs(tokens.origin), tokens.slots)


class StepPeak(NamedTuple):
    """Hold tensor memory of one rank at the peak of one step of a pass, bytes.

    Attributes:
        phase: "forward" or "backward".
        step: number of the step in its phase.
        hop: whose attention is computed.
        q, kv: shards of q, and of k and v together.
        in_flight: memory of messages: tokens of other shards, in use, in flight, or kept to send on.
        accumulators: float32 sums of low-precision results.
        out, lse: results of the forward pass.
        grad_out, gradients: of the backward pass; gradients are dq, dk and dv together.
        workspace: additional memory of the kernel, the merge and the packing.
        total: the sum, as the profiler counted it.
    """

    phase: str
    step: int
    hop: int
    q: int
    kv: int
    in_flight: int
    accumulators: int
    out: int
    lse: int
    grad_out: int
    gradients: int
    workspace: int
    total: int


COMPONENTS = StepPeak._fields[3:-1]


@dataclass(frozen=True)
class RankMemory:
    """Hold tensor memory of one virtual rank: its shards, both passes, and its results.

    Attributes:
        peak_bytes: the most at any time.
        steps: the profile.
    """

    peak_bytes: int
    steps: tuple[StepPeak, ...]

    @property
    def at_peak(self) -> StepPeak:
        """Return the step that needs most."""
        return max(self.steps, key=lambda step: step.total)

    @property
    def components(self) -> dict[str, int]:
        """Return bytes of each component in the step that needs most."""
        return {name: getattr(self.at_peak, name) for name in COMPONENTS}


class TensorBytes(NamedTuple):
    """Hold bytes of the tensors that live for a whole phase."""

    q: int
    kv: int
    out: int
    lse: int


def make_profile(peak: MemoryPeak, trace: Trace, sizes: TensorBytes) -> RankMemory:
    """Return the profile of a measured pass.

    Args:
        peak: measured around the shards, the pass and its results.
        trace: of that pass.
        sizes: of the rank's tensors; grad_out is as large as out, gradients are as large as q, k and v.
    """
    times = np.array([level.time_ns for level in peak.levels])
    live = np.array([level.live_bytes for level in peak.levels])
    # Every step begins by posting its messages, if only none.
    starts = [number for number, span in enumerate(trace.spans) if span.what == "send"]
    steps = []
    for start, end in pairwise([*starts, len(trace.spans)]):
        # The level before a step still holds at its start: it counts, too.
        low, high = np.searchsorted(times, [peak.spans[start][0], peak.spans[end - 1][1]], side="right")
        total = int(live[max(low - 1, 0) : high].max()) if high else 0
        spans = trace.spans[start:end]
        in_flight = max(span.buffers_bytes for span in spans)
        accumulators = max(span.accumulators_bytes for span in spans)
        back = spans[0].phase == "backward"
        grad_out, gradients = (sizes.out, sizes.q + sizes.kv) if back else (0, 0)
        parts = [sizes.q, sizes.kv, in_flight, accumulators, sizes.out, sizes.lse, grad_out, gradients]
        # What the profiler saw beyond the known tensors is the workspace of kernel, merge and packing.
        workspace = total - sum(parts)
        of_step = (spans[0].phase, spans[0].step, spans[0].hop - 1)
        steps.append(StepPeak._make((*of_step, *parts, workspace, total)))
    return RankMemory(peak.peak_bytes, tuple(steps))


class BytesSent(NamedTuple):
    """Count payload bytes that leave a rank, as `Exchange.counters` does."""

    forward: int
    backward: int


class RankResult(NamedTuple):
    """Hold a virtual rank's local results, padding included: out, dq [B, H, S, D], lse [B, H, S]."""

    out: Tensor
    lse: Tensor
    dq: Tensor | None
    bytes_sent: BytesSent
    memory: RankMemory | None
    trace: Trace | None


@dataclass(frozen=True)
class VirtualRanks:
    """Run ranks one at a time; the attributes are what all of them share."""

    source: Source  # all tokens
    plan: Plan  # of all ranks
    kernel: Kernel  # computes
    scale: float  # of the scores
    chunk_bytes: int  # see [Note: head chunks]
    sums: GradientSums | None  # collects dK and dV; None for the forward pass alone
    measure: bool  # count memory
    keep_trace: bool = False  # return what happened when

    def run(self, ring_rank: int) -> RankResult:
        """Run the passes of one rank."""
        exchange = None
        if self.plan.ring_size > 1:
            add = None if self.sums is None else self.sums.add
            exchange = VirtualExchange(self.source, self.plan.layout, add)
        trace = None
        if self.measure or self.keep_trace:
            # Processor time excludes what other processes took; with several threads it would count each.
            trace = Trace(processor_time=torch.get_num_threads() == 1)
        shard = partial(read_shard, self.source, self.plan.layout, ring_rank=ring_rank)
        plan = self.plan.rank(ring_rank)  # made outside of the measured block; it holds no tensor
        ring = RingPass(
            plan, self.kernel, exchange, self.scale, chunk_bytes=self.chunk_bytes,
            buffers=Buffers(), on_gradients_final=self._adder(ring_rank), observer=trace,
        )  # fmt: skip
        drop_cached(self.kernel)  # of the rank before: a real one has its own
        with measure_cpu_memory() if self.measure else nullcontext(MemoryPeak()) as peak:
            q, k, v = (shard(name) for name in ("q", "k", "v"))
            out, lse = ring.forward(q, k, v)
            forward = exchange.counters.bytes_sent if exchange is not None else 0
            dq = None
            if self.sums is not None:
                dq, *_ = ring.backward(shard("grad_out"), q, k, v, out, lse)
        total = exchange.counters.bytes_sent if exchange is not None else 0
        memory = None
        if trace is not None and self.measure:
            sizes = TensorBytes(q.nbytes, k.nbytes + v.nbytes, out.nbytes, lse.nbytes)
            memory = make_profile(peak, trace, sizes)
        trace_or_none = trace if self.keep_trace else None
        return RankResult(out, lse, dq, BytesSent(forward, total - forward), memory, trace_or_none)

    def _adder(self, ring_rank: int) -> Callable[[slice, Tensor, Tensor], None] | None:
        """Return what adds a rank's own dK and dV to the sums: `RingPass.on_gradients_final`."""
        sums, layout = self.sums, self.plan.layout
        if sums is None:
            return None
        runs, valid = layout.runs(ring_rank), layout.valid_tokens(ring_rank)

        def on_gradients_final(heads: slice, dk: Tensor, dv: Tensor) -> None:
            if valid:
                tokens = TokenRange(ring_rank, np.array([[0, valid]]), heads)
                sums.add("dK", tokens, runs, dk[:, :, :valid])
                sums.add("dV", tokens, runs, dv[:, :, :valid])

        return on_gradients_final
