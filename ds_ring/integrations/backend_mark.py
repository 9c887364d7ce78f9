"""The operator `ds_ring::needs_backend`: it raises when it runs, and the backend "ds_ring" takes it out."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_ring.errors import RingConfigError
from ds_ring.ops.handles import operator


@operator("ds_ring::needs_backend")
def needs_backend_op(position_ids: Tensor) -> Tensor:
    """Mark the position ids of a model whose own attention would see local tokens only."""
    raise RingConfigError(
        "the model's own attention would attend to this rank's tokens only, and this call does not go through"
        ' the backend; say engine.compile(backend="ds_ring") before the first batch, or leave "attention" at'
        ' "ring" and do not compile'
    )


needs_backend_op.register_fake(torch.empty_like)
