"""Move small tables to a device without making the host wait for it.

Owns the copy, how much of what was copied is kept (`Kept`), and indices of slots.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ds_ring.masks.slot_ranges import SlotRanges, expand_ranges

KEPT_BYTES = 256 << 20  # of indices
T = TypeVar("T")


class Kept(Generic[T]):
    """Keep what lies on a device, up to a number of bytes; what was used longest ago goes.

    Args:
        most_bytes: that are kept; the latest one is kept however large it is.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.nbytes = most_bytes, 0
        self._found: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: Hashable) -> T | None:
        """Return what is kept by a key."""
        if key not in self._found:
            return None
        self._found.move_to_end(key)
        return self._found[key][0]

    def add(self, key: Hashable, value: T, nbytes: int) -> T:
        """Keep a value, and let go of others until all fit; return it."""
        # A running total: a sum over all that is kept would grow with every batch of documents.
        self._found[key] = value, nbytes
        self.nbytes += nbytes
        while self.nbytes > self.most_bytes and len(self._found) > 1:
            self.nbytes -= self._found.popitem(last=False)[1][1]
        return value


_kept: Kept[Tensor] = Kept(KEPT_BYTES)


def to_device(table: Tensor, device: torch.device) -> Tensor:
    """Return a CPU tensor's copy on a device, through pinned memory: a pageable copy makes the host wait."""
    if device.type != "cuda":
        return table.to(device)
    # Fake tensors cannot be pinned, and copying one waits for nothing.
    pinned = table if active_fake_mode() is not None else table.pin_memory()
    return pinned.to(device, non_blocking=True)


def active_fake_mode() -> Any:
    """Return the FakeTensorMode that is on, or None: a tensor of one mode cannot be used in another."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def slot_index(ranges: SlotRanges, device: torch.device) -> Tensor:
    """Return the slots of some ranges as an index, int64 [n], kept from call to call."""
    key = (ranges.tobytes(), device, active_fake_mode())
    found = _kept.get(key)
    if found is None:
        index = to_device(torch.from_numpy(expand_ranges(ranges)), device)
        found = _kept.add(key, index, index.nbytes)
    return found


@torch.inference_mode(False)  # a training step may read them, too
def numbers_on(numbers: tuple[Any, ...], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return numbers (or rows of numbers) as a tensor on a device, kept from call to call."""
    key = (numbers, device, dtype, active_fake_mode())
    found = _kept.get(key)
    if found is None:
        tensor = to_device(torch.tensor(numbers, dtype=dtype), device)
        found = _kept.add(key, tensor, tensor.nbytes)
    return found
