"""Say where the first NaN or infinity is: `check_finite`. Owns the look at a tensor and the message."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_ring.errors import RingFiniteError


def check_finite(ring_rank: int, hop: int | None, **tensors: Tensor | None) -> None:
    """Look at every value of some tensors (one read of memory, and on a GPU one wait for the device).

    Args:
        ring_rank: this rank.
        hop: after which hop; None for what goes into a pass.
        tensors: by the name for the message. An `lse` may be -inf: that row saw no key.

    Raises:
        RingFiniteError: names rank, tensor and hop, and the number of values.
    """
    for name, tensor in tensors.items():
        if tensor is None or not tensor.is_floating_point():
            continue
        bad = ~torch.isfinite(tensor)
        if name == "lse":
            bad &= tensor != float("-inf")
        count = int(bad.sum())
        if count:
            where = "before the first hop" if hop is None else f"after hop {hop}"
            first = tuple(torch.nonzero(bad)[0].tolist())
            raise RingFiniteError(
                f"check_finite: expected finite values in {name} of ring rank {ring_rank} {where}, got"
                f" {count} of {tensor.numel()} that are not, the first at {first}; look at what computes"
                f" {name} there (learning rate, loss scale, a mask of -inf), or turn check_finite off to let"
                " them pass"
            )
