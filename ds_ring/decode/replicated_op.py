"""Register the operator `ds_ring::replicated_attention` and its gradient: few queries, equal on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ds_ring.comm.mesh import RingMesh
from ds_ring.decode.replicated import ReplicatedPass
from ds_ring.errors import shown
from ds_ring.ops.context import context_of
from ds_ring.ops.frontend import check_eager, check_traced, differentiable
from ds_ring.ops.handles import operator
from ds_ring.ops.refusal import Refusal, raise_in_trace, refused_results
from ds_ring.ops.ring_op import register, sinks_gradient


@operator("ds_ring::replicated_attention")
def replicated_attention_op(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, handle: int, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of q [B, H, Q, D], equal on all ranks, over the ring's k, v; see `ReplicatedPass`.

    The positions are a tensor, so that a compiled graph of a decoding loop takes the step as an input.
    """
    context = context_of(handle)
    with context.call("replicated attention forward", q) as call:
        made = ReplicatedPass(*context.prepare_replicated(call, q, k, v, positions, sinks=sinks))
        return made.forward(q, k, v, sinks)


@operator("ds_ring::replicated_attention_backward")
def replicated_attention_backward_op(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, out: Tensor, lse: Tensor,
    handle: int, grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (dq, dk, dv); see `ReplicatedPass.backward`."""
    context = context_of(handle)
    with context.call("replicated attention backward", q) as call:
        of_lse = grad_lse is not None
        prepared = context.prepare_replicated(call, q, k, v, positions, grad_out, has_grad_lse=of_lse)
        return ReplicatedPass(*prepared).backward(grad_out, q, k, v, out, lse, grad_lse)


def _setup_replicated(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, positions, handle, sinks = inputs
    ctx.save_for_backward(q, k, v, positions, *output, sinks)
    ctx.context = context_of(handle)  # keep it alive until the backward pass
    ctx.set_materialize_grads(False)


def _backward_replicated(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    *given, out, lse, sinks = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    grads = replicated_attention_backward_op(grad_out, *given, out, lse, ctx.context.handle, grad_lse)
    return (*grads, None, None, sinks_gradient(sinks, slice(None), grad_out, out, lse, grad_lse))


register(replicated_attention_op, replicated_attention_backward_op, _setup_replicated, _backward_replicated)


def attend_replicated(
    q: Tensor, k: Tensor, v: Tensor, handle: int | Refusal, mesh: RingMesh,
    q_positions: Sequence[int] | Tensor | None, sinks: Tensor | None, return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Return out [B, H, Q, E] of queries that every rank has; with `return_lse` (out, lse)."""
    results: tuple[Tensor, Tensor]
    if torch.compiler.is_compiling():
        check_traced(mesh, q, k, v, sinks, return_lse)
        found = differentiable(handle)
        if isinstance(found, tuple):
            results = refused_results(q, v.shape[-1], found, mesh)
            return results if return_lse else results[0]
        handle = found
    else:
        assert isinstance(handle, int), "an eager call that is refused has raised"
        check_eager(context_of(handle), q, k, v, sinks, return_lse)
    if q_positions is not None and not isinstance(q_positions, Tensor):
        try:
            q_positions = torch.as_tensor(q_positions)
        except Exception:
            got = shown(q_positions).removeprefix("list ")
            why = f"q_positions: expected a 1-D list of integers, got {got}; pass a tensor"
            raise_in_trace(mesh, "RingShapeError", why)
    results = replicated_attention_op(q, k, v, q_positions, handle, sinks)
    return results if return_lse else results[0]
