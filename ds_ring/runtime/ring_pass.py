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
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ds_ring.runtime.exchange import Exchange, Message
from ds_ring.runtime.kernels.interface import Kernel
from ds_ring.runtime.merge import accumulator_dtype, merge_
from ds_ring.schedule.plan import RankPlan, SlotRanges, Visit, count_slots


class Pair(NamedTuple):
    """Two tensors that travel together: K and V, or dK and dV; [B, G, slots, D] each."""

    first: Tensor
    second: Tensor


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
    """

    plan: RankPlan
    kernel: Kernel
    exchange: Exchange | None
    scale: float
    overlap: bool = True
    chunk_bytes: int = 1 << 20

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Attention of the local queries over all ranks' keys.

        Args:
            q: [B, H, S, D], this rank's shard.
            k, v: [B, G, S, D], this rank's shard.

        Returns:
            out [B, H, S, D] in q's dtype, contiguous; lse [B, H, S], float32 (float64 for float64 inputs).
        """
        dtype = accumulator_dtype(q.dtype)
        out = q.new_zeros(q.shape)
        lse = q.new_full(q.shape[:-1], float("-inf"), dtype=dtype)
        for heads, kv_heads in head_chunks(q, k, self.chunk_bytes):
            with _accumulating(dtype, out[:, heads]) as (out_chunk,):
                self._forward_chunk(q[:, heads], k[:, kv_heads], v[:, kv_heads], out_chunk, lse[:, heads])
        return out, lse

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
        dtype = accumulator_dtype(q.dtype)
        dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))
        for heads, kv_heads in head_chunks(q, k, self.chunk_bytes):
            query_side = _Queries(*(x[:, heads] for x in (grad_out, q, out, lse)))
            with _accumulating(dtype, dq[:, heads], dk[:, kv_heads], dv[:, kv_heads]) as (dq_chunk, *home):
                self._backward_chunk(query_side, k[:, kv_heads], v[:, kv_heads], dq_chunk, Pair(*home))
        return dq, dk, dv

    def _forward_chunk(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
        """The walk for some heads, merged into the accumulators out and lse."""
        payload = Pair(k, v)
        for hop in range(self.plan.hops):
            batch = _Batch(self, hop + 1, payload)
            visit = self.plan.visit(hop)
            if visit is not None:
                for part in self.kernel.forward(q, *payload, visit.tiles, self.scale):
                    rows = part.q_slots
                    merge_(out[:, :, rows], lse[:, :, rows], part.out_BHSD, part.lse_BHS)
                    del part  # or it would live on while the kernel computes the next one
            batch.wait()
            payload = batch.arrived or payload

    def _backward_chunk(self, queries: _Queries, k: Tensor, v: Tensor, dq: Tensor, home: Pair) -> None:
        """The walk back for some heads, added to the accumulators dq and home (dk and dv)."""
        grad_out, q, out, lse = queries
        payload, finished = Pair(k, v), None
        for hop in range(self.plan.backward_batches):
            batch = _Batch(self, hop + 1, payload, _Gradients(finished, home))
            visit = self.plan.visit(hop)
            finished = None
            if visit is not None:
                finished = home if hop == 0 else _zeros_like_pair(home, count_slots(visit.held))
                for part in self.kernel.backward(grad_out, q, *payload, out, lse, visit.tiles, self.scale):
                    dq[:, :, part.q_slots] += part.dq_BHSD
                    finished.first[:, :, part.k_slots] += part.dk_BGSD
                    finished.second[:, :, part.k_slots] += part.dv_BGSD
                    del part
            batch.wait(finished)
            payload = batch.arrived or payload


@contextmanager
def _accumulating(dtype: torch.dtype, *results: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Zeroed accumulators of `dtype` for zeroed results: these themselves where the dtype is the same."""
    accumulators = tuple(x if x.dtype == dtype else torch.zeros_like(x, dtype=dtype) for x in results)
    yield accumulators
    for result, accumulator in zip(results, accumulators, strict=True):
        if result is not accumulator:
            result.copy_(accumulator)


class _Queries(NamedTuple):
    """What stays at home in the backward walk; [B, H, S, D], the lse [B, H, S]."""

    grad_out: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor


def head_chunks(q: Tensor, k: Tensor, chunk_bytes: int) -> list[tuple[slice, slice]]:
    """Query heads and K/V heads of every group that goes round the ring together; [Note: heads in groups]."""
    groups = k.shape[1]
    head_bytes = k.nbytes // groups
    chunks = max(
        n
        for n in range(1, groups + 1)
        if groups % n == 0 and (n == 1 or groups // n * head_bytes >= chunk_bytes)
    )
    h, g = q.shape[1] // chunks, groups // chunks
    return [(slice(c * h, (c + 1) * h), slice(c * g, (c + 1) * g)) for c in range(chunks)]


class _Gradients(NamedTuple):
    """What a backward batch adds to a forward one.

    Attributes:
        finished: accumulators of the hop before, to be sent on or home.
        home: accumulators of the own shard, to which others' are added.
    """

    finished: Pair | None
    home: Pair


class _Batch:
    """The messages posted before hop `hop - 1` is computed: payloads for `hop`, accumulators of `hop - 2`.

    The order (payloads, accumulators to the next rank, accumulators home) is the same on both sides of
    every connection; [Note: rules of the exchange].
    """

    def __init__(self, walk: RingPass, hop: int, payload: Pair, gradients: _Gradients | None = None) -> None:
        self.plan, self.hop = walk.plan, hop
        self.sends: list[Message] = []
        self.receives: list[Message] = []
        self.arrived: Pair | None = None
        self.home = gradients.home if gradients is not None else None
        self.partial: Pair | None = None
        self.homecomings: list[tuple[SlotRanges, Pair]] = []
        self._add_payload(payload)
        if gradients is not None:
            self._add_accumulators(payload, gradients)
        self.pending = None
        if self.sends or self.receives:
            assert walk.exchange is not None, "a plan with messages on a ring of one"
            self.pending = walk.exchange.post(self.sends, self.receives, hop)
            self.sends, self.receives = [], []  # `pending` keeps the buffers while they are in flight
            if not walk.overlap:
                self.pending.wait()

    def wait(self, finished: Pair | None = None) -> None:
        """Wait, and add what arrived to the accumulators of the hop just computed and of the own shard."""
        if self.pending is not None:
            self.pending.wait()
        if self.partial is not None:
            assert finished is not None
            finished.first.add_(self.partial.first)
            finished.second.add_(self.partial.second)
        for slots, arrived in self.homecomings:
            assert self.home is not None
            _add_at(self.home, slots, arrived)
        self.partial, self.homecomings = None, []

    def _add_payload(self, payload: Pair) -> None:
        here, coming = self.plan.visit(self.hop - 1), self.plan.visit(self.hop)
        if here is not None and len(here.forward):
            self._send(_pack(payload, _in_payload(here)), here.goes_to)
        if coming is not None:
            self.arrived = self._receive(
                payload, count_slots(coming.held), coming.came_from, payload.first.dtype
            )

    def _add_accumulators(self, like: Pair, gradients: _Gradients) -> None:
        """Send what hop - 2 finished, receive what belongs to hop - 1, and the own shard's homecomings."""
        done, here = self.plan.visit(self.hop - 2), self.plan.visit(self.hop - 1)
        if done is not None and done.hop > 0 and len(done.forward):
            assert gradients.finished is not None
            self._send(_pack(gradients.finished, done.forward_in_payload), done.goes_to)
        if here is not None and here.hop > 1:
            self.partial = self._receive(
                like, count_slots(here.held), here.came_from, gradients.home.first.dtype
            )
        if done is not None and done.hop > 0 and len(done.ends_here):
            assert gradients.finished is not None
            self._send(_pack(gradients.finished, done.ends_here_in_payload), done.origin)
        for coming in self.plan.homecomings:
            if coming.hop == self.hop - 2:
                slots = count_slots(coming.slots)
                arrived = self._receive(like, slots, coming.sender, gradients.home.first.dtype)
                self.homecomings.append((coming.slots, arrived))

    def _send(self, pair: Pair, peer: int) -> None:
        self.sends += [Message(tensor, peer) for tensor in pair]

    def _receive(self, like: Pair, slots: int, peer: int, dtype: torch.dtype) -> Pair:
        pair = Pair(*(x.new_empty((*x.shape[:2], slots, x.shape[3]), dtype=dtype) for x in like))
        self.receives += [Message(tensor, peer) for tensor in pair]
        return pair


def _in_payload(visit: Visit) -> SlotRanges:
    """Where the slots that travel on lie in what is here; at hop 0 the shard itself is here, in place."""
    return visit.forward if visit.hop == 0 else visit.forward_in_payload


def _pack(pair: Pair, ranges: SlotRanges) -> Pair:
    """The slots of `ranges`, one after the other, contiguous; no copy where that is the whole tensor."""
    return Pair(*(_pack_one(tensor, ranges) for tensor in pair))


def _pack_one(tensor: Tensor, ranges: SlotRanges) -> Tensor:
    parts = [tensor[:, :, start:end] for start, end in ranges.tolist()]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim=2)


def _add_at(pair: Pair, ranges: SlotRanges, packed: Pair) -> None:
    for tensor, part in zip(pair, packed, strict=True):
        offset = 0
        for start, end in ranges.tolist():
            tensor[:, :, start:end] += part[:, :, offset : offset + end - start]
            offset += end - start


def _zeros_like_pair(like: Pair, slots: int) -> Pair:
    return Pair(*(x.new_zeros((*x.shape[:2], slots, x.shape[3])) for x in like))
