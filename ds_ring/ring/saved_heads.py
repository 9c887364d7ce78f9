"""The tensors that a forward pass saves for the backward pass, a head chunk at a time."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ds_ring.ring.buffers import some_heads
from ds_ring.schedule.steps import HeadChunk

Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # q, k, v, out and lse of a pass


class HeadSource(Protocol):
    """Gives the saved tensors of one head chunk after the other."""

    def of(self, chunk: HeadChunk) -> Saved:
        """Return q, k, v, out and lse of the next chunk's heads, on the device."""
        ...


def heads_of(saved: Saved, chunk: HeadChunk) -> Saved:
    """Return views of a chunk's heads."""
    q, k, v, out, lse = saved
    q, out, lse = some_heads(chunk.query_heads, q, out, lse)
    k, v = some_heads(chunk.kv_heads, k, v)
    return q, k, v, out, lse
