"""Put together what was computed for some rows of a batch, or for a part of a shard."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ds_ring.comm.device_tables import on_device
from ds_ring.schedule.layout import Layout


def in_order(parts: Sequence[Tensor], rows: Sequence[list[int]]) -> Tensor:
    """Return what was computed of each set of rows in the order of the batch, which is dimension 0."""
    if not rows[0]:
        return parts[0]
    order = [row for of_set in rows for row in of_set]
    return torch.cat([*parts])[on_device(np.argsort(order), parts[0].device)]


def get_local_last_tokens(x_BCS: Tensor, width: int, layout: Layout, ring_rank: int) -> Tensor:
    """Return the last tokens of a sequence [B, C, width], zeros for those of other ranks: a sum gives all."""
    owners, slots = np.divmod(layout.slots_by_position()[-width:], layout.local_tokens)
    tail_BCW = x_BCS.new_zeros((*x_BCS.shape[:-1], width))
    mine, first = np.flatnonzero(owners == ring_rank), width - len(owners)
    there, here = (on_device(index, x_BCS.device) for index in (first + mine, slots[mine]))
    tail_BCW[..., there] = x_BCS[..., here]
    return tail_BCW
