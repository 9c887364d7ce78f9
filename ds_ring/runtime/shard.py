"""Tensors <-> shards. Owns the permutation of a layout applied to a tensor, and nothing of attention."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_ring.errors import RingShapeError
from ds_ring.runtime.exchange import Exchange
from ds_ring.runtime.mesh import RingMesh
from ds_ring.schedule.layout import Layout


def shard_sequence(
    x_global: Tensor,
    layout: Layout,
    *,
    dim: int,
    ring_rank: int | None = None,
    mesh: RingMesh | None = None,
    pad_value: float = 0,
) -> Tensor:
    """This rank's tokens of a tensor that every rank holds whole. Differentiable.

    Args:
        x_global: any tensor with layout.tokens entries in `dim`.
        layout: where tokens lie.
        dim: the token dimension.
        ring_rank: whose shard; or give `mesh`, which also cuts it for the Ulysses ranks.
        mesh: this process's place.
        pad_value: what padding slots get.

    Returns:
        The same shape with layout.local_tokens (over the Ulysses size) entries in `dim`, contiguous.

    Raises:
        RingShapeError: wrong length, or neither or both of ring_rank and mesh.
    """
    if (ring_rank is None) == (mesh is None):
        raise RingShapeError("shard_sequence: give exactly one of ring_rank=... and mesh=...")
    if x_global.shape[dim] != layout.tokens:
        raise RingShapeError(
            f"shard_sequence: the layout is for {layout.tokens} tokens, dim {dim} of shape"
            f" {tuple(x_global.shape)} has {x_global.shape[dim]}"
        )
    rank = mesh.ring_rank if mesh is not None else ring_rank
    assert rank is not None
    if not 0 <= rank < layout.ring_size:
        raise RingShapeError(f"shard_sequence: ring_rank {rank} is not in 0..{layout.ring_size - 1}")
    positions = _positions(layout, rank, *_cut(layout, mesh))
    index = positions.clamp_min(0).to(x_global.device)
    local = x_global.index_select(dim, index)
    if bool((positions < 0).any()):
        shape = [1] * local.dim()
        shape[dim] = -1
        local = local.masked_fill((positions < 0).to(local.device).view(shape), pad_value)
    return local


def _cut(layout: Layout, mesh: RingMesh | None) -> tuple[int, int]:
    """First slot and end of the part of a shard that this Ulysses rank holds."""
    if mesh is None or mesh.ulysses_size == 1:
        return 0, layout.local_tokens
    if layout.local_tokens % mesh.ulysses_size:
        raise RingShapeError(
            f"shards of {layout.local_tokens} slots cannot be split over {mesh.ulysses_size} Ulysses ranks;"
            f" build the layout with multiple_of={mesh.ulysses_size}"
        )
    part = layout.local_tokens // mesh.ulysses_size
    return mesh.ulysses_rank * part, (mesh.ulysses_rank + 1) * part


@lru_cache(maxsize=64)
def _positions(layout: Layout, ring_rank: int, first: int, end: int) -> Tensor:
    return torch.from_numpy(layout.positions(ring_rank)[first:end].copy())


@lru_cache(maxsize=16)
def _slots_by_position(layout: Layout) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(layout.slots_by_position()))


class _AllGather(torch.autograd.Function):
    """Concatenate shards along dim 0; the gradient is the sum of all ranks' gradients for this shard."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, mesh: RingMesh) -> Tensor:
        ctx.mesh = mesh
        parts = Exchange(mesh).all_gather(local, mesh.sequence_group, mesh.sequence_size)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        mesh = ctx.mesh
        parts = grads[0].chunk(mesh.sequence_size)
        return Exchange(mesh).reduce_scatter(parts, mesh.sequence_group), None


def gather_sequence(x_local: Tensor, layout: Layout, *, mesh: RingMesh, dim: int) -> Tensor:
    """The whole tensor on every rank, in the order of positions, padding stripped. Differentiable.

    The gradient is that of the sum of all ranks' losses (as in torch.distributed.nn): where every rank
    computes the same loss from the gathered tensor, divide it by mesh.sequence_size.

    Raises:
        RingShapeError: `dim` has not layout.local_tokens (over the Ulysses size) entries.
    """
    first, end = _cut(layout, mesh)
    if x_local.shape[dim] != end - first:
        raise RingShapeError(
            f"gather_sequence: the layout has {end - first} slots per rank, dim {dim} of shape"
            f" {tuple(x_local.shape)} has {x_local.shape[dim]}"
        )
    rows = x_local.movedim(dim, 0).contiguous()
    whole = _AllGather.apply(rows, mesh)
    return whole.index_select(0, _slots_by_position(layout).to(x_local.device)).movedim(0, dim)
