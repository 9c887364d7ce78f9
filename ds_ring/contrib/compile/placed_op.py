"""Register the operator `ds_ring::placed_attention`: its context is data and no constant of the graph.

Owns the number under which a graph finds a placement while it runs, and the operator that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_ring.comm.collective import collective
from ds_ring.compat.torch import operator
from ds_ring.errors import RingShapeError
from ds_ring.ops.context import RingContext, get_object, new_handle
from ds_ring.ops.ring_op import make_fake_results, register, run_backward, run_forward
from ds_ring.ops.ulysses import swap_op, with_ulysses

BatchRows = tuple[int, ...]


@dataclass(eq=False)
class BatchContexts:
    """Hold the attention of a batch, under a number in a graph: contexts, and the rows that each is for.

    Every rank has the parts in the same order. One part without rows is for all of them.
    """

    parts: tuple[tuple[RingContext, BatchRows], ...]
    handle: int = field(init=False)

    def __post_init__(self) -> None:
        self.handle = new_handle(self)

    def fill(self, make: Callable[[], Sequence[Tensor]], work: Callable[..., Any], *tensors: Tensor) -> Any:
        """Return `work(context, *given)`, with several parts in the tensors of `make`, row by row.

        A batch of another size is refused, on all ranks.
        """
        rows = sum(len(rows) for _, rows in self.parts)
        if rows not in (0, len(tensors[0])):
            with collective(self.parts[0][0].mesh, "attention"):
                raise RingShapeError(f"attention: expected the batch's {rows} samples, got {len(tensors[0])}")
        if not self.parts[0][1]:
            return work(self.parts[0][0], *tensors)
        results = make()
        for context, part_rows in self.parts:
            index = list(part_rows)
            for whole, part in zip(results, work(context, *(x[index] for x in tensors)), strict=True):
                whole[index] = part
        return results


# [Note: placements in compiled code]
# A model that knows nothing of the ring is compiled once for a length of local tokens, and many global
# lengths, and every set of packed documents, have that length. A handle written into the graph would attend
# with the layout of the batch that was traced. So the graph computes the handle in every run
# (`place_attention` in graph_sharding.py), as an int64 [1] on the CPU, and attention takes it as a tensor;
# the backward pass gets the one that its forward pass had.
@operator("ds_ring::placed_attention")
def placed_attention_op(q: Tensor, k: Tensor, v: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of local q [B, H, S, D] over the ring's k, v [B, G, S, D]; `which` is int64 [1]."""

    def attention(context: RingContext, q: Tensor, k: Tensor, v: Tensor) -> Any:
        run = partial(run_forward, context)
        return with_ulysses(run, q, k, v, context.handle, context.mesh.ulysses_size, return_lse=True)

    return get_object(int(which), BatchContexts).fill(lambda: make_fake_results(q, v), attention, q, k, v)


@operator("ds_ring::placed_attention_backward")
def placed_attention_backward_op(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, which: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv)."""

    operands = (grad_out, q, k, v, out, lse)
    return get_object(int(which), BatchContexts).fill(
        lambda: tuple(x.new_empty(x.shape) for x in (q, k, v)), _get_all_gradients, *operands
    )


def _get_all_gradients(
    context: RingContext, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> Sequence[Tensor]:
    """Return (dq, dk, dv) of all heads."""
    if context.mesh.ulysses_size == 1:
        return run_backward(context, grad_out, q, k, v, out, lse)
    # Saved are the tensors of this rank's tokens, as large as without Ulysses: they are swapped again.
    q, k, v = swap_op([q, k, v], "Ulysses of q, k, v", context.handle)
    results = [grad_out, out, lse.unsqueeze(-1)]
    grad_out, out, lse = swap_op(results, "Ulysses of the gradient of out", context.handle)
    grads = run_backward(context, grad_out, q, k, v, out, lse.squeeze(-1))
    return swap_op(grads, "Ulysses of dq, dk, dv", context.handle)


def _setup_placed(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    *operands, which = inputs
    ctx.save_for_backward(*operands, *output, which)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward_placed(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    if grad_out is None:  # every rank must go through the pass: another rank's gradient may need it
        grad_out = torch.zeros_like(saved[3])
    return (*placed_attention_backward_op(grad_out, *saved), None)


register(placed_attention_op, placed_attention_backward_op, _setup_placed, _backward_placed)
