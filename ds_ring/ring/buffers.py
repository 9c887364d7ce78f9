"""The buffers of a head chunk: take them from the pool, pack messages to send, accumulate those that arrive.

`pool.py` owns the memory of K and V, and its layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ds_ring.comm.device_tables import DeviceTables
from ds_ring.comm.messages import Label, TokenRange
from ds_ring.comm.streams import get_stream_number
from ds_ring.kernels.interface import ALL_HEADS, Rows
from ds_ring.ring.accumulator import Accumulator
from ds_ring.ring.pool import (
    Block,
    BufferKinds,
    Buffers,
    Pair,
    check_keys_apart,
    get_payload_dtypes,
    make_buffer_kind,
    tokens_first,
)
from ds_ring.schedule.steps import (
    RESULTS,
    SHARD,
    Accumulate,
    Free,
    HeadChunk,
    Payload,
    Recv,
    Send,
)

FEW_RANGES = 16  # up to this number ranges are copied as slices, above it by an index tensor


def _move(
    target: Pair, source: Pair, step: Send | Accumulate, tables: DeviceTables, *, add: bool = False
) -> None:
    """Copy (or add) slots of a pair to those of another one, in the dtype of the target.

    An `Accumulate` names slots of the target. A `Send` names slots of the source. The other pair has exactly
    as many slots as the step names.
    """
    sides = [(target.k, source.k, 2), (target.v, source.v, 2)]
    if target.memory and len(target.memory) == len(source.memory):
        sides = [(to, of, 0) for to, of in zip(target.memory, source.memory, strict=True)]
    gather = isinstance(step, Send)
    for to, of, dim in sides:
        if len(step.ranges) > FEW_RANGES:
            index = tables.slot_index(step.part, to.device)
            if not gather:
                (to.index_add_ if add else to.index_copy_)(dim, index, of.to(to.dtype))
            elif to.dtype == of.dtype and to.is_contiguous():
                torch.index_select(of, dim, index, out=to)
            else:
                to.copy_(torch.index_select(of, dim, index))
            continue
        offset = 0
        for start, end in step.ranges:
            count = end - start
            at_target, at_source = (offset, start) if gather else (start, offset)
            part, source_part = to.narrow(dim, at_target, count), of.narrow(dim, at_source, count)
            (part.add_ if add else part.copy_)(source_part)
            offset += count


def select_some_heads(heads: slice, *tensors: Tensor) -> Sequence[Tensor]:
    """Return some heads of tensors [B, H, ...], a slice with both ends; the tensors if it is all heads."""
    if heads.stop - heads.start == tensors[0].shape[1] and heads.step in (None, 1):
        return tensors
    return [x[:, heads] for x in tensors]


Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # q, k, v, out and lse of a pass


class HeadSource(Protocol):
    """Gives the saved tensors of one head chunk after the other."""

    def load(self, chunk: HeadChunk) -> Saved:
        """Return q, k, v, out and lse of the next chunk's heads, on the device."""


def select_chunk(saved: Saved, chunk: HeadChunk) -> Saved:
    """Return views of a chunk's heads."""
    q, k, v, out, lse = saved
    q, out, lse = select_some_heads(chunk.query_heads, q, out, lse)
    k, v = select_some_heads(chunk.kv_heads, k, v)
    return q, k, v, out, lse


