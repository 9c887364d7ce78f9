"""Sum over the ranks that share a sequence, with its gradient: `ds_ring::sequence_sum`.

Owns the operator, so that eager and compiled models use the same one. It is for values of the whole sequence
from which every rank computes the same loss term: for example the token counts of a router, or the hidden
state of the one token that a classification head reads. Attention does not use it.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_ring.runtime.exchange import BATCH_TIMEOUT_S, Exchange
from ds_ring.runtime.mesh import RingMesh

_handles = itertools.count()
_numbers: weakref.WeakKeyDictionary[RingMesh, int] = weakref.WeakKeyDictionary()
_meshes: weakref.WeakValueDictionary[int, RingMesh] = weakref.WeakValueDictionary()


def number_of(mesh: RingMesh) -> int:
    """Return the number by which a compiled graph refers to `mesh`."""
    if mesh not in _numbers:
        _numbers[mesh] = next(_handles)
        _meshes[_numbers[mesh]] = mesh
    return _numbers[mesh]


# [Note: gradient of what all ranks compute]
# Every rank of a sequence computes the same term L of the loss from the sum, so dL / d(sum) is the same on
# all of them. DeepSpeed adds the gradients of all W ranks of the world and divides by D ([Note: gradient
# scale] in loss.py). So each rank adds L * D / W to its loss (`shared_scale`); the logged losses then add up
# to the mean of L over the sequences. The gradient with respect to a rank's own summand is the sum over the
# terms of all ranks. These are equal, so it is `sequence_size` times the rank's own gradient and needs no
# message.
def shared_scale(mesh: RingMesh, gradient_divisor: float) -> float:
    """Return D / W of [Note: gradient of what all ranks compute]."""
    world = dist.get_world_size() if dist.is_initialized() else mesh.sequence_size
    return gradient_divisor / world


def _of_all_ranks(local: Tensor, mesh: int) -> Tensor:
    """Return [ranks of the sequence, ...], every rank's `local`. Collective."""
    found = _meshes[mesh]
    exchange = Exchange(found, BATCH_TIMEOUT_S)
    return torch.stack(exchange.all_gather(local, found.sequence_group, found.sequence_size))


@torch.library.custom_op("ds_ring::sequence_sum", mutates_args=(), tags=torch.Tag.cudagraph_unsafe)
def sequence_sum_op(local: Tensor, mesh: int) -> Tensor:
    """Return the sum of all ranks' `local`, bitwise equal on all ranks. Collective in the sequence group.

    Args:
        local: any shape, the same on every rank.
        mesh: the number that `number_of` returns.
    """
    return _of_all_ranks(local, mesh).sum(dim=0)


@sequence_sum_op.register_fake
def _(local: Tensor, mesh: int) -> Tensor:
    return torch.empty_like(local)


def _keep_mesh(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    ctx.sequence_size = _meshes[inputs[1]].sequence_size


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return gradient * ctx.sequence_size, None


sequence_sum_op.register_autograd(_backward, setup_context=_keep_mesh)


@torch.library.custom_op("ds_ring::sequence_max", mutates_args=(), tags=torch.Tag.cudagraph_unsafe)
def sequence_max_op(local: Tensor, mesh: int) -> Tensor:
    """Return the elementwise maximum of all ranks' `local`; no gradient. Collective in the sequence."""
    return _of_all_ranks(local, mesh).amax(dim=0)


@sequence_max_op.register_fake
def _(local: Tensor, mesh: int) -> Tensor:
    return torch.empty_like(local)
