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
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ds_ring.runtime.buffers import Buffers
from ds_ring.runtime.exchange import Exchange, Message
from ds_ring.runtime.journey import Journey, Pair
from ds_ring.runtime.kernels.interface import Kernel
from ds_ring.runtime.merge import accumulator_dtype, merge_
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
    """

    plan: RankPlan
    kernel: Kernel
    exchange: Exchange | None
    scale: float
    overlap: bool = True
    chunk_bytes: int = 1 << 20
    buffers: Buffers = field(default_factory=Buffers)

    @torch.no_grad()
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
        for walk, heads, kv_heads in self._chunks(k):
            with _accumulating(dtype, out[:, heads]) as (out_chunk,):
                own = Pair(k[:, kv_heads], v[:, kv_heads])
                journeys = [Journey(lane, self.buffers, own) for lane in walk.lanes]
                self._forward_walk(journeys, q[:, heads], out_chunk, lse[:, heads])
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
        dtype = accumulator_dtype(q.dtype)
        dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))
        for walk, heads, kv_heads in self._chunks(k):
            queries = _Queries(*(x[:, heads] for x in (grad_out, q, out, lse)))
            with _accumulating(dtype, dq[:, heads], dk[:, kv_heads], dv[:, kv_heads]) as (dq_chunk, *home):
                own = Pair(k[:, kv_heads], v[:, kv_heads])
                journeys = [Journey(lane, self.buffers, own, Pair(*home)) for lane in walk.lanes]
                self._backward_walk(journeys, queries, dq_chunk)
        return dq, dk, dv

    def _chunks(self, k: Tensor) -> Iterator[tuple[WalkPlan, slice, slice]]:
        """Every walk with the query heads and K/V heads that go round together; [Note: heads in groups]."""
        head_bytes = k.nbytes // k.shape[1] if self.exchange is not None else 0
        for walk in self.plan.walks:
            for kv_heads in head_chunks(walk.kv_heads, head_bytes, self.chunk_bytes):
                yield walk, query_heads_of(kv_heads, self.plan.group), kv_heads

    def _forward_walk(self, journeys: list[Journey], q: Tensor, out: Tensor, lse: Tensor) -> None:
        """The walk for some heads, merged into the accumulators out and lse."""
        for hop in range(max(journey.plan.hops for journey in journeys)):
            batch = _Batch(self, journeys, hop + 1)
            for journey in _computing(journeys, hop):
                tiles = journey.tiles(hop)
                for part in self.kernel.forward(q, *journey.payload, tiles, self.scale):
                    rows, heads = part.q_rows, part.heads
                    merge_(rows.of(out[:, heads]), rows.of(lse[:, heads]), part.out_BHSD, part.lse_BHS)
                    del part  # or it would live on while the kernel computes the next one
            batch.wait()
            for journey in journeys:
                journey.advance()
        for journey in journeys:
            journey.end()

    def _backward_walk(self, journeys: list[Journey], queries: _Queries, dq: Tensor) -> None:
        """The walk back for some heads, added to the accumulators dq and every journey's home."""
        grad_out, q, out, lse = queries
        for hop in range(max(journey.plan.backward_batches for journey in journeys)):
            batch = _Batch(self, journeys, hop + 1)
            for journey in journeys:
                journey.start_gradients(hop)
            for journey in _computing(journeys, hop):
                tiles, grads = journey.tiles(hop), journey.finished
                assert grads is not None
                for part in self.kernel.backward(grad_out, q, *journey.payload, out, lse, tiles, self.scale):
                    part.q_rows.of(dq[:, part.heads]).add_(part.dq_BHSD)
                    part.k_rows.of(grads.first).add_(part.dk_BGSD)
                    part.k_rows.of(grads.second).add_(part.dv_BGSD)
                    del part
            batch.wait()
            for journey in journeys:
                journey.advance()
        for journey in journeys:
            journey.end()


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


def head_chunks(kv_heads: slice, head_bytes: int, chunk_bytes: int) -> list[slice]:
    """K/V heads of a slice in equal groups of at least `chunk_bytes`; [Note: heads in groups]."""
    step = kv_heads.step or 1
    heads = range(kv_heads.start, kv_heads.stop, step)
    sizes = [n for n in range(1, len(heads) + 1) if len(heads) % n == 0]
    size = next((n for n in sizes if n * head_bytes >= chunk_bytes), len(heads))  # all: nothing to send
    groups = (heads[first : first + size] for first in range(0, len(heads), size))
    return [slice(group[0], group[-1] + 1, step) for group in groups]


def _computing(journeys: list[Journey], hop: int) -> Iterator[Journey]:
    """The journeys that have something to compute at a hop; the own shard is the first one's."""
    for journey in journeys if hop else journeys[:1]:
        if journey.plan.visit(hop) is not None:
            yield journey


class _Batch:
    """All messages of all lanes that are posted before a hop is computed."""

    def __init__(self, walk: RingPass, journeys: list[Journey], hop: int) -> None:
        sends: list[Message] = []
        receives: list[Message] = []
        for journey in journeys:
            lane_sends, lane_receives = journey.messages(hop)
            sends += lane_sends
            receives += lane_receives
        self.pending = None
        if sends or receives:
            assert walk.exchange is not None, "a plan with messages on a ring of one"
            self.pending = walk.exchange.post(sends, receives, hop)
            if not walk.overlap:
                self.pending.wait()

    def wait(self) -> None:
        """Wait for all of them."""
        if self.pending is not None:
            self.pending.wait()
