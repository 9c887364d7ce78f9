"""Send, receive, accumulate and free the buffers of a head chunk under way, as the steps say.

Owns the tensors behind the buffer numbers of `schedule/steps.py`. When a step is done is the ring pass's.
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

FEW_RANGES = 16  # up to here slices are copied, beyond an index is used

Kinds = dict[int, BufferKind]  # by the number of a buffer


class RingBuffers:
    """Hold the buffers of one head chunk.

    Args:
        chunk: whose steps are run.
        pool: keeps the memory of buffers from hop to hop and from pass to pass.
        kinds: of the buffers as far as they are known; filled here, and the same at each pass of a shape.
        views: of the pass; knows the buffers while they are in use.
        shard: K and V of the own tokens.
        home: accumulators of their gradients; None in a forward pass.
    """

    def __init__(
        self, chunk: HeadChunk, pool: Buffers, kinds: Kinds, views: Views, shard: Pair,
        home: Pair | None = None,
    ) -> None:  # fmt: skip
        self.chunk, self.views = chunk, views
        self._pool, self._kinds = pool, kinds
        # SHARD and RESULTS are the caller's tensors: no step gives them back. All others are the pool's,
        # copies made for sends among them.
        self._pairs = {SHARD: shard} if home is None else {SHARD: shard, RESULTS: home}
        self._blocks: dict[int, Block] = {}
        for pair in self._pairs.values():
            views.add(pair)

    def pair(self, buffer: int) -> Pair:
        """Return the tensors of a buffer; those of one that is new are uninitialised."""
        found = self._pairs.get(buffer)
        if found is None:
            payload, slots = self.chunk.steps.buffers[buffer]
            found = self._take(buffer, slots, payload)
        return found

    def arrive(self, steps: Iterable[Accumulate | Free]) -> bool:
        """Add up and free what the messages of the batch before brought; return whether RESULTS are final."""
        final = False
        for step in steps:
            if isinstance(step, Accumulate):
                self._accumulate(step)
            elif step.buffer == RESULTS:  # none of it is the pool's memory
                final = True
            else:
                self._free(step.buffer)
        return final

    def post(self, steps: Iterable[Send | Recv], sent: list[Tensor], received: list[Tensor]) -> None:
        """Add what steps send and receive to these lists: two tensors each, in their order."""
        for step in steps:
            if isinstance(step, Send):
                sent += self._packed(step)
            else:
                pair = self.pair(step.buffer)
                received += pair.first, pair.second

    def labels(self, step: Send | Recv) -> list[Label]:
        """Return what the schedule and the agreement say of the two messages of a step."""
        tokens = TokenRange(step.origin, step.slots, self.chunk.kv_heads)
        dtype = self._dtype(step.payload)
        return [Label(step.peer, name, step.count, dtype, tokens) for name in step.payload.names]

    def _free(self, buffer: int) -> None:
        """Give a buffer back; a copy that no send needed was never taken."""
        taken = self._pairs.pop(buffer, None)
        if taken is not None:
            self.views.drop(taken)
            if (block := self._blocks.pop(buffer, None)) is not None:  # none of fake tensors
                self._pool.give(block)

    def _take(self, buffer: int, slots: int, payload: Payload) -> Pair:
        # The own shard has the heads, and the two dimensions, of all pairs.
        shard, kind = self._pairs[SHARD], self._kinds.get(buffer)
        if kind is None:
            kind = self._kinds[buffer] = kind_of(shard, slots, self._dtype(payload))
        # Fake tensors take no memory, and those of one FakeTensorMode cannot be used in another.
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
        """Return the dtype of a payload: K and V have that of the inputs, dK and dV the accumulators'."""
        if payload is Payload.ROUNDED:
            return torch.bfloat16
        return self._pairs[SHARD if payload is Payload.KEYS else RESULTS].first.dtype

    def _packed(self, step: Send) -> Two:
        """Return what is sent, without a copy where it lies side by side in the dtype of the payload."""
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
        """Add gradients to what is there; write keys into a buffer that the first of them takes."""
        # Keys from several ranks may fill one buffer: the first part takes it, later ones find it.
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
        """Return slots of a pair; the tensors themselves where these are all of them."""
        first, second = pair.first, pair.second
        if end - start == first.shape[2]:
            return first, second
        return self.views.of(_slots, first, second, start, end)


def _slots(first: Tensor, second: Tensor, start: int, end: int) -> Two:
    return first[:, :, start:end], second[:, :, start:end]
