"""Run the steps of a rank on tensors, forward and backward: the ring pass.

This file decides what each step does to tensors. `schedule/lowering.py` orders the steps, the kernel computes
the attention of one hop, the exchange sends the messages, and `accumulator.py` merges parts. A new pattern,
layout or kernel changes nothing in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ds_ring.comm.messages import NOTHING_SENT, BatchEvent, Label, Message, MessageSize, Observer, PostedBatch
from ds_ring.kernels.interface import ALL_HEADS, Kernel, value_dim
from ds_ring.ring.accumulator import Accumulator, check_parts_wait
from ds_ring.ring.buffers import HeadSource, RingBuffers, Saved, select_chunk, select_some_heads
from ds_ring.ring.merge import get_accumulator_dtype
from ds_ring.ring.pool import Buffers, Pair, PreparedBatch, PreparedPass, PreparedPasses
from ds_ring.schedule.lowering import head_bytes, lower_rank
from ds_ring.schedule.rank_plan import RankPlan
from ds_ring.schedule.steps import RESULTS, Compute, HeadChunk, Payload, Round, Schedule, Send

if TYPE_CHECKING:
    from ds_ring.comm.protocols import InFlight, Transport


class ForwardChunk:
    """The forward pass of a head chunk.

    Args:
        total: accumulates out [B, H, S, E] and lse [B, H, S].
    """

    def __init__(
        self, ring: RingPass, kernel: Kernel, buffers: RingBuffers, q: Tensor, total: Accumulator
    ) -> None:
        self.ring, self.kernel, self.buffers, self.q = ring, kernel, buffers, q
        self.total = total

    def compute(self, step: Compute) -> None:
        """Attend to the keys of a step and merge the parts into `total`."""
        keys, total = self.buffers.pair(step.buffer), self.total
        if total.waiting:
            total.make_room()
        for part in self.kernel.forward(self.q, keys.k, keys.v, step.tiles, self.ring.scale):
            total.add(part.q_rows, part.heads, part.out_BHSD, part.lse_BHS)
            del part  # Without this, the part stays in memory while the kernel computes the next part.

    @property
    def accumulators_bytes(self) -> int:
        """Return the bytes of the accumulators, for observers."""
        return self.total.own_bytes

    def finish(self) -> None:
        """Write the results."""
        self.total.finish()


class Queries(NamedTuple):
    """The inputs of the backward pass that do not travel, with the shapes of `RingPass.backward`."""

    grad_out: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor
    grad_lse: Tensor | None


class BackwardChunk:
    """The backward pass of a head chunk: adds to dQ, and to the dK and dV of each hop's keys."""

    def __init__(
        self, ring: RingPass, kernel: Kernel, buffers: RingBuffers, queries: Queries, dq: Accumulator,
        own_kv_grads: Accumulator, waits: bool,
    ) -> None:  # fmt: skip
        self.ring, self.kernel, self.buffers = ring, kernel, buffers
        self.queries, self.dq, self.own_kv_grads, self.waits = queries, dq, own_kv_grads, waits

    def compute(self, step: Compute) -> None:
        """Compute the gradients of a step's tiles and add them to the accumulators."""
        grad_out, q, out, lse, grad_lse = self.queries
        assert step.gradients is not None, "steps of a forward pass"
        if self.dq.waiting:
            self.dq.make_room()
        # `kv_grads` accumulates dK and dV of this step's keys. At hop 0 these are keys of the own shard. At
        # other hops `kv_grads` writes to a new buffer, and no other step computes into this buffer.
        keys, kv_grads = self.buffers.pair(step.buffer), self.own_kv_grads
        is_stage = False
        if step.gradients != RESULTS:
            # Without stages (GRADIENTS), the sum of earlier ranks may be added to this buffer later. In
            # stages no sum arrives, so parts may wait, and a single part may become the buffer (`adopt`).
            is_stage = self.buffers.chunk.steps.buffers[step.gradients].payload is not Payload.GRADIENTS
            shapes, waits = (keys.k.shape, keys.v.shape), is_stage and self.waits
            buffer_pair = partial(self.buffers.pair, step.gradients)
            kv_grads = Accumulator(buffer_pair, grad_out, shapes, self.own_kv_grads.dtype, None, waits)
        inputs = (keys.k, keys.v, out, lse, step.tiles, self.ring.scale, grad_lse)
        for part in self.kernel.backward(grad_out, q, *inputs):
            heads, rows, key_rows, dq_part, dk_part, dv_part, tokens_first = part
            if tokens_first:
                dq_part, dk_part, dv_part = (x.transpose(-3, -2) for x in (dq_part, dk_part, dv_part))
            self.dq.add(rows, heads, dq_part)
            # dK and dV have all K/V heads: the kernel has summed over the query heads of each K/V head.
            kv_grads.add(key_rows, ALL_HEADS, dk_part, dv_part)
            del part, dq_part, dk_part, dv_part
        adopted = is_stage and self.buffers.adopt(step.gradients, kv_grads.whole())
        if kv_grads is not self.own_kv_grads and not adopted:
            kv_grads.finish()

    @property
    def accumulators_bytes(self) -> int:
        """Return the bytes of the accumulators, for observers."""
        return self.dq.own_bytes + self.own_kv_grads.own_bytes

    def finish(self) -> None:
        """Write dQ, pass dK and dV of the own shard to `on_gradients_final`, then round these two."""
        self.dq.finish()
        if self.ring.on_gradients_final is not None:
            self.ring.on_gradients_final(self.buffers.chunk.kv_heads, *self.own_kv_grads.so_far())
        self.own_kv_grads.finish()


