"""Gradients of tensors that a batch is given whole: the mean over the ranks of a sequence.

A rank's loss is scaled for parameters, whose gradients the engine sums over all ranks ([Note: gradient
scale] in loss.py). No engine sums those of a tensor that comes from outside.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ds_ring.comm.collective import collective
from ds_ring.comm.mesh import RingMesh
from ds_ring.errors import RingConfigError

whole_nodes: weakref.WeakSet[Any] = weakref.WeakSet()  # of the graphs of batches that were given whole


# [Note: gradients of inputs]
# A rank's part of the loss has the gradient of its own tokens, times D / N. Summed over the P ranks of a
# sequence and divided by P it is, with D = W, what one process of R = W / P replicas has: the gradient of a
# replica's loss, whose mean over the replicas is that of the mean over all tokens. A parameter of the engine
# in front of the whole tensor (the embedding) gets the same on all P ranks, and the engine's mean over all W
# ranks leaves it right.
class _WholeGradient(torch.autograd.Function):
    """Return a tensor that every rank has whole; its gradient is the mean over the ranks of a sequence."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, mesh: RingMesh) -> Tensor:
        ctx.mesh = mesh
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        mesh, total = ctx.mesh, grads[0].contiguous().clone()
        with collective(mesh, "the gradient of a whole batch") as call:
            call.agree({"shape": tuple(total.shape), "dtype": total.dtype})
            if mesh.sequence_group is not None:
                call.exchange.all_reduce(total, mesh.sequence_group)
        return total / mesh.sequence_size, None


_whole_gradient = _WholeGradient.apply


def needs_gradient(x: object) -> bool:
    """Return whether a gradient of a tensor will be computed."""
    return isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled()


def check_divisor(batch: Mapping[str, Tensor], divisor: float, world_size: int) -> None:
    """Refuse a batch whose tensors require gradients where the engine does not average over all ranks.

    Raises:
        RingConfigError: `"gradient_allreduce_op": "sum"`.
    """
    names = sorted(name for name, x in batch.items() if needs_gradient(x))
    if names and divisor != world_size:
        raise RingConfigError.wrong(
            names[0], "no gradient under gradient_allreduce_op 'sum'", "one", "leave that key out"
        )


def with_whole_gradients(batch: Mapping[str, Tensor], mesh: RingMesh) -> dict[str, Tensor]:
    """Return a whole batch, whose tensors get the gradient of the whole sequence on every rank.

    Collective in the backward pass, where a tensor requires gradients.
    """
    tensors = dict(batch)
    for name, x in batch.items():
        if needs_gradient(x) and mesh.sequence_size > 1:
            tensors[name] = _whole_gradient(x, mesh)
            whole_nodes.add(tensors[name].grad_fn)
    return tensors
