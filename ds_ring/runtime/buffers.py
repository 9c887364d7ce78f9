"""Keep memory for what travels, used again from hop to hop and from call to call.

Owns the memory of messages. A block is given back only after the wait of the batch that its buffers were in:
until then they are in flight, and nobody writes to them. On a GPU "after the wait" means later on the stream
that waited, so a block is only ever used by calls on the stream that it was made for. What is kept unused is
at most what was in use at once, so that calls of many different sizes do not pile up; `release` gives all of
it back to the system.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import Tensor

from ds_ring.runtime.streams import stream_of
from ds_ring.runtime.trace import is_fake
from ds_ring.runtime.views import Pair

ALIGNMENT = 64  # bytes; a tensor begins at a multiple of it
MOST = 32  # pairs that a block keeps


class BufferKind(NamedTuple):
    """Describe two buffers that travel together.

    Attributes:
        first, second: shapes, [B, G, slots, D] and [B, G, slots, E].
        dtype, device: of both.
        second_at: bytes from the beginning of the first to that of the second.
        nbytes: from the beginning of the first to the end of the second, a multiple of ALIGNMENT.
        fake: of a FakeTensorMode.
    """

    first: tuple[int, ...]
    second: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    second_at: int
    nbytes: int
    fake: bool


def kind_of(like: Pair, slots: int, dtype: torch.dtype) -> BufferKind:
    """Return the kind of buffers with B, G, the two head dimensions and the device of others."""
    first, second = ((*x.shape[:2], slots, x.shape[3]) for x in (like.first, like.second))
    at, more = (-(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT for shape in (first, second))
    return BufferKind(first, second, dtype, like.first.device, at, at + more, is_fake(like.first))


class Block:
    """Hold uninitialised memory, and the tensors that lie there.

    Args:
        nbytes, device: how much, and where.
        stream: the number of the stream that uses it, and that was present when it was made.
    """

    __slots__ = ("_kept", "_storage", "device", "nbytes", "stream")

    def __init__(self, nbytes: int, device: torch.device, stream: int = 0) -> None:
        self.nbytes, self.device, self.stream = nbytes, device, stream
        self._kept: dict[BufferKind, Pair] = {}
        with torch.inference_mode(False):
            self._storage = torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()

    def pair(self, kind: BufferKind) -> Pair:
        """Return two contiguous tensors of a kind in this memory, the same ones at every call."""
        found = self._kept.get(kind)
        if found is None:
            if len(self._kept) >= MOST:
                self._kept.clear()
            # Not in inference mode, or they could not be written to in a later training step.
            with torch.inference_mode(False):
                found = self._kept[kind] = Pair(
                    self._tensor(kind, kind.first, 0), self._tensor(kind, kind.second, kind.second_at)
                )
        return found

    def _tensor(self, kind: BufferKind, shape: tuple[int, ...], begin: int) -> Tensor:
        # No view: views share their count of writes, by which a write to what is in flight is found.
        tensor = torch.empty(0, dtype=kind.dtype, device=self.device)
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        return tensor.set_(self._storage, begin // kind.dtype.itemsize, shape, strides)


class Size(NamedTuple):
    """Name what free blocks are found by."""

    nbytes: int
    device: torch.device
    stream: int


class Buffers:
    """Keep free blocks by size, device and stream."""

    def __init__(self) -> None:
        self._free: OrderedDict[Size, list[Block]] = OrderedDict()
        self._lock = threading.Lock()
        self._used_bytes = self._most_bytes = self._free_bytes = 0

    @property
    def free_bytes(self) -> int:
        """Return the bytes that are kept, and not in use."""
        return self._free_bytes

    @property
    def held_bytes(self) -> int:
        """Return the bytes that are in use, or kept for the next use."""
        return self._used_bytes + self._free_bytes

    def take(self, nbytes: int, device: torch.device) -> Block:
        """Return a block of this size for the present stream."""
        size = Size(nbytes, device, stream_of(device))
        with self._lock:
            block = self._pop(size) if size in self._free else None
            # Counted before a new one is made: what is kept unused makes room for it.
            self._used_bytes += nbytes
            self._most_bytes = max(self._most_bytes, self._used_bytes)
            self._drop_what_is_too_much()
        return Block(*size) if block is None else block

    def give(self, block: Block) -> None:
        """Take a block back after use; its buffers must not be in flight any more."""
        size = Size(block.nbytes, block.device, block.stream)
        with self._lock:
            self._free.setdefault(size, []).append(block)
            # Sizes given back longest ago stand first, and go first.
            self._free.move_to_end(size)
            self._used_bytes -= block.nbytes
            self._free_bytes += block.nbytes
            self._drop_what_is_too_much()

    def release(self) -> None:
        """Free everything that is not in use."""
        with self._lock:
            while self._free:
                self._drop_oldest()
            # The bound falls as well, or as much as before would be kept again.
            self._most_bytes = self._used_bytes

    def _drop_what_is_too_much(self) -> None:
        while self._free_bytes > self._most_bytes - self._used_bytes:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._pop(next(iter(self._free)))

    def _pop(self, size: Size) -> Block:
        free = self._free[size]
        block = free.pop()
        if not free:
            del self._free[size]
        self._free_bytes -= block.nbytes
        return block