Chunk = ForwardChunk | BackwardChunk


@dataclass(frozen=True)
class RingPass:
    """The forward and the backward ring pass of one rank.

    Attributes:
        plan: this rank's part of the plan.
        kernel: computes the attention of one hop.
        exchange: sends and receives messages; None if the sequence (ring x Ulysses) has one rank.
        scale: factor of the scores.
        overlap: if False, the pass waits for the messages of a batch before it computes (for comparison).
        chunk_bytes: least bytes of K of a head chunk, and of V; a class with fewer bytes is one chunk.
        buffers: pool of memory for buffers.
        on_gradients_final: called for each head chunk with its K/V heads, and with the final dK and dV of the
            own shard before these are rounded; None for no call.
        observer: called at the start and the end of a pass, and before the sends, the computation and the
            wait of each batch; None for no calls.
        load_heads: makes the object that copies q, k, v, out and lse of each head chunk from the host to
            the device; None if these tensors were saved on the device.
        finish_header_check: called in the first batch, before its messages are posted; raises if the headers
            of the ranks differ. None if no comparison of headers is running. See
            [Note: the header while the first hop computes].
        prepared: values that passes of the same shapes share, such as the routes of messages.
    """

    plan: RankPlan
    kernel: Kernel
    exchange: Transport | None
    scale: float
    overlap: bool = True
    chunk_bytes: int = 1 << 20
    buffers: Buffers = field(default_factory=Buffers)
    on_gradients_final: Callable[[slice, Tensor, Tensor], None] | None = None
    observer: Observer | None = None
    load_heads: Callable[[Saved, Sequence[HeadChunk], torch.device], HeadSource] | None = None
    finish_header_check: Callable[[], None] | None = None
    prepared: PreparedPasses = field(default_factory=PreparedPasses, repr=False)

    @torch.no_grad()
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention of the local queries over the keys of all ranks.

        Args:
            q: [B, H, S, D], this rank's shard.
            k, v: [B, G, S, D] and [B, G, S, E], this rank's shard.

        Returns:
            out [B, H, S, E] in q's dtype, contiguous; lse [B, H, S], float32 (float64 for float64 inputs).
        """
        shape = (*q.shape[:-1], value_dim(self.kernel, v))
        out = lru_cache(maxsize=1)(partial(q.new_empty, shape))  # the first call of `out` allocates it
        lse = q.new_empty(q.shape[:-1], dtype=get_accumulator_dtype(q.dtype))
        waits = check_parts_wait(self.kernel, q.dtype, lse.dtype)

        def begin(chunk: HeadChunk) -> Chunk:
            # `heads` and `kv` are slices, so all tensors of the chunk are views of the caller's tensors.
            heads, kv = chunk.query_heads, chunk.kv_heads
            k_here, v_here = select_some_heads(kv, k, v)
            kernel = self.kernel.select_heads(heads)
            buffers = RingBuffers(chunk, self.buffers, prepared.kinds[kv.start], Pair(k_here, v_here))
            q_here, lse_here = select_some_heads(heads, q, lse)
            sizes = (*lse_here.shape, shape[-1])
            total = Accumulator(
                lambda: select_some_heads(heads, out()), lse_here, [sizes], lse.dtype, lse_here, waits
            )
            return ForwardChunk(self, kernel, buffers, q_here, total)

        schedule = self._make_schedule(k, v, backward=False)
        prepared = self.prepared.get(schedule, k, v)
        self._run(schedule, prepared, begin)
        return out(), lse

    @torch.no_grad()
    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        grad_lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return the gradients of the local q, k, v.

        Args:
            grad_out: [B, H, S, E].
            q, k, v, out, lse: inputs and results of `forward`, or their saved copies for `load_heads`.
            grad_lse: gradient of lse, [B, H, S]; None for zero.

        Returns:
            dq, dk, dv, contiguous, in the dtypes of q, k, v.
        """
        new = grad_out.new_empty  # q, k and v may be on the host
        dk, dv = new(k.shape, dtype=k.dtype), new(v.shape, dtype=v.dtype)
        waits = check_parts_wait(self.kernel, q.dtype, lse.dtype)
        dq = lru_cache(maxsize=1)(partial(new, q.shape, dtype=q.dtype))  # allocated at its first use
        schedule = self._make_schedule(k, v, backward=True)
        prepared = self.prepared.get(schedule, k, v)
        saved: Saved = (q, k, v, out, lse)
        heads_here: Callable[[HeadChunk], Saved] = partial(select_chunk, saved)
        if self.load_heads is not None:
            heads_here = self.load_heads(saved, schedule.chunks, grad_out.device).load

        def begin(chunk: HeadChunk) -> Chunk:
            heads, kv = chunk.query_heads, chunk.kv_heads
            q_here, k_here, v_here, out_here, lse_here = heads_here(chunk)
            (grad_here,) = select_some_heads(heads, grad_out)
            grad_lse_here = None if grad_lse is None else grad_lse[:, heads]
            queries = Queries(grad_here, q_here, out_here, lse_here, grad_lse_here)
            settings = lse.dtype, None, waits
            dq_accumulator = Accumulator(
                lambda: select_some_heads(heads, dq()), grad_here, [q_here.shape], *settings
            )
            # Gradients of the own keys that other ranks return are added here.
            results = select_some_heads(kv, dk, dv)
            own_kv_grads = Accumulator(
                partial(tuple, results), grad_here, list(map(Tensor.size, results)), *settings
            )
            kernel, own_pair = self.kernel.select_heads(heads), Pair(k_here, v_here)
            parts_dtype = k.dtype if waits else lse.dtype
            buffers = RingBuffers(
                chunk, self.buffers, prepared.kinds[kv.start], own_pair, own_kv_grads, parts_dtype
            )
            return BackwardChunk(self, kernel, buffers, queries, dq_accumulator, own_kv_grads, waits)

        self._run(schedule, prepared, begin)
        return dq(), dk, dv

    def _make_schedule(self, k: Tensor, v: Tensor, backward: bool) -> Schedule:
        # head_bytes 0 means one chunk for each head class. A single rank gains nothing from smaller
        # chunks, unless there are float32 accumulators apart from the results, or heads come from the host.
        is_wide = k.element_size() >= torch.float32.itemsize
        chunked = self.exchange is not None or not is_wide or self.load_heads is not None
        size = head_bytes(k, v) if chunked else 0
        return lower_rank(self.plan, backward=backward, head_bytes=size, chunk_bytes=self.chunk_bytes)

    def _run(self, schedule: Schedule, prepared: PreparedPass, begin: Callable[[HeadChunk], Chunk]) -> None:
        """Run a schedule, batch by batch; see [Note: batches] in `steps.py`."""
        under_way: dict[int, Chunk] = {}
        finish_header_check, batches = self.finish_header_check, prepared.batches
        note = None if self.observer is None else partial(self._note, schedule.backward, under_way)
        if note is not None:
            note("begin", 0, NOTHING_SENT)
        for number, hop, rounds in schedule.batches:
            if note is not None:
                note("send", hop, NOTHING_SENT)
            sent: list[Tensor] = []
            received: list[Tensor] = []
            for index, steps in rounds:
                # Allocate a chunk's buffers at its first batch, not before: this bounds peak memory.
                if index not in under_way:
                    under_way[index] = begin(schedule.chunks[index])
                chunk = under_way[index]
                done = bool(steps.arrived) and chunk.buffers.arrive(steps.arrived)
                if done:
                    chunk.finish()
                # Sender and receiver match messages by order alone, so keep the schedule's order.
                if steps.posted:
                    chunk.buffers.post(steps.posted, sent, received)
                if done:
                    del under_way[index]
                del chunk
            prepared_batch = batches.get(number)
            if prepared_batch is None:
                prepared_batch = batches[number] = self._prepare(rounds, under_way, sent, received)
            posting = prepared_batch.route, sent, received, hop
            pending, mark = None, None
            if finish_header_check is None:
                if sent or received:
                    pending = self._post(*posting)
            elif sent or received:
                assert self.exchange is not None, "a header check on a ring of one"
                mark = self.exchange.streams((*sent, *received)[0]).mark()
            # The chunk that started last computes hop - 1 while keys of `hop` arrive. After the last hop no
            # keys arrive. Then the chunk may compute a part of hop 0: [Note: a part for the end].
            if note is not None:
                note("compute", hop - 1, prepared_batch.posted)
            for index, steps in rounds:
                for step in steps.computed:
                    under_way[index].compute(step)
            if note is not None:
                note("wait", hop, prepared_batch.posted)
            if finish_header_check is not None:
                # This is the first batch. Finish the check even if this rank has no messages in it.
                finish_header_check()
                pending, finish_header_check = self._post_behind(mark, *posting), None
            if pending is not None:
                pending.wait()
            # Delete the references, so that the memory of buffers can be used again in the next batch.
            del sent, received, pending, posting
        if note is not None:
            note("end", 0, NOTHING_SENT)

    def _note(
        self, backward: bool, under_way: dict[int, Chunk], stage: str, hop: int, posted: PostedBatch
    ) -> None:
        assert self.observer is not None
        accumulators = sum(chunk.accumulators_bytes for chunk in under_way.values())
        phase = "backward" if backward else "forward"
        self.observer.on_batch(BatchEvent(stage, phase, hop, self.buffers.held_bytes, accumulators, posted))

    # [Note: the header while the first hop computes]
    # In most batches a rank posts messages before it launches kernels. If `finish_header_check` is not None
    # (on a GPU, with overlap), the first batch launches the kernels of hop 0 first. While these kernels run,
    # ranks compare headers; then messages are posted. The messages must not wait for the kernels. So an event
    # (`mark`) is recorded before the kernels are launched, after all buffers are allocated and packed. The
    # messages wait for this event only (`streams.py`).
    def _post_behind(
        self, mark: Any, route: Any, sent: list[Tensor], received: list[Tensor], hop: int
    ) -> InFlight | None:
        if not sent and not received:
            return None
        assert self.exchange is not None, "a header check on a ring of one"
        with self.exchange.streams((*sent, *received)[0]).behind(mark):
            return self._post(route, sent, received, hop)

    def _post(self, route: Any, sent: list[Tensor], received: list[Tensor], hop: int) -> InFlight:
        assert self.exchange is not None, "a plan with messages on a ring of one"
        pending = self.exchange.start(route, sent, received, hop)
        if not self.overlap:
            pending.wait()
        return pending

    def _prepare(
        self, rounds: Iterable[tuple[int, Round]], under_way: dict[int, Chunk],
        sent: list[Tensor], received: list[Tensor],
    ) -> PreparedBatch:  # fmt: skip
        """Compute once what all batches with these steps have in common: the route and the message sizes."""
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
