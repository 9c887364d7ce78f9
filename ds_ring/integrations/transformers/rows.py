"""Put together what was computed for some rows of a batch, or for a part of a shard."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ds_ring.comm.device_tables import on_device


def in_order(parts: Sequence[Tensor], rows: Sequence[list[int]]) -> Tensor:
    """Return what was computed of each set of rows in the order of the batch, which is dimension 0."""
    if not rows[0]:
        return parts[0]
    order = [row for of_set in rows for row in of_set]
    return torch.cat([*parts])[on_device(np.argsort(order), parts[0].device)]


def padded(x: Tensor, slots: int, dim: int) -> Tensor:
    """Append zeros for the padding slots at the end of a shard."""
    if x.shape[dim] == slots:
        return x
    shape = list(x.shape)
    shape[dim] = slots - x.shape[dim]
    return torch.cat([x, x.new_zeros(shape)], dim=dim)
