"""Send, receive, accumulate and free the buffers of a head chunk under way, as the steps say.

Owns the tensors behind the buffer numbers of `schedule/steps.py`. When a step is done is the ring pass's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ds_ring.runtime.buffers import Buffers
from ds_ring.runtime.messages import Message, TokenRange
from ds_ring.runtime.to_device import slot_index
from ds_ring.schedule.steps import RESULTS, SHARD, Accumulate, HeadChunk, Payload, Recv, Send

FEW_RANGES = 16  # up to here slices are copied, beyond an index is used


class Pair(NamedTuple):
    """Hold two tensors that travel together: K and V, or dK and dV; [B, G, slots, D] each."""

    first: Tensor
    second: Tensor


class RingBuffers:
    """Hold the buffers of one head chunk.

    Args:
        chunk: whose steps are run.
        pool: where memory comes from.
        shard: K and V of the own tokens.
        home: accumulators of their gradients; None in a forward pass.
    """

    def __init__(self, chunk: HeadChunk, pool: Buffers, shard: Pair, home: Pair | None = None) -> None:
        self.chunk, self.pool = chunk, pool
        # SHARD and RESULTS are the caller's tensors: no step gives them to the pool.
        self._pairs = {SHARD: shard} if home is None else {SHARD: shard, RESULTS: home}
        # Copies made for sends, by the number of their buffer: at most the two tensors of a payload.
        self._packed: dict[int, list[Tensor]] = {}

    def pair(self, buffer: int) -> Pair:
        """Return the tensors of a buffer."""
        return self._pairs[buffer]

    def messages(self, step: Send | Recv) -> list[Message]:
        """Return the two messages of a step, with what the schedule and the agreement say of them."""
        pair = self._pack(step) if isinstance(step, Send) else self._take(step.buffer)
        tokens = TokenRange(step.origin, step.slots, self.chunk.kv_heads)
        dtype, (first, second) = self._dtype(step.payload), step.payload.names
        return [
            Message(pair.first, step.peer, first, step.count, dtype, tokens),
            Message(pair.second, step.peer, second, step.count, dtype, tokens),
        ]

    def gradients(self, buffer: int) -> Pair:
        """Return accumulators for a hop, uninitialised: fresh ones, or those of the own shard."""
        return self._pairs[buffer] if buffer in self._pairs else self._take(buffer)

    def accumulate(self, step: Accumulate) -> None:
        """Add gradients to what is there; write keys into a buffer that the first of them takes."""
        # Keys from several ranks may fill one buffer: the first part takes it, later ones find it.
        fresh = step.buffer not in self._pairs
        target = self._take(step.buffer) if fresh else self._pairs[step.buffer]
        add = self.chunk.steps.buffers[step.buffer].payload is Payload.GRADIENTS
        for tensor, part in zip(target, self._pairs[step.source], strict=True):
            _put(tensor, step, part, add)

    def free(self, buffer: int) -> None:
        """Give a buffer back; a copy that no send needed was never taken."""
        tensors = self._pairs.pop(buffer) if buffer in self._pairs else self._packed.pop(buffer, [])
        for tensor in tensors:
            self.pool.give(tensor)

    def _take(self, buffer: int) -> Pair:
        payload, slots = self.chunk.steps.buffers[buffer]
        # The own shard has the heads, and the two dimensions, of all pairs.
        dtype, shard, take = self._dtype(payload), self._pairs[SHARD], self.pool.take
        pair = Pair(take(shard.first, slots, dtype), take(shard.second, slots, dtype))
        self._pairs[buffer] = pair
        return pair

    def _dtype(self, payload: Payload) -> torch.dtype:
        """Return the dtype of a payload: K and V have that of the inputs, dK and dV the accumulators'."""
        if payload is Payload.ROUNDED:
            return torch.bfloat16
        return self._pairs[SHARD if payload is Payload.KEYS else RESULTS].first.dtype

    def _pack(self, step: Send) -> Pair:
        """Return what is sent, without a copy where it lies side by side in the dtype of the payload."""
        pair = self._pairs[step.buffer]
        return Pair(self._packed_part(pair.first, step), self._packed_part(pair.second, step))

    def _packed_part(self, tensor: Tensor, step: Send) -> Tensor:
        # A slice of slots is contiguous if it is all of a dense buffer, or if B * G is 1.
        ranges, dtype = step.ranges, self._dtype(step.payload)
        if len(ranges) == 1 and tensor.dtype == dtype:
            part = _slots(tensor, *ranges[0])
            if part.is_contiguous():
                return part
        packed = self.pool.take(tensor, step.count, dtype)
        self._packed.setdefault(step.packed, []).append(packed)
        if len(ranges) > FEW_RANGES:
            index = slot_index(step.part, tensor.device)
            if tensor.dtype != dtype:
                return packed.copy_(torch.index_select(tensor, 2, index))
            return torch.index_select(tensor, 2, index, out=packed)
        offset = 0
        for start, end in ranges:
            _slots(packed, offset, offset + end - start).copy_(_slots(tensor, start, end))
            offset += end - start
        return packed


def _slots(x: Tensor, start: int, end: int) -> Tensor:
    """Return slots of x; x itself where these are all of them."""
    return x if end - start == x.shape[2] else x[:, :, start:end]


def _put(tensor: Tensor, step: Accumulate, part: Tensor, add: bool) -> None:
    """Add packed slots to what is where they belong, or write them there."""
    if len(step.ranges) > FEW_RANGES:
        index = slot_index(step.part, tensor.device)
        (tensor.index_add_ if add else tensor.index_copy_)(2, index, part.to(tensor.dtype))
        return
    offset = 0
    for start, end in step.ranges:
        there, piece = _slots(tensor, start, end), _slots(part, offset, offset + end - start)
        (there.add_ if add else there.copy_)(piece)
        offset += end - start