class RingBuffers:
    """The buffers of one head chunk.

    Args:
        chunk: the head chunk whose steps run.
        pool: reuses the memory of buffers from hop to hop and from pass to pass.
        kinds: sizes and dtypes of the buffers. They are the same in each pass of a shape; missing ones are
            added here.
        shard: K and V of the own tokens.
        own_kv_grads: sums of their gradients; None in a forward pass.
        parts_dtype: dtype of `Payload.PARTS`; None in a forward pass.
    """

    def __init__(
        self, chunk: HeadChunk, pool: Buffers, kinds: BufferKinds, shard: Pair,
        own_kv_grads: Accumulator | None = None, parts_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.chunk, self.own_kv_grads = chunk, own_kv_grads
        self._pool, self._kinds = pool, kinds
        # SHARD and RESULTS are the caller's tensors, which never go to the pool. All other buffers come from
        # it, including the copies made for sends, except a kernel's tensors (`adopt`).
        self._pairs = {SHARD: shard}
        self._dtypes = get_payload_dtypes(
            shard.k.dtype, None if own_kv_grads is None else own_kv_grads.dtype, parts_dtype
        )
        apart = shard.k.shape[1] == 1 and check_keys_apart(shard)
        self._apart = {Payload.PARTS, Payload.KEYS} if apart else {Payload.PARTS}
        self._blocks: dict[int, Block] = {}
        self._stream: int | None = None  # found once, by the first buffer that is taken

    def pair(self, buffer: int) -> Pair:
        """Return the tensors of a buffer; those of a new buffer are uninitialised."""
        pair = self._pairs.get(buffer)
        if pair is None:
            payload, slots = self.chunk.steps.buffers[buffer]
            pair = self._take(buffer, slots, payload)
        return pair

    def arrive(self, steps: Iterable[Accumulate | Free]) -> bool:
        """Accumulate and free the messages of the batch before; return whether RESULTS are final."""
        final = returned = False
        for step in steps:
            if isinstance(step, Accumulate):
                if step.buffer == RESULTS:
                    returned = True
                elif returned and self.own_kv_grads is not None:
                    # The pool may give this step the memory of returned parts: merge them before.
                    self.own_kv_grads.merge()
                self._accumulate(step)
            elif step.buffer == RESULTS:  # the caller's memory, not the pool's
                final = True
            else:  # A buffer may have no block: fake tensors, an adopted one, or a send without a copy.
                self._pairs.pop(step.buffer, None)
                block = self._blocks.pop(step.buffer, None)
                if block is not None:
                    self._pool.give(block)
        # Merge returned parts now at the latest: `Free` gave their memory back to the pool, and the messages
        # that this batch posts may take it. If the results are final, `finish` merges the parts before that.
        if returned and not final:
            assert self.own_kv_grads is not None, "gradients in a forward pass"
            self.own_kv_grads.merge()
        return final

    def post(self, steps: Iterable[Send | Recv], sent: list[Tensor], received: list[Tensor]) -> None:
        """Append the tensor of every send and receive to these lists, in the order of the steps."""
        for step in steps:
            if isinstance(step, Send):
                sent += self._pack(step)
            else:
                for x in self.pair(step.buffer).memory:
                    received.append(x if step.count == x.shape[0] else x.narrow(0, step.first, step.count))

    def labels(self, step: Send | Recv) -> list[Label]:
        """Return the labels of a step's messages; `check_messages` and virtual ranks read them."""
        tokens = TokenRange(step.origin, step.slots, self.chunk.kv_heads)
        dtype, names = self._dtypes[step.payload], step.payload.names
        messages = names.split("/") if step.payload in self._apart else [names]
        return [Label(step.peer, tensor_index, step.count, dtype, tokens) for tensor_index in messages]

    def adopt(self, buffer: int, parts: tuple[Tensor, ...] | None) -> bool:
        """Make the kernel's dK and dV [B, G, slots, ...] the buffer, so that they are sent without a copy.

        Return False if that is not possible: there are no such tensors, the buffer does not have PARTS of
        their dtype, or the heads of a token are not adjacent in memory.
        """
        payload = self.chunk.steps.buffers[buffer].payload
        if parts is None or payload is not Payload.PARTS:
            return False
        fits = {x.dtype for x in parts} == {self._dtypes[payload]}
        pair = tokens_first(*parts) if fits else None
        if pair is None:
            return False
        self._pairs[buffer] = pair
        return True

    def _take(self, buffer: int, slots: int, payload: Payload) -> Pair:
        # All pairs have the batch size, heads and head dimensions of the own shard.
        shard, kind = self._pairs[SHARD], self._kinds.get(buffer)
        if kind is None:
            kind = make_buffer_kind(shard, slots, self._dtypes[payload], payload in self._apart)
            self._kinds[buffer] = kind
        # Fake tensors use no memory, and a tensor of one FakeTensorMode cannot be used in another.
        if kind.fake:
            taken = kind.pair(shard.k.new_empty(math.prod(kind.shape), dtype=kind.dtype))
        else:
            if self._stream is None:
                self._stream = get_stream_number(kind.device)
            block = self._blocks[buffer] = self._pool.take(kind, self._stream)
            taken = block.pair(kind)
        self._pairs[buffer] = taken
        return taken

    def _pack(self, step: Send) -> Sequence[Tensor]:
        """Return the tensors to send: views of the buffer (`Send.in_place`), or a packed copy.

        One range of the shard is sent in place, too, if K and V travel apart and their tokens are dense.
        """
        pair, in_place = self._pairs[step.buffer], step.in_place
        if step.buffer == SHARD and len(step.ranges) == 1 and step.payload in self._apart:
            dense = tokens_first(pair.k, pair.v)
            pair, in_place = (pair, False) if dense is None else (dense, True)
        if in_place:
            start, end = step.ranges[0]
            if len(pair.memory) == 1:  # the usual case
                return (pair.memory[0].narrow(0, start, end - start),)
            return [x.narrow(0, start, end - start) for x in pair.memory]
        packed = self.pair(step.packed)
        _move(packed, pair, step, self._pool.tables)
        return packed.memory

    def _accumulate(self, step: Accumulate) -> None:
        """Add gradients to a buffer, or write keys into a buffer that their first part allocates."""
        if step.buffer == RESULTS:
            assert self.own_kv_grads is not None, "gradients in a forward pass"
            self._add_returned(self.own_kv_grads, step)
            return
        # Keys from several ranks may fill one buffer: the first part allocates it.
        is_sum = self.chunk.steps.buffers[step.buffer].payload is Payload.GRADIENTS
        source, target = self._pairs[step.source], self.pair(step.buffer)
        _move(target, source, step, self._pool.tables, add=is_sum)

    def _add_returned(self, own_kv_grads: Accumulator, step: Accumulate) -> None:
        """Add what returned to the gradients of the own shard."""
        (first, second, _), offset = self._pairs[step.source], 0
        if len(step.ranges) > FEW_RANGES:
            dk, dv = own_kv_grads.so_far()
            _move(Pair(dk, dv), self._pairs[step.source], step, self._pool.tables, add=True)
            return
        for start, end in step.ranges:
            count = end - start
            parts = first.narrow(2, offset, count), second.narrow(2, offset, count)
            own_kv_grads.add(Rows(start, 1, count), ALL_HEADS, *parts)
            offset += count
