"""Register the operators `ds_ring::ring_attention` and `ds_ring::replicated_attention`, and their gradients.

Owns the registration with torch.library and nothing else: for torch.compile the whole pass is one
opaque node, so a compiled graph has no break and does not grow with the number of ranks. Why opaque: a
ring traced as functional collectives silently loses O(T/P), since the partitioner saves every rotated
shard.
Saved for backward: local q, k, v, out, lse. Nothing else.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor

from ds_ring.errors import RingConfigError
from ds_ring.runtime.contexts import context_of
from ds_ring.runtime.gather_pass import GatherPass
from ds_ring.runtime.merge import accumulator_dtype
from ds_ring.runtime.replicated import ReplicatedPass
from ds_ring.runtime.ring_pass import RingPass


def _pass_of(
    q: Tensor, k: Tensor, v: Tensor, handle: int, grad_out: Tensor | None = None
) -> RingPass | GatherPass:
    """Return the pass of a context (back, if there is a gradient), after every rank has agreed to it."""
    context = context_of(handle)
    plan, kernel, scale = context.prepare(q, k, v, grad_out)
    ring_rank, options = context.mesh.ring_rank, context.options
    # The yardstick sends all heads at once: no chunks, no overlap, no buffers kept between calls.
    if options.transport == "all_gather":
        return GatherPass(plan, ring_rank, kernel, context.exchange, scale)
    chunk_bytes = options.chunk_bytes_on(q.device.type, context.mesh.ring_size)
    return RingPass(
        plan.rank(ring_rank),
        kernel,
        context.exchange,
        scale,
        options.overlap,
        chunk_bytes,
        context.mesh.buffers,
        context.check_finite if options.check_finite else None,
        trace=context.mesh.trace,
    )


def _guarded(made: RingPass | GatherPass | ReplicatedPass) -> AbstractContextManager[None]:
    """Tell the other ranks of whatever else is raised in a pass: they would wait for this one."""
    return nullcontext() if made.exchange is None else made.exchange.guarded()


@torch.library.custom_op("ds_ring::ring_attention", mutates_args=())
def ring_attention_op(q: Tensor, k: Tensor, v: Tensor, handle: int) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of local q [B, H, S, D] over the ring's k, v [B, G, S, D]; see `RingPass.forward`."""
    with context_of(handle).mesh.in_call():
        # Outside the guard: a refused call sends nothing, and the mesh can still be used after it.
        made = _pass_of(q, k, v, handle)
        with _guarded(made):
            return made.forward(q, k, v)


# Contiguous, whatever the strides of q: a fake result must be laid out as the real one is.
@ring_attention_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, handle: int) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=accumulator_dtype(q.dtype))


# An operator as well, so that the backward graph has one opaque node for the pass, too.
@torch.library.custom_op("ds_ring::ring_attention_backward", mutates_args=())
def ring_attention_backward_op(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, handle: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv); see `RingPass.backward`."""
    with context_of(handle).mesh.in_call():
        made = _pass_of(q, k, v, handle, grad_out)
        with _guarded(made):
            return made.backward(grad_out, q, k, v, out, lse)


@ring_attention_backward_op.register_fake
def _(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, handle: int
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, handle = inputs
    out, lse = output
    # No hop's K/V: they go round again in the backward pass, which keeps memory at O(T / P).
    ctx.save_for_backward(q, k, v, out, lse)
    ctx.handle = handle
    ctx.context = context_of(handle)  # alive until the backward pass
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    if grad_out is None:  # every rank must go through the pass: another rank's gradient may need it
        grad_out = torch.zeros_like(out)
    return (*ring_attention_backward_op(grad_out, q, k, v, out, lse, ctx.handle), None)


ring_attention_op.register_autograd(_backward, setup_context=_setup)


def _setup_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keep nothing: there is no second derivative."""


def _refuse_second_derivative(ctx: Any, *grads: Tensor | None) -> NoReturn:
    raise RingConfigError(
        "ring attention: expected a first derivative, got a request for the second one (create_graph=True,"
        " then a gradient of that gradient); differentiate once, or use a model with plain attention for it"
    )


ring_attention_backward_op.register_autograd(_refuse_second_derivative, setup_context=_setup_nothing)


def _replicated(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, handle: int, grad_out: Tensor | None = None
) -> ReplicatedPass:
    """Return the pass of a context for replicated queries, after every rank has agreed to it."""
    context = context_of(handle)
    tiles, kernel, scale = context.prepare_replicated(q, k, v, positions, grad_out)
    return ReplicatedPass(tiles, kernel, context.exchange, scale)


@torch.library.custom_op("ds_ring::replicated_attention", mutates_args=())
def replicated_attention_op(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, handle: int
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of q [B, H, Q, D], equal on all ranks, over the ring's k, v; see `ReplicatedPass`.

    The positions are a tensor, so that the step of a decoding loop is an input of a compiled graph.
    """
    with context_of(handle).mesh.in_call():
        made = _replicated(q, k, v, positions, handle)
        with _guarded(made):
            return made.forward(q, k, v)


@replicated_attention_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, handle: int) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=accumulator_dtype(q.dtype))


@torch.library.custom_op("ds_ring::replicated_attention_backward", mutates_args=())
def replicated_attention_backward_op(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor | None,
    out: Tensor,
    lse: Tensor,
    handle: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv); see `ReplicatedPass.backward`."""
    with context_of(handle).mesh.in_call():
        made = _replicated(q, k, v, positions, handle, grad_out)
        with _guarded(made):
            return made.backward(grad_out, q, k, v, out, lse)


@replicated_attention_backward_op.register_fake
def _(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor | None,
    out: Tensor,
    lse: Tensor,
    handle: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_replicated(
    ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, int], output: tuple[Tensor, Tensor]
) -> None:
    q, k, v, positions, handle = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, positions, out, lse)
    ctx.handle = handle
    ctx.context = context_of(handle)  # alive until the backward pass
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)


def _backward_replicated(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    q, k, v, positions, out, lse = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    dq, dk, dv = replicated_attention_backward_op(grad_out, q, k, v, positions, out, lse, ctx.handle)
    return dq, dk, dv, None, None


replicated_attention_op.register_autograd(_backward_replicated, setup_context=_setup_replicated)
replicated_attention_backward_op.register_autograd(_refuse_second_derivative, setup_context=_setup_nothing)
