"""Send, receive, accumulate and free the buffers of a head chunk, as its steps say.

Owns the tensors behind the buffer numbers of `schedule/steps.py`. The ring pass decides when a step runs.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ds_ring.runtime.buffers import Block, BufferKind, Buffers, kind_of
from ds_ring.runtime.messages import Label, TokenRange
from ds_ring.runtime.to_device import slot_index
from ds_ring.runtime.views import Pair, Two, Views
from ds_ring.schedule.steps import RESULTS, SHARD, Accumulate, Free, HeadChunk, Payload, Recv, Send

FEW_RANGES = 16  # up to this number ranges are copied as slices, above it by an index tensor

Kinds = dict[int, BufferKind]  # by buffer number


class RingBuffers:
    """The buffers of one head chunk.

    Args:
        chunk: the head chunk whose steps run.
        pool: reuses the memory of buffers from hop to hop and from pass to pass.
        kinds: sizes and dtypes of the buffers. They are the same in each pass of a shape; missing ones are
            added here.
        views: the view cache of the pass, to which the buffers are added while they are in use.
        shard: K and V of the own tokens.
        home: accumulators of their gradients; None in a forward pass.
    """

    def __init__(
        self, chunk: HeadChunk, pool: Buffers, kinds: Kinds, views: Views, shard: Pair,
        home: Pair | None = None,
    ) -> None:  # fmt: skip
        self.chunk, self.views = chunk, views
        self._pool, self._kinds = pool, kinds
        # SHARD and RESULTS are the caller's tensors, which no step frees. All other buffers come from the
        # pool, including the copies made for sends.
        self._pairs = {SHARD: shard} if home is None else {SHARD: shard, RESULTS: home}
        self._blocks: dict[int, Block] = {}
        for pair in self._pairs.values():
            views.add(pair)

    def pair(self, buffer: int) -> Pair:
        """Return the tensors of a buffer; those of a new buffer are uninitialised."""
        found = self._pairs.get(buffer)
        if found is None:
            payload, slots = self.chunk.steps.buffers[buffer]
            found = self._take(buffer, slots, payload)
        return found

    def arrive(self, steps: Iterable[Accumulate | Free]) -> bool:
        """Accumulate and free the messages of the batch before; return whether RESULTS are final."""
        final = False
        for step in steps:
            if isinstance(step, Accumulate):
                self._accumulate(step)
            elif step.buffer == RESULTS:  # the caller's memory, not the pool's
                final = True
            else:
                self._free(step.buffer)
        return final

    def post(self, steps: Iterable[Send | Recv], sent: list[Tensor], received: list[Tensor]) -> None:
        """Append the two tensors of every send and receive to these lists, in the order of the steps."""
        for step in steps:
            if isinstance(step, Send):
                sent += self._packed(step)
            else:
                pair = self.pair(step.buffer)
                received += pair.first, pair.second

    def labels(self, step: Send | Recv) -> list[Label]:
        """Return the labels of a step's two messages, by which a trace and the agreement identify them."""
        tokens = TokenRange(step.origin, step.slots, self.chunk.kv_heads)
        dtype = self._dtype(step.payload)
        return [Label(step.peer, name, step.count, dtype, tokens) for name in step.payload.names]

    def _free(self, buffer: int) -> None:
        """Give a buffer back to the pool; the copy of a send that needed none was never allocated."""
        taken = self._pairs.pop(buffer, None)
        if taken is not None:
            self.views.drop(taken)
            if (block := self._blocks.pop(buffer, None)) is not None:  # fake tensors have no block
                self._pool.give(block)

    def _take(self, buffer: int, slots: int, payload: Payload) -> Pair:
        # All pairs have the batch size, heads and head dimensions of the own shard.
        shard, kind = self._pairs[SHARD], self._kinds.get(buffer)
        if kind is None:
            kind = self._kinds[buffer] = kind_of(shard, slots, self._dtype(payload))
        # Fake tensors use no memory, and a tensor of one FakeTensorMode cannot be used in another.
        if kind.fake:
            taken = Pair(
                *(shard.first.new_empty(shape, dtype=kind.dtype) for shape in (kind.first, kind.second))
            )
        else:
            block = self._blocks[buffer] = self._pool.take(kind.nbytes, kind.device)
            taken = block.pair(kind)
        self._pairs[buffer] = taken
        self.views.add(taken)
        return taken

    def _dtype(self, payload: Payload) -> torch.dtype:
        """Return the dtype of a payload: the inputs' for K and V, the accumulators' for dK and dV."""
        if payload is Payload.ROUNDED:
            return torch.bfloat16
        return self._pairs[SHARD if payload is Payload.KEYS else RESULTS].first.dtype

    def _packed(self, step: Send) -> Two:
        """Return the tensors to send; a copy only if the slots are not contiguous or the dtype differs."""
        pair, ranges = self._pairs[step.buffer], step.ranges
        # A slice of slots is contiguous if it is all of a dense buffer, or if B * G is 1.
        if len(ranges) == 1 and step.payload is not Payload.ROUNDED:
            first, second = self._slots(pair, *ranges[0])
            if first.is_contiguous() and second.is_contiguous():
                return first, second
        packed = self.pair(step.packed)
        if len(ranges) > FEW_RANGES:
            for whole, part in ((pair.first, packed.first), (pair.second, packed.second)):
                index = slot_index(step.part, whole.device)
                if whole.dtype == part.dtype:
                    torch.index_select(whole, 2, index, out=part)
                else:
                    part.copy_(torch.index_select(whole, 2, index))
            return packed.first, packed.second
        offset = 0
        for start, end in ranges:
            parts = self._slots(packed, offset, offset + end - start)
            for part, whole in zip(parts, self._slots(pair, start, end), strict=True):
                part.copy_(whole)
            offset += end - start
        return packed.first, packed.second

    def _accumulate(self, step: Accumulate) -> None:
        """Add gradients to a buffer, or write keys into a buffer that their first part allocates."""
        # Keys from several ranks may fill one buffer: the first part allocates it.
        target, source = self.pair(step.buffer), self._pairs[step.source]
        add = self.chunk.steps.buffers[step.buffer].payload is Payload.GRADIENTS
        if len(step.ranges) > FEW_RANGES:
            for whole, part in ((target.first, source.first), (target.second, source.second)):
                index = slot_index(step.part, whole.device)
                (whole.index_add_ if add else whole.index_copy_)(2, index, part.to(whole.dtype))
            return
        offset = 0
        for start, end in step.ranges:
            parts = self._slots(source, offset, offset + end - start)
            for there, part in zip(self._slots(target, start, end), parts, strict=True):
                (there.add_ if add else there.copy_)(part)
            offset += end - start

    def _slots(self, pair: Pair, start: int, end: int) -> Two:
        """Return some slots of a pair; the tensors themselves if these are all slots."""
        first, second = pair.first, pair.second
        if end - start == first.shape[2]:
            return first, second
        return self.views.of(_slots, first, second, start, end)


def _slots(first: Tensor, second: Tensor, start: int, end: int) -> Two:
    return first[:, :, start:end], second[:, :, start:end]
