"""Move small tables to a device without making the host wait for it. Owns the copy, and indices of slots."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from ds_ring.masks.slot_ranges import SlotRanges, expand_ranges

KEPT_BYTES = 256 << 20  # of indices; the ones used longest ago go
_kept: OrderedDict[tuple[bytes, torch.device, Any], Tensor] = OrderedDict()


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
        found = _kept[key] = to_device(torch.from_numpy(expand_ranges(ranges)), device)
        while len(_kept) > 1 and sum(index.nbytes for index in list(_kept.values())) > KEPT_BYTES:
            _kept.popitem(last=False)
    else:
        _kept.move_to_end(key)
    return found


def numbers_on(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return numbers as int64 [n] on a device, kept from call to call."""
    key = (repr(numbers).encode(), device, active_fake_mode())
    if key not in _kept:
        _kept[key] = to_device(torch.tensor(numbers, dtype=torch.int64), device)
    return _kept[key]
