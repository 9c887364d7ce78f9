"""What a pass keeps for its gradient: the strategies that `registry.SAVED_TENSORS` names, and the plain one.

The plain strategy saves q, k, v, out and lse as they are, and runs every pass. Others stand in `memory/`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ds_ring.ring.saved_heads import HeadSource, Saved
from ds_ring.schedule.steps import HeadChunk

if TYPE_CHECKING:
    from ds_ring.ops.context import RingContext

Results = tuple[Tensor, Tensor]


class TensorStore(Protocol):
    """Keep tensors somewhere else until they are asked for."""

    def put(self, tensor: Tensor) -> Any:
        """Return a ticket for a tensor."""

    def get(self, ticket: Any) -> Tensor:
        """Return the tensor."""


class ResultStore:
    """Say where a mesh keeps the results of checkpointed regions: None leaves them on the device."""

    store: TensorStore | None = None


class SavedTensors:
    """Do what the strategy inside does; without one, run every pass and save its tensors as they are."""

    def __init__(self, inner: SavedTensors | None = None) -> None:
        self.inner = inner

    def run(
        self, context: RingContext, run: Callable[[RingContext], Results], q: Tensor, call: tuple[Any, ...]
    ) -> Results:
        """Return (out, lse) of `run(context)`; `call` is equal for equal calls of a context."""
        return run(context) if self.inner is None else self.inner.run(context, run, q, call)

    def save(self, context: RingContext, saved: Saved) -> Saved:
        """Return what autograd saves in place of q, k, v, out and lse."""
        return saved if self.inner is None else self.inner.save(context, saved)

    def load_heads(
        self, context: RingContext, saved: Saved, chunks: Sequence[HeadChunk], device: torch.device
    ) -> HeadSource:
        """Return what gives the heads of one chunk after the other, for tensors that were saved elsewhere."""
        assert self.inner is not None, "no strategy saves elsewhere"
        return self.inner.load_heads(context, saved, chunks, device)
