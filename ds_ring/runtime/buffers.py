"""Keep buffers for what travels, used again from hop to hop and from call to call.

Owns the memory of messages. A buffer is given back only after the wait of the batch that it was in: until
then it is in flight, and nobody writes to it. What is kept unused is at most what was in use at once, so that
calls of many different sizes do not pile up; `release` gives all of it back to the system.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from ds_ring.runtime.trace import is_fake
from ds_ring.runtime.views import Pair


class BufferKind(NamedTuple):
    """Describe two buffers that travel together, of a dtype on a device, and their bytes.

    Attributes:
        first, second: shapes, [B, G, slots, D] and [B, G, slots, E].
        dtype, device, nbytes: of both.
        fake: of a FakeTensorMode.
    """

    first: tuple[int, ...]
    second: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    nbytes: int
    fake: bool


def kind_of(like: Pair, slots: int, dtype: torch.dtype) -> BufferKind:
    """Return the kind of buffers with B, G, the two head dimensions and the device of others."""
    first, second = ((*x.shape[:2], slots, x.shape[3]) for x in (like.first, like.second))
    nbytes = (math.prod(first) + math.prod(second)) * dtype.itemsize
    return BufferKind(first, second, dtype, like.first.device, nbytes, is_fake(like.first))


class PooledPair(Pair):
    """Hold two buffers of a pool, and their views.

    Args:
        first, second, kind: the buffers.
    """

    __slots__ = ("kind",)

    def __init__(self, first: Tensor, second: Tensor, kind: BufferKind) -> None:
        super().__init__(first, second)
        self.kind = kind


class Buffers:
    """Keep free buffers by shape, dtype and device, in pairs that travel together."""

    def __init__(self) -> None:
        self._free: OrderedDict[BufferKind, list[PooledPair]] = OrderedDict()
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

    def take(self, kind: BufferKind, like: Pair) -> PooledPair:
        """Return uninitialised, contiguous buffers of a kind; fake if `like` is."""
        # Fake tensors take no memory, and those of one FakeTensorMode cannot be used in another.
        if kind.fake:
            first, second = (like.first.new_empty(x, dtype=kind.dtype) for x in (kind.first, kind.second))
            return PooledPair(first, second, kind)
        with self._lock:
            pair = self._pop(kind) if kind in self._free else None
            # Counted before the new tensor is made: what is kept unused makes room for it.
            self._used_bytes += kind.nbytes
            if self._used_bytes > self._most_bytes:
                self._most_bytes = self._used_bytes
            if self._free_bytes > self._most_bytes - self._used_bytes:
                self._drop_what_is_too_much()
        return _made(kind) if pair is None else pair

    def give(self, pair: PooledPair) -> None:
        """Take buffers back after use; they must not be in flight any more."""
        kind = pair.kind
        if kind.fake:
            return
        with self._lock:
            free = self._free.get(kind)
            if free is None:
                self._free[kind] = [pair]
            else:
                free.append(pair)
                # Shapes given back longest ago stand first, and go first.
                self._free.move_to_end(kind)
            self._used_bytes -= kind.nbytes
            self._free_bytes += kind.nbytes
            if self._free_bytes > self._most_bytes - self._used_bytes:
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

    def _pop(self, kind: BufferKind) -> PooledPair:
        free = self._free[kind]
        pair = free.pop()
        if not free:
            del self._free[kind]
        self._free_bytes -= kind.nbytes
        return pair


def _made(kind: BufferKind) -> PooledPair:
    # Not in inference mode, or they could not be written to in a later training step.
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
        first = torch.empty(kind.first, dtype=kind.dtype, device=kind.device)
        return PooledPair(first, torch.empty(kind.second, dtype=kind.dtype, device=kind.device), kind)
