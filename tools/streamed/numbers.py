"""Read tokens of a source at any positions, wherever they are generated or stored."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ds_ring.masks.slots import IntArray
from ds_ring.simulation.rank import Source


def runs_at(positions: IntArray) -> IntArray:
    """Return single positions as runs [n, 3] of (start, step, length)."""
    return np.stack([positions, np.ones_like(positions), np.ones_like(positions)], axis=1)


def read(source: Source, name: str, runs: IntArray, width: int | None = None) -> Tensor:
    """Return the tokens of a tensor of one head at some runs, [n, D], or of another width."""
    sizes = source.geometry
    x = torch.empty(1, 1, int(runs[:, 2].sum()), width or sizes.head_dim, dtype=sizes.dtype)
    source.fill(name, slice(None), runs, x)
    return x[0, 0]
