"""Run the steps of a rank on tensors, forward and backward: the ring pass.

Owns what a step means for tensors. In which order steps come is `schedule/lowering.py`'s, what is computed
the kernel's, how it travels the exchange's, how parts add up `merge`'s. A new pattern, layout or kernel
changes nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ds_ring.runtime.buffers import Buffers
from ds_ring.runtime.chunks import BackwardChunk, Chunk, ForwardChunk, Queries, Totals
from ds_ring.runtime.host_heads import HeadStream
from ds_ring.runtime.host_memory import HostMemory
from ds_ring.runtime.kernels.interface import Kernel, views_of
from ds_ring.runtime.merge import accumulator_dtype
from ds_ring.runtime.messages import InFlight, Label, Message, Transport
from ds_ring.runtime.prepared import PreparedBatch, PreparedPass, PreparedPasses
from ds_ring.runtime.ring_buffers import RingBuffers
from ds_ring.runtime.trace import MessageSize, PostedBatch, Trace
from ds_ring.runtime.views import Pair, some_heads
from ds_ring.schedule.head_chunks import head_bytes
from ds_ring.schedule.lowering import lower_rank
from ds_ring.schedule.rank_plan import RankPlan
from ds_ring.schedule.steps import HeadChunk, Round, Schedule, Send
from ds_ring.schedule.workspace import FLOAT


@dataclass(frozen=True)
class RingPass:
    """Run both passes; hold what they need.

    Attributes:
        plan: this rank's part of the plan.
        kernel: computes one hop.
        exchange: moves payloads; None for a ring of one.
        scale: of the scores.
        overlap: False waits for each hop's messages before it computes (for comparison).
        chunk_bytes: heads go round in chunks whose K and V are each at least this large.
        buffers: memory for what travels.
        check: called with the hop and, by name, what was computed up to it; None if nobody wants to look.
        on_gradients_final: called with the K/V heads of a chunk and the own shard's dK and dV, with what
            other ranks have returned and before they are rounded; None if nobody wants to look.
        trace: notes what happened when; None for no trace, which costs nothing.
        host: where the backward pass finds q, k, v, out and lse; None: on the device.
        agreed: called once before the first payload is posted; raises where ranks differ. None if they have
            agreed already. See [Note: the header while the first hop computes].
        prepared: what passes of one exchange have found out for all passes of their shapes.
    """

    plan: RankPlan
    kernel: Kernel
    exchange: Transport | None
    scale: float
    overlap: bool = True
    chunk_bytes: int = 1 << 20
    buffers: Buffers = field(default_factory=Buffers)
    check: Callable[..., None] | None = None
    on_gradients_final: Callable[[slice, Tensor, Tensor], None] | None = None
    trace: Trace | None = None
    host: HostMemory | None = None
    agreed: Callable[[], None] | None = None
    prepared: PreparedPasses = field(default_factory=PreparedPasses, repr=False)

    @torch.no_grad()
    def forward(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return attention of the local queries over all ranks' keys.

        Args:
            q: [B, H, S, D], this rank's shard.
            k, v: [B, G, S, D] and [B, G, S, E], this rank's shard.
            sinks: [H], a logit for each query head that is in the softmax's denominator alone.

        Returns:
            out [B, H, S, E] in q's dtype, contiguous; lse [B, H, S], float32 (float64 for float64 inputs).
        """
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        lse = q.new_empty(q.shape[:-1], dtype=accumulator_dtype(q.dtype))

        def begin(chunk: HeadChunk) -> Chunk:
            # Heads are slices, so these are views: chunks read and write the caller's tensors.
            heads, kv = chunk.query_heads, chunk.kv_heads
            own = Pair(some_heads(k, kv), some_heads(v, kv))
            kernel = self.kernel.of_heads(heads)
            buffers = RingBuffers(chunk, self.buffers, prepared.kinds_of(chunk), views_of(kernel), own)
            here = some_heads(q, heads), some_heads(out, heads), some_heads(lse, heads)
            of_sinks = None if sinks is None else sinks[heads]
            return ForwardChunk(self, kernel, buffers, *here, of_sinks)

        schedule = self._schedule(k, v, backward=False)
        prepared = self.prepared.of(schedule, k, v)
        self._run(schedule, prepared, begin)
        return out, lse

    @torch.no_grad()
    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        grad_lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return the gradients of the local q, k, v.

        Args:
            grad_out: [B, H, S, E].
            q, k, v, out, lse: inputs and results of `forward`.
            grad_lse: [B, H, S]; None for 0.

        Returns:
            dq, dk, dv, contiguous, in the dtypes of q, k, v.
        """
        dq, dk, dv = (grad_out.new_empty(x.shape, dtype=x.dtype) for x in (q, k, v))
        schedule = self._schedule(k, v, backward=True)
        prepared = self.prepared.of(schedule, k, v)
        saved = HeadStream((q, k, v, out, lse), schedule.chunks, grad_out.device, self.host)

        def begin(chunk: HeadChunk) -> Chunk:
            heads, kv = chunk.query_heads, chunk.kv_heads
            q_here, k_here, v_here, out_here, lse_here = saved.of(chunk)
            of_lse = None if grad_lse is None else some_heads(grad_lse, heads)
            queries = Queries(some_heads(grad_out, heads), q_here, out_here, lse_here, of_lse)
            results = some_heads(dq, heads), some_heads(dk, kv), some_heads(dv, kv)
            totals = Totals(lse.dtype, results, self.trace)
            # What other ranks found for the own keys is added to the own shard's dK and dV.
            home = Pair(*totals.accumulators[1:])
            kernel, own = self.kernel.of_heads(heads), Pair(k_here, v_here)
            buffers = RingBuffers(chunk, self.buffers, prepared.kinds_of(chunk), views_of(kernel), own, home)
            return BackwardChunk(self, kernel, buffers, queries, totals)

        self._run(schedule, prepared, begin)
        return dq, dk, dv

    def _schedule(self, k: Tensor, v: Tensor, backward: bool) -> Schedule:
        if self.trace is not None:
            self.trace.begin("backward" if backward else "forward")
        # Bytes of one head in the smaller message; 0 on a ring of one, where chunks gain nothing, unless sums
        # stand in float32 beside the results, or heads come from the host.
        chunked = self.exchange is not None or k.element_size() < FLOAT or self.host is not None
        size = head_bytes(k, v) if chunked else 0
        return lower_rank(self.plan, backward=backward, head_bytes=size, chunk_bytes=self.chunk_bytes)

    def _run(self, schedule: Schedule, prepared: PreparedPass, begin: Callable[[HeadChunk], Chunk]) -> None:
        """Run a schedule, batch by batch; see `steps.py`'s [Note: batches]."""
        under_way: dict[int, Chunk] = {}
        agreed, trace, batches = self.agreed, self.trace, prepared.batches
        for number, hop, rounds in schedule.batches:
            if trace is not None:
                trace.enter("send", hop, self.buffers)
            sent: list[Tensor] = []
            received: list[Tensor] = []
            for index, steps in rounds:
                # Not earlier: a chunk takes memory only from the batch on in which it sets out.
                if index not in under_way:
                    under_way[index] = begin(schedule.chunks[index])
                if _arrive_and_collect(under_way[index], steps, sent, received):
                    del under_way[index]
            known = batches.get(number)
            if known is None:
                known = batches[number] = self._prepare(rounds, under_way, sent, received)
            if trace is not None:
                trace.batch = known.posted
            posting = known.route, sent, received, hop
            pending, mark = None, None
            if agreed is None:
                pending = self._post(*posting)
            else:
                mark = self._mark(sent, received)
            # What was posted is for the next hop; what is computed meanwhile is one hop behind.
            if trace is not None:
                trace.enter("compute", hop - 1, self.buffers)
            for index, steps in rounds:
                for step in steps.computed:
                    under_way[index].compute(step)
            if trace is not None:
                trace.enter("wait", hop, self.buffers)
            if agreed is not None:
                agreed()
                pending, agreed = self._post_behind(mark, *posting), None
            if pending is not None:
                pending.wait()
            del sent, received, pending, posting  # or buffers would live on while the next ones are made
        if trace is not None:
            trace.leave(self.buffers)

    # [Note: the header while the first hop computes]
    # The first batch is the only one posted after its hop was launched: ranks compare their headers
    # meanwhile. So that its messages do not wait for that hop, a mark is made before it, once all buffers
    # are taken and packed, and the messages stand behind the mark (`streams.py`).
    def _mark(self, sent: list[Tensor], received: list[Tensor]) -> Any:
        everything = (*sent, *received)
        assert self.exchange is not None, "an agreement on a ring of one"
        return self.exchange.streams(everything[0]).mark() if everything else None

    def _post_behind(
        self, mark: Any, route: Any, sent: list[Tensor], received: list[Tensor], hop: int
    ) -> InFlight | None:
        everything = (*sent, *received)
        if not everything:
            return None
        assert self.exchange is not None
        with self.exchange.streams(everything[0]).behind(mark):
            return self._post(route, sent, received, hop)

    def _post(self, route: Any, sent: list[Tensor], received: list[Tensor], hop: int) -> InFlight | None:
        if not (sent or received):
            return None
        assert self.exchange is not None, "a plan with messages on a ring of one"
        pending = self.exchange.start(route, sent, received, hop)
        if not self.overlap:
            pending.wait()
        return pending

    def _prepare(
        self, rounds: Iterable[tuple[int, Round]], under_way: dict[int, Chunk],
        sent: list[Tensor], received: list[Tensor],
    ) -> PreparedBatch:  # fmt: skip
        """Find out what all batches like this one have in common."""
        labels: tuple[list[Label], list[Label]] = ([], [])
        for index, steps in rounds:
            for post in steps.posted:
                labels[not isinstance(post, Send)].extend(under_way[index].buffers.labels(post))
        sends, receives = (
            [Message(tensor, *label) for tensor, label in zip(tensors, side, strict=True)]
            for tensors, side in zip((sent, received), labels, strict=True)
        )
        sizes = (tuple(MessageSize(m.peer, m.tensor.nbytes) for m in side) for side in (sends, receives))
        route = self.exchange.route(sends, receives) if self.exchange is not None else None
        return PreparedBatch(route, PostedBatch(*sizes))


def _arrive_and_collect(chunk: Chunk, steps: Round, sent: list[Tensor], received: list[Tensor]) -> bool:
    """Do a chunk's steps up to its messages, whose tensors are added; return whether it is done."""
    done = chunk.buffers.arrive(steps.arrived)
    if done:
        chunk.finish()
    # Two ranks match the messages between them by order alone, so the schedule's order is kept.
    chunk.buffers.post(steps.posted, sent, received)
    return done
