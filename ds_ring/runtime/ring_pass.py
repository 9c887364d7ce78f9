"""The ring pass: the one loop forward and the one loop backward that walk a plan.

Owns the order of things: post the next hop, compute this one, wait. What is computed is the kernel's, how it
travels the exchange's, how parts add up `merge`'s. A new pattern, layout or kernel changes nothing here.

[Note: one hop behind]
In the backward pass keys and values travel as in the forward one, and float32 accumulators of dK and dV
follow one hop behind them: what this rank adds to a shard at hop s can only be sent on once it is computed,
in the batch posted at hop s + 1; the sum over the ranks before it arrives during hop s. Where a slot's
journey ends its accumulator is sent home to its owner directly. No hop's K/V is ever kept.

[Note: heads in groups]
A walk needs buffers of ten shard-sized tensors at most (backward: K/V here and coming, accumulators coming,
here and leaving). Heads are independent, so they go round one group after the other and the buffers
shrink by the number of groups, as long as a group's messages stay large enough to be worth sending.

[Note: one walk after another]
The last hop of a walk has nothing to receive, and gradients come home after it: with two ranks half of all
that is sent would be waited for. So a walk sets out while the one before it is at its last hop: its first
keys and values travel then, and the gradients of the one before come home while it computes. Only the
first hop of the first walk and the last gradients of the last one are exposed, 1 / groups of it all. In the
backward pass that takes up to 14 buffers. Where groups are fewer than `MANY`, and so their buffers large, a
walk sets out one hop later, while the gradients of the one before come home. A walk's number of hops here is
that of its lanes, which is the same on all ranks: so is the order of all messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ds_ring.runtime.buffers import Buffers
from ds_ring.runtime.exchange import Carrier, InFlight, Message
from ds_ring.runtime.kernels.interface import Kernel
from ds_ring.runtime.merge import accumulator_dtype, merge_
from ds_ring.runtime.ring_buffers import Journey, Pair
from ds_ring.runtime.trace import Batch, Parcel, Trace
from ds_ring.schedule.head_chunks import MANY, head_chunks
from ds_ring.schedule.plan import query_heads_of
from ds_ring.schedule.rank_plan import RankPlan, WalkPlan


@dataclass(frozen=True)
class RingPass:
    """What both walks need.

    Attributes:
        plan: this rank's part of the plan.
        kernel: computes one hop.
        exchange: moves payloads; None for a ring of one.
        scale: of the scores.
        overlap: False waits for each hop's messages before it computes (for comparison).
        chunk_bytes: heads go round in groups whose K and V are each at least this large; see
            [Note: heads in groups].
        buffers: memory for what travels.
        check: told the hop and, by name, what was computed up to it; None if nobody wants to look.
        settle: told the K/V heads of a walk back and the own shard's dK and dV before they are rounded, when
            all of theirs that travelled has come home; None if nobody wants to look.
        trace: notes what happened when; None for no trace, which costs nothing.
    """

    plan: RankPlan
    kernel: Kernel
    exchange: Carrier | None
    scale: float
    overlap: bool = True
    chunk_bytes: int = 1 << 20
    buffers: Buffers = field(default_factory=Buffers)
    check: Callable[..., None] | None = None
    settle: Callable[[slice, Tensor, Tensor], None] | None = None
    trace: Trace | None = None

    @torch.no_grad()
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Attention of the local queries over all ranks' keys.

        Args:
            q: [B, H, S, D], this rank's shard.
            k, v: [B, G, S, D], this rank's shard.

        Returns:
            out [B, H, S, D] in q's dtype, contiguous; lse [B, H, S], float32 (float64 for float64 inputs).
        """
        self._phase("forward")
        out = q.new_zeros(q.shape)
        lse = q.new_full(q.shape[:-1], float("-inf"), dtype=accumulator_dtype(q.dtype))

        def walk(plan: WalkPlan, heads: slice, kv: slice) -> _Walk:
            own = Pair(k[:, kv], v[:, kv])
            return self._forward_walk(plan, kv, own, q[:, heads], out[:, heads], lse[:, heads])

        self._go((plan.limit, walk(plan, heads, kv)) for plan, heads, kv in self._chunks(k))
        return out, lse

    @torch.no_grad()
    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the local q, k, v; see [Note: one hop behind].

        Args:
            grad_out: [B, H, S, D].
            q, k, v, out, lse: inputs and results of `forward`.

        Returns:
            dq, dk, dv, contiguous, in the dtypes of q, k, v.
        """
        self._phase("backward")
        dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))

        def walk(plan: WalkPlan, heads: slice, kv: slice) -> _Walk:
            queries = _Queries(*(x[:, heads] for x in (grad_out, q, out, lse)))
            own, home = Pair(k[:, kv], v[:, kv]), Pair(dk[:, kv], dv[:, kv])
            return self._backward_walk(plan, kv, own, queries, dq[:, heads], home)

        chunks = list(self._chunks(k))
        later = int(len(chunks) < MANY)
        self._go((plan.limit + later, walk(plan, heads, kv)) for plan, heads, kv in chunks)
        return dq, dk, dv

    def _chunks(self, k: Tensor) -> Iterator[tuple[WalkPlan, slice, slice]]:
        """Every walk with the query heads and K/V heads that go round together; [Note: heads in groups]."""
        head_bytes = k.nbytes // k.shape[1] if self.exchange is not None else 0
        for walk in self.plan.walks:
            for kv_heads in head_chunks(walk.kv_heads, head_bytes, self.chunk_bytes):
                yield walk, query_heads_of(kv_heads, self.plan.group), kv_heads

    def _go(self, walks: Iterator[tuple[int, _Walk]]) -> None:
        """All walks, each with the hops until the next one sets out; [Note: one walk after another].

        A walk gives the messages of a batch, then computes what it has, in turn. It is made when it sets out.
        """
        under_way: list[_Walk] = []
        left = 0  # hops until the next walk sets out
        hop = 0  # of the walk that set out last
        following = next(walks, None)
        while following is not None or under_way:
            if following is not None and left == 0:
                hops, newest = following
                under_way.append(newest)
                left, hop = max(hops, 1), 0
                following = next(walks, None)
            with self._span("send", hop + 1):
                batch, under_way = _messages_of_all(under_way)
                left, hop = max(left - 1, 0), hop + 1
                pending = self._post(batch, hop)
            with self._span("compute", hop - 1):
                for walk in under_way:
                    next(walk)
            with self._span("wait", hop):
                if pending is not None:
                    pending.wait()
            del batch, pending  # or buffers would live on while the next ones are made

    def _phase(self, name: str) -> None:
        if self.trace is not None:
            self.trace.phase = name

    def _span(self, what: str, hop: int) -> AbstractContextManager[None]:
        return nullcontext() if self.trace is None else self.trace.span(what, hop, self.buffers)

    def _post(self, batch: _Messages, hop: int) -> InFlight | None:
        if self.trace is not None:
            self.trace.batch = Batch(*(tuple(map(_parcel_of, messages)) for messages in batch))
        if not (batch.sends or batch.receives):
            return None
        assert self.exchange is not None, "a plan with messages on a ring of one"
        pending = self.exchange.post(batch.sends, batch.receives, hop)
        if not self.overlap:
            pending.wait()
        return pending

    def _forward_walk(
        self, plan: WalkPlan, kv: slice, own: Pair, q: Tensor, out: Tensor, lse: Tensor
    ) -> _Walk:
        """The walk for some heads, merged into out and lse."""
        journeys = [Journey(lane, self.buffers, own, heads=kv) for lane in plan.lanes]
        with _accumulating(self.trace, lse.dtype, out) as (total,):
            for hop in range(max(lane.hops for lane in plan.lanes)):
                yield _messages_of(journeys, hop + 1)
                for journey in _computing(journeys, hop):
                    tiles = journey.tiles(hop)
                    for part in self.kernel.forward(q, *journey.payload, tiles, self.scale):
                        rows, heads = part.q_rows, part.heads
                        merge_(rows.of(total[:, heads]), rows.of(lse[:, heads]), part.out_BHSD, part.lse_BHS)
                        del part  # or it would live on while the kernel computes the next one
                if self.check is not None:
                    self.check(hop, out=total, lse=lse)
                yield None
                for journey in journeys:
                    journey.advance()
            for journey in journeys:
                journey.end()

    def _backward_walk(
        self, plan: WalkPlan, kv: slice, own: Pair, queries: _Queries, dq: Tensor, home: Pair
    ) -> _Walk:
        """The walk back for some heads, added to dq and, of the own keys and values, to `home`."""
        grad_out, q, out, lse = queries
        with _accumulating(self.trace, lse.dtype, dq, *home) as (dq_total, *home_total):
            journeys = [Journey(lane, self.buffers, own, Pair(*home_total), kv) for lane in plan.lanes]
            for hop in range(max(lane.backward_batches for lane in plan.lanes)):
                yield _messages_of(journeys, hop + 1)
                for journey in journeys:
                    journey.start_gradients(hop)
                for journey in _computing(journeys, hop):
                    tiles, grads = journey.tiles(hop), journey.finished
                    assert grads is not None
                    keys_values = journey.payload
                    for part in self.kernel.backward(grad_out, q, *keys_values, out, lse, tiles, self.scale):
                        part.q_rows.of(dq_total[:, part.heads]).add_(part.dq_BHSD)
                        part.k_rows.of(grads.first).add_(part.dk_BGSD)
                        part.k_rows.of(grads.second).add_(part.dv_BGSD)
                        del part
                    if self.check is not None:
                        self.check(hop, dq=dq_total, dk=grads.first, dv=grads.second)
                    del keys_values, grads  # or they would live on when they have been sent
                yield None
                for journey in journeys:
                    journey.advance()
            for journey in journeys:
                journey.end()
            if self.settle is not None:
                self.settle(kv, *home_total)


class _Messages(NamedTuple):
    """Of one batch."""

    sends: list[Message]
    receives: list[Message]


def _parcel_of(message: Message) -> Parcel:
    return Parcel(message.peer, message.tensor.nbytes)


_Walk: TypeAlias = "Iterator[_Messages | None]"  # what a batch has of it, then None when it has computed


def _messages_of_all(walks: list[_Walk]) -> tuple[_Messages, list[_Walk]]:
    """One batch of what all walks post now, and those of them that are still under way."""
    batch, going = _Messages([], []), []
    for walk in walks:
        if (messages := next(walk, None)) is not None:
            going.append(walk)
            batch.sends.extend(messages.sends)
            batch.receives.extend(messages.receives)
        del messages
    return batch, going


def _messages_of(journeys: list[Journey], hop: int) -> _Messages:
    """What all lanes of a walk post before hop - 1 is computed."""
    batch = _Messages([], [])
    for journey in journeys:
        sends, receives = journey.messages(hop)
        batch.sends.extend(sends)
        batch.receives.extend(receives)
    return batch


@contextmanager
def _accumulating(trace: Trace | None, dtype: torch.dtype, *results: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Zeroed accumulators of `dtype` for zeroed results: these themselves where the dtype is the same."""
    accumulators = tuple(x if x.dtype == dtype else torch.zeros_like(x, dtype=dtype) for x in results)
    if trace is not None:
        own = [x for x, result in zip(accumulators, results, strict=True) if x is not result]
        trace.accumulators_bytes += sum(x.nbytes for x in own)
    yield accumulators
    if trace is not None:
        trace.accumulators_bytes -= sum(x.nbytes for x in own)
    for result, accumulator in zip(results, accumulators, strict=True):
        if result is not accumulator:
            result.copy_(accumulator)


class _Queries(NamedTuple):
    """What stays at home in the backward walk; [B, H, S, D], the lse [B, H, S]."""

    grad_out: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor


def _computing(journeys: list[Journey], hop: int) -> Iterator[Journey]:
    """The journeys that have something to compute at a hop; the own shard is the first one's."""
    for journey in journeys if hop else journeys[:1]:
        if journey.plan.visit(hop) is not None:
            yield journey
