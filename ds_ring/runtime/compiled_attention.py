"""Register the operator `ds_ring::placed_attention`: its context is data and no constant of the graph.

Owns the number under which a graph finds a placement while it runs, and the operator that reads it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ds_ring.errors import RingShapeError
from ds_ring.runtime.autograd import fake_results, ring_attention_backward_op, ring_attention_op
from ds_ring.runtime.context import RingContext
from ds_ring.runtime.ulysses import (
    gradients_to_heads,
    gradients_to_tokens,
    heads_to_tokens,
    tokens_to_heads,
)

Rows = tuple[int, ...]


@dataclass(eq=False)
class Placed:
    """Hold the attention of a batch.

    Attributes:
        parts: a context, and the rows of the batch that it is for; every rank has them in the same order.
            One part without rows is for all of them.
        handle: the number of this placement in a graph.
    """

    parts: tuple[tuple[RingContext, Rows], ...]
    handle: int = field(default_factory=itertools.count().__next__)

    def __post_init__(self) -> None:
        _placed[self.handle] = self

    def parts_of(self, q: Tensor) -> Sequence[tuple[RingContext, Rows]]:
        """Return the parts; a batch of another size is refused, on all ranks."""
        rows = sum(len(rows) for _, rows in self.parts)
        if rows not in (0, q.shape[0]):
            why = (
                f"attention: expected the {rows} samples of the batch, whose documents differ, got"
                f" {q.shape[0]}; hand the model the whole batch that shard_batch returned"
            )
            self.parts[0][0].refuse(RingShapeError(why))
        return self.parts


_placed: weakref.WeakValueDictionary[int, Placed] = weakref.WeakValueDictionary()


def _of(which: Tensor) -> Placed:
    found = _placed.get(int(which))
    assert found is not None, f"placement {int(which)} is gone: too many batches since its forward pass"
    return found


# [Note: placements in compiled code]
# A model that knows nothing of the ring is compiled once for a length of local tokens, and many global
# lengths, and every set of packed documents, have that length. A handle written into the graph would attend
# with the layout of the batch that was traced. So the graph computes the handle in every run
# (`place_attention` in graph_sharding.py), as an int64 [1] on the CPU, and attention takes it as a tensor;
# the backward pass gets the one that its forward pass had.
@torch.library.custom_op("ds_ring::placed_attention", mutates_args=(), tags=torch.Tag.cudagraph_unsafe)
def placed_attention_op(q: Tensor, k: Tensor, v: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of local q [B, H, S, D] over the ring's k, v [B, G, S, D]; `which` is int64 [1]."""
    parts = _of(which).parts_of(q)
    if not parts[0][1]:
        return _attend(q, k, v, parts[0][0])
    # Uninitialised: the parts' rows are all rows of the batch (`parts_of` compares their number).
    out, lse = fake_results(q, v)
    for context, rows in parts:
        index = list(rows)
        out[index], lse[index] = _attend(q[index], k[index], v[index], context)
    return out, lse


def _attend(q: Tensor, k: Tensor, v: Tensor, context: RingContext) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of all heads, which Ulysses ranks share out meanwhile."""
    if context.mesh.ulysses_size == 1:
        return ring_attention_op(q, k, v, context.handle)
    out, lse = ring_attention_op(*tokens_to_heads(q, k, v, context.handle), context.handle)
    out, lse = heads_to_tokens([out, lse.unsqueeze(-1)], context.handle)
    return out, lse.squeeze(-1)


@placed_attention_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
    return fake_results(q, v)


@torch.library.custom_op(
    "ds_ring::placed_attention_backward", mutates_args=(), tags=torch.Tag.cudagraph_unsafe
)
def placed_attention_backward_op(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, which: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv)."""
    parts = _of(which).parts_of(q)
    if not parts[0][1]:
        return _gradients(parts[0][0], grad_out, q, k, v, out, lse)
    grads = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    for context, rows in parts:
        index = list(rows)
        taken = [x[index] for x in (grad_out, q, k, v, out, lse)]
        for grad, part in zip(grads, _gradients(context, *taken), strict=True):
            grad[index] = part
    return grads


def _gradients(
    context: RingContext, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) of all heads."""
    handle = context.handle
    if context.mesh.ulysses_size == 1:
        return ring_attention_backward_op(grad_out, q, k, v, out, lse, handle)
    # Saved are the tensors of this rank's tokens, as large as without Ulysses: they are swapped again.
    q, k, v = tokens_to_heads(q, k, v, handle)
    grad_out, out, lse = gradients_to_heads([grad_out, out, lse.unsqueeze(-1)], handle)
    grads = ring_attention_backward_op(grad_out, q, k, v, out, lse.squeeze(-1), handle)
    dq, dk, dv = gradients_to_tokens(grads, handle)
    return dq, dk, dv


@placed_attention_backward_op.register_fake
def _(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, which: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, which = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse, which)
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, which = ctx.saved_tensors
    if grad_out is None:  # every rank must go through the pass: another rank's gradient may need it
        grad_out = torch.zeros_like(out)
    return (*placed_attention_backward_op(grad_out, q, k, v, out, lse, which), None)


placed_attention_op.register_autograd(_backward, setup_context=_setup)
