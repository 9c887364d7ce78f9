"""Copy small tables to a device without a wait of the host, and cache them there; read numbers with one.

Owns the copy through pinned memory, the cache (`ByteLRU`) with its bound in bytes, and indices of slots.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from ds_ring.comm.streams import active_fake_mode, get_stream_number
from ds_ring.masks.slots import SlotRanges, expand_ranges

MAX_TABLE_BYTES = 256 << 20
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def leave_inference_mode(function: F) -> F:
    """Let a function make its tensors outside of inference mode, because later calls read them.

    An evaluation in inference mode may be the first that needs a table. A training step could not save an
    inference tensor for its backward pass, nor write to it.
    """
    return torch.inference_mode(False)(function)


class ByteLRU(Generic[T]):
    """Cache values up to a number of bytes; evict the least recently used one, but never the newest."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.nbytes = max_bytes, 0
        self._entries: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> T | None:
        """Return the value of a key; None if it is not cached."""
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key][0]

    def add(self, key: Hashable, value: T, nbytes: int) -> T:
        """Cache a value and return it; evict others until all fit."""
        # A running total: a sum over all entries would take longer with every batch of documents.
        self._entries[key] = value, nbytes
        self.nbytes += nbytes
        while self.nbytes > self.max_bytes and len(self._entries) > 1:
            self.nbytes -= self._entries.popitem(last=False)[1][1]
        return value


def to_device(table: Tensor, device: torch.device) -> Tensor:
    """Return a CPU tensor's copy on a device, through pinned memory: a pageable copy makes the host wait."""
    if device.type != "cuda":
        return table.to(device)
    # Fake tensors cannot be pinned, and copying one waits for nothing.
    pinned = table if active_fake_mode() is not None else table.pin_memory()
    return pinned.to(device, non_blocking=True)


def on_device(table: np.ndarray, device: torch.device) -> Tensor:
    """Return an array on a device, without a wait of the host; on the CPU the tensor shares its memory."""
    return to_device(torch.from_numpy(table), device)


def stream_key(device: torch.device) -> tuple[torch.device, int, Any]:
    """Return device, stream and fake mode: a copy is ordered before later work of its own stream only."""
    mode = active_fake_mode()
    return device, get_stream_number(device) if mode is None else 0, mode


def to_host(numbers: Tensor) -> np.ndarray:
    """Return the numbers of a tensor on a device. The host waits for the device."""
    return numbers.cpu().numpy()


class DeviceTables:
    """Cache small tables on their devices, by contents; dropped with the object that makes this one."""

    def __init__(self, max_bytes: int = MAX_TABLE_BYTES) -> None:
        self._tables: ByteLRU[Tensor] = ByteLRU(max_bytes)

    @leave_inference_mode
    def slot_index(self, ranges: SlotRanges, device: torch.device) -> Tensor:
        """Return the slots of some ranges as an index, int64 [n]."""
        key = (ranges.tobytes(), *stream_key(device))
        table = self._tables.get(key)
        if table is None:
            index = to_device(torch.from_numpy(expand_ranges(ranges)), device)
            table = self._tables.add(key, index, index.nbytes)
        return table

    @leave_inference_mode
    def array(self, table: np.ndarray, device: torch.device) -> Tensor:
        """Return a small array as a tensor on a device."""
        key = (table.tobytes(), table.shape, table.dtype.str, *stream_key(device))
        resident = self._tables.get(key)
        if resident is None:
            resident = self._tables.add(key, on_device(table, device), table.nbytes)
        return resident

    @leave_inference_mode
    def numbers(
        self, numbers: tuple[Any, ...], device: torch.device, dtype: torch.dtype = torch.int64
    ) -> Tensor:
        """Return numbers (or rows of numbers) as a tensor on a device."""
        key = (numbers, dtype, *stream_key(device))
        table = self._tables.get(key)
        if table is None:
            tensor = to_device(torch.tensor(numbers, dtype=dtype, device="cpu"), device)
            table = self._tables.add(key, tensor, tensor.nbytes)
        return table
