"""Register the operator `ds_ring::replicated_attention` and its gradient: few queries, equal on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ds_ring.decode.replicated import ReplicatedPass
from ds_ring.errors import shown
from ds_ring.ops.context import context_of
from ds_ring.ops.frontend import check_eager, check_operands, differentiable, refuse_call
from ds_ring.ops.handles import operator
from ds_ring.ops.ring_op import register, run_pass, sinks_gradient


@operator("ds_ring::replicated_attention")
def replicated_attention_op(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, handle: int, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of q [B, H, Q, D], equal on all ranks, over the ring's k, v; see `ReplicatedPass`.

    The positions are a tensor, so that a compiled graph of a decoding loop takes the step as an input.
    """
    context = context_of(handle)
    with context.mesh.in_call():
        made = ReplicatedPass(*context.prepare_replicated(q, k, v, positions, sinks=sinks))
        out, lse = run_pass(made, made.forward, q, k, v, sinks)
        return out, lse


@operator("ds_ring::replicated_attention_backward")
def replicated_attention_backward_op(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, out: Tensor, lse: Tensor,
    handle: int, grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (dq, dk, dv); see `ReplicatedPass.backward`."""
    context = context_of(handle)
    with context.mesh.in_call():
        of_lse = grad_lse is not None
        made = ReplicatedPass(*context.prepare_replicated(q, k, v, positions, grad_out, has_grad_lse=of_lse))
        dq, dk, dv = run_pass(made, made.backward, grad_out, q, k, v, out, lse, grad_lse)
        return dq, dk, dv


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
    q: Tensor, k: Tensor, v: Tensor, handle: int, q_positions: Sequence[int] | Tensor | None,
    sinks: Tensor | None, return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Return out [B, H, Q, E] of queries that every rank has; with `return_lse` (out, lse)."""
    if torch.compiler.is_compiling():
        handle = differentiable(handle)
        check_operands(q, k, v, handle, sinks, return_lse)
    else:
        check_eager(context_of(handle), q, k, v, sinks, return_lse)
    if q_positions is not None and not isinstance(q_positions, Tensor):
        try:
            q_positions = torch.as_tensor(q_positions)
        except Exception:
            got = shown(q_positions).removeprefix("list ")
            refuse_call(handle, f"q_positions: expected a 1-D list of integers, got {got}; pass a tensor")
    results = replicated_attention_op(q, k, v, q_positions, handle, sinks)
    return results if return_lse else results[0]
