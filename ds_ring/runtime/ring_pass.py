"""Run the steps of a rank on tensors, forward and backward: the ring pass.

Owns what a step means for tensors. In which order steps come is `schedule/lowering.py`'s, what is computed
the kernel's, how it travels the exchange's, how parts add up `merge`'s. A new pattern, layout or kernel
changes nothing here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_ring.runtime.buffers import Buffers
from ds_ring.runtime.chunks import BackwardChunk, Chunk, ForwardChunk, Queries, Totals
from ds_ring.runtime.host_heads import HeadStream
from ds_ring.runtime.host_memory import HostMemory
from ds_ring.runtime.kernels.interface import Kernel
from ds_ring.runtime.merge import accumulator_dtype
from ds_ring.runtime.messages import InFlight, Message, Transport
from ds_ring.runtime.ring_buffers import Pair, RingBuffers
from ds_ring.runtime.trace import MessageSize, PostedBatch, Trace
from ds_ring.schedule.lowering import lower_rank
from ds_ring.schedule.rank_plan import RankPlan
from ds_ring.schedule.steps import RESULTS, Accumulate, HeadChunk, Round, Schedule, Send
from ds_ring.schedule.workspace import FLOAT

NO_SPAN = nullcontext()  # of a pass without a trace


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
            heads, own = chunk.query_heads, Pair(k[:, chunk.kv_heads], v[:, chunk.kv_heads])
            buffers = RingBuffers(chunk, self.buffers, own)
            of_heads = None if sinks is None else sinks[heads]
            return ForwardChunk(self, buffers, q[:, heads], out[:, heads], lse[:, heads], of_heads)

        self._run(self._schedule(k, v, backward=False), begin)
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
        saved = HeadStream((q, k, v, out, lse), schedule.chunks, grad_out.device, self.host)

        def begin(chunk: HeadChunk) -> Chunk:
            heads, kv = chunk.query_heads, chunk.kv_heads
            q_here, k_here, v_here, out_here, lse_here = saved.of(chunk)
            of_lse = None if grad_lse is None else grad_lse[:, heads]
            queries = Queries(grad_out[:, heads], q_here, out_here, lse_here, of_lse)
            totals = Totals(lse.dtype, (dq[:, heads], dk[:, kv], dv[:, kv]), self.trace)
            # What other ranks found for the own keys is added to the own shard's dK and dV.
            home = Pair(*totals.accumulators[1:])
            buffers = RingBuffers(chunk, self.buffers, Pair(k_here, v_here), home)
            return BackwardChunk(self, buffers, queries, totals)

        self._run(schedule, begin)
        return dq, dk, dv

    def _schedule(self, k: Tensor, v: Tensor, backward: bool) -> Schedule:
        if self.trace is not None:
            self.trace.phase = "backward" if backward else "forward"
        # Bytes of one head in the smaller message; 0 on a ring of one, where chunks gain nothing, unless sums
        # stand in float32 beside the results, or heads come from the host.
        chunked = self.exchange is not None or k.element_size() < FLOAT or self.host is not None
        head_bytes = min(k.nbytes, v.nbytes) // k.shape[1] if chunked else 0
        return lower_rank(self.plan, backward=backward, head_bytes=head_bytes, chunk_bytes=self.chunk_bytes)

    def _run(self, schedule: Schedule, begin: Callable[[HeadChunk], Chunk]) -> None:
        """Run a schedule, batch by batch; see `steps.py`'s [Note: batches]."""
        under_way: dict[int, Chunk] = {}
        agreed = self.agreed
        for batch in schedule.batches:
            with self._span("send", batch.hop):
                messages = _Messages([], [])
                for index, steps in batch.rounds:
                    # Not earlier: a chunk takes memory only from the batch on in which it sets out.
                    if index not in under_way:
                        under_way[index] = begin(schedule.chunks[index])
                    if _arrive_and_collect(under_way[index], steps, messages):
                        del under_way[index]
                self._note(messages)
                pending = None if agreed is not None else self._post(messages, batch.hop)
                mark = None if agreed is None else self._mark(messages)
            # What was posted is for the next hop; what is computed meanwhile is one hop behind.
            with self._span("compute", batch.hop - 1):
                for index, steps in batch.rounds:
                    for step in steps.computed:
                        under_way[index].compute(step)
            with self._span("wait", batch.hop):
                if agreed is not None:
                    agreed()
                    pending, agreed = self._post_behind(mark, messages, batch.hop), None
                if pending is not None:
                    pending.wait()
            del messages, pending  # or buffers would live on while the next ones are made

    # [Note: the header while the first hop computes]
    # The first batch is the only one posted after its hop was launched: ranks compare their headers
    # meanwhile. So that its messages do not wait for that hop, a mark is made before it, once all buffers
    # are taken and packed, and the messages stand behind the mark (`streams.py`).
    def _mark(self, messages: _Messages) -> Any:
        everything = (*messages.sends, *messages.receives)
        assert self.exchange is not None, "an agreement on a ring of one"
        return self.exchange.streams(everything[0].tensor).mark() if everything else None

    def _post_behind(self, mark: Any, messages: _Messages, hop: int) -> InFlight | None:
        everything = (*messages.sends, *messages.receives)
        if not everything:
            return None
        assert self.exchange is not None
        with self.exchange.streams(everything[0].tensor).behind(mark):
            return self._post(messages, hop)

    def _span(self, what: str, hop: int) -> AbstractContextManager[None]:
        return NO_SPAN if self.trace is None else self.trace.span(what, hop, self.buffers)

    def _note(self, batch: _Messages) -> None:
        if self.trace is not None:
            self.trace.batch = PostedBatch(*(tuple(map(_size_of, messages)) for messages in batch))

    def _post(self, batch: _Messages, hop: int) -> InFlight | None:
        if not (batch.sends or batch.receives):
            return None
        assert self.exchange is not None, "a plan with messages on a ring of one"
        pending = self.exchange.post(batch.sends, batch.receives, hop)
        if not self.overlap:
            pending.wait()
        return pending


class _Messages(NamedTuple):
    """Hold the messages of one batch."""

    sends: list[Message]
    receives: list[Message]


def _size_of(message: Message) -> MessageSize:
    return MessageSize(message.peer, message.tensor.nbytes)


def _arrive_and_collect(chunk: Chunk, steps: Round, messages: _Messages) -> bool:
    """Do a chunk's steps up to its messages, which are added to `messages`; return whether it is done."""
    done = False
    for step in steps.arrived:
        if isinstance(step, Accumulate):
            chunk.buffers.accumulate(step)
        # Freeing RESULTS means that the chunk is done; none of it is the pool's memory.
        elif step.buffer == RESULTS:
            chunk.finish()
            done = True
        else:
            chunk.buffers.free(step.buffer)
    # Two ranks match the messages between them by order alone, so the schedule's order is kept.
    for post in steps.posted:
        side = messages.sends if isinstance(post, Send) else messages.receives
        side.extend(chunk.buffers.messages(post))
    return done
