"""The operator `ds_ring::needs_backend`: it raises when it runs, and the backend "ds_ring" takes it out."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_ring.compat.torch import operator
from ds_ring.errors import RingConfigError


@operator("ds_ring::needs_backend")
def needs_backend_op(position_ids: Tensor) -> Tensor:
    """Mark the position ids of a model whose own attention would see local tokens only."""
    raise RingConfigError(
        "expected attention on the ring, got a call that does not go through the backend, over this rank's"
        ' tokens only; call engine.compile(backend="ds_ring") first, or set "attention": "ring"'
    )


needs_backend_op.register_fake(torch.empty_like)
