"""Keep buffers for what travels, used again from hop to hop and from call to call.

Owns the memory of messages. A buffer is given back only after the wait of the batch that it was in: until
then it is in flight, and nobody writes to it. What is kept unused is at most what was in use at once, so that
calls of many different sizes do not pile up; `release` gives all of it back to the system.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict

import torch
from torch import Tensor

from ds_ring.runtime.trace import is_fake

Key = tuple[tuple[int, ...], torch.dtype, torch.device]


class Buffers:
    """Keep free buffers by shape, dtype and device."""

    def __init__(self) -> None:
        self._free: OrderedDict[Key, list[Tensor]] = OrderedDict()
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

    def take(self, like: Tensor, slots: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised, contiguous [B, G, slots, D] with B, G, D and the device of `like`."""
        shape = (*like.shape[:2], slots, like.shape[3])
        # Fake tensors take no memory, and those of one FakeTensorMode cannot be used in another.
        if is_fake(like):
            return like.new_empty(shape, dtype=dtype)
        key = (shape, dtype, like.device)
        with self._lock:
            tensor = self._pop(key) if key in self._free else None
            size = math.prod(shape) * dtype.itemsize
            # Counted before the new tensor is made: what is kept unused makes room for it.
            self._used_bytes += size
            self._most_bytes = max(self._most_bytes, self._used_bytes)
            self._drop_what_is_too_much()
        if tensor is not None:
            return tensor
        if not torch.is_inference_mode_enabled():
            return torch.empty(shape, dtype=dtype, device=like.device)
        with torch.inference_mode(False):  # or it could not be written to in a later training step
            return torch.empty(shape, dtype=dtype, device=like.device)

    def give(self, tensor: Tensor) -> None:
        """Take a buffer back after use; it must not be in flight any more."""
        if is_fake(tensor):
            return
        key = (tuple(tensor.shape), tensor.dtype, tensor.device)
        with self._lock:
            self._free.setdefault(key, []).append(tensor)
            # Shapes given back longest ago stand first, and go first.
            self._free.move_to_end(key)
            self._used_bytes -= tensor.nbytes
            self._free_bytes += tensor.nbytes
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

    def _pop(self, key: Key) -> Tensor:
        tensor = self._free[key].pop()
        if not self._free[key]:
            del self._free[key]
        self._free_bytes -= tensor.nbytes
        return tensor
