"""Run the passes of one virtual rank over its shards, and measure them.

Owns the order in which a real rank would allocate: q, k, v, the forward pass, then grad_out, then the
backward pass, with one set of message buffers for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_ring.runtime.buffers import Buffers
from ds_ring.runtime.kernels import Kernel
from ds_ring.runtime.kernels.cpu import drop_kept
from ds_ring.runtime.messages import TokenRange
from ds_ring.runtime.ring_pass import RingPass
from ds_ring.runtime.trace import MemoryPeak, Trace, measure_cpu_memory
from ds_ring.schedule.plan import Plan
from ds_ring.simulation.exchange import GradientSums, VirtualExchange
from ds_ring.simulation.profile import RankMemory, TensorBytes, profile_of
from ds_ring.simulation.source import Source, shard_of


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
            exchange = VirtualExchange(self.source, self.plan.layout, self.sums)
        trace = None
        if self.measure or self.keep_trace:
            # Processor time excludes what other processes took; with several threads it would count each.
            trace = Trace(ring_rank, processor_time=torch.get_num_threads() == 1)
        plan = self.plan.rank(ring_rank)  # made outside of what is measured; it holds no tensor
        ring = RingPass(
            plan, self.kernel, exchange, self.scale, chunk_bytes=self.chunk_bytes,
            buffers=Buffers(), on_gradients_final=self._adder(ring_rank), trace=trace,
        )  # fmt: skip
        drop_kept()  # of the rank before: a real one has its own
        with _measured(self.measure) as peak:
            q, k, v = (self._shard(name, ring_rank) for name in ("q", "k", "v"))
            out, lse = ring.forward(q, k, v)
            forward = exchange.counters.bytes_sent if exchange is not None else 0
            dq = None
            if self.sums is not None:
                dq, *_ = ring.backward(self._shard("grad_out", ring_rank), q, k, v, out, lse)
        total = exchange.counters.bytes_sent if exchange is not None else 0
        memory = None
        if trace is not None and self.measure:
            memory = profile_of(
                peak, trace, TensorBytes(q.nbytes, k.nbytes + v.nbytes, out.nbytes, lse.nbytes)
            )
        kept = trace if self.keep_trace else None
        return RankResult(out, lse, dq, BytesSent(forward, total - forward), memory, kept)

    def _shard(self, name: str, ring_rank: int) -> Tensor:
        return shard_of(self.source, self.plan.layout, name, ring_rank)

    def _adder(self, ring_rank: int) -> Callable[[slice, Tensor, Tensor], None] | None:
        """Return what adds a rank's own dK and dV to the sums; see `RingPass.on_gradients_final`."""
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


@contextmanager
def _measured(wanted: bool) -> Iterator[MemoryPeak]:
    if not wanted:
        yield MemoryPeak()
        return
    with measure_cpu_memory() as peak:
        yield peak
