"""The same as one process: a pass over shards, gathered, and how far it is from dense attention.

    attend = partial(ring_attention, pattern=pattern, layout=layout, mesh=mesh)
    found = gathered_pass(attend, whole, layout, mesh)
    assert max(errors(found, dense_attention(*whole, pattern)).values()) < 1e-5

`whole` is q, k, v and the gradient of the output, the same on every rank (`tests.cases.tensors`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ds_ring import RingMesh, gather_sequence, shard_sequence
from ds_ring.schedule.layout import Layout
from tests.reference import Dense, relative_error

NAMES = ("out", "dq", "dk", "dv")


def gathered_pass(
    attend: Callable[..., Tensor], whole: Sequence[Tensor], layout: Layout, mesh: RingMesh
) -> list[Tensor]:
    """The output of `attend(q, k, v)` on this rank's shards, and the gradients of its operands."""
    *leaves, grad = (shard_sequence(x.detach(), layout, mesh=mesh, dim=2) for x in whole)
    leaves = [x.requires_grad_() for x in leaves]
    out = attend(*leaves)
    found = (out.detach(), *torch.autograd.grad(out, leaves, grad))
    return [gather_sequence(x, layout, mesh=mesh, dim=2) for x in found]


def errors(found: Sequence[Tensor], want: Dense) -> dict[str, float]:
    """Relative errors of a gathered pass, each tensor by itself."""
    return {name: relative_error(x, getattr(want, name)) for name, x in zip(NAMES, found, strict=True)}
