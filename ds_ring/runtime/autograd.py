"""Register the operators `ds_ring::ring_attention` and `ds_ring::replicated_attention`, and their gradients.

Owns the registration with torch.library and nothing else: for torch.compile the whole pass is one
opaque node, so a compiled graph has no break and does not grow with the number of ranks. Why opaque: a
ring traced as functional collectives silently loses O(T/P), since the partitioner saves every rotated
shard.
Saved for backward: local q, k, v, out, lse, or their copies on the host. Nothing else.

[Note: an opaque operator]
If torch.compile traced the collectives, the partitioner could save every rotated shard, and Inductor could
reorder the sends. Under the backend "ds_ring" one graph serves all batches of a length, so the layout is
data: the graph asks for the number of the batch's layout in each run ([Note: placements in compiled code]).

[Note: sinks and the log-sum-exp] The sink of a head is where its merge starts (out 0, lse = sink), so no
kernel knows of sinks: the backward pass is the same with the lse that includes the sink, and the sink's
gradient is a sum over the local queries. A gradient of the lse is subtracted from the row sums of out x
grad_out, in every kernel (aten's operator for the CPU gets it as a column).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from ds_ring.errors import RingConfigError, RingShapeError
from ds_ring.runtime.context import RingContext, context_of, first_queries
from ds_ring.runtime.gather_pass import GatherPass
from ds_ring.runtime.kept_results import KeptRows, kept_or_run, saved_on_host, stand_ins
from ds_ring.runtime.merge import accumulator_dtype
from ds_ring.runtime.prepared import PreparedPasses
from ds_ring.runtime.replicated import ReplicatedPass
from ds_ring.runtime.ring_pass import RingPass
from ds_ring.runtime.trace import is_fake
from ds_ring.runtime.ulysses import (
    gradients_to_heads,
    gradients_to_tokens,
    heads_to_tokens,
    tokens_to_heads,
)


def _pass_of(
    q: Tensor, k: Tensor, v: Tensor, handle: int, grad_out: Tensor | None = None,
    sinks: Tensor | None = None, has_grad_lse: bool = False,
) -> RingPass | GatherPass:  # fmt: skip
    """Return the pass of a context (backward if there is a gradient), after all ranks have agreed to it."""
    context = context_of(handle)
    plan, kernel, scale, agreed = context.prepare(q, k, v, grad_out, sinks, has_grad_lse)
    ring_rank, options = context.mesh.ring_rank, context.options
    # The all-gather reference sends all heads at once: no chunks, no overlap, no buffers kept between calls.
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
        host=context.mesh.host_memory if options.offload_on(q.device.type, q.shape[2]) else None,
        agreed=agreed,
        prepared=PreparedPasses() if context.exchange is None else context.exchange.prepared,
    )


def _guarded(made: RingPass | GatherPass | ReplicatedPass) -> AbstractContextManager[None]:
    """Tell the other ranks if a pass raises; they would otherwise wait for this rank."""
    return nullcontext() if made.exchange is None else made.exchange.guarded()


@torch.library.custom_op("ds_ring::ring_attention", mutates_args=(), tags=torch.Tag.cudagraph_unsafe)
def ring_attention_op(
    q: Tensor, k: Tensor, v: Tensor, handle: int, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of local q [B, H, S, D] over the ring's k [B, G, S, D] and v [B, G, S, E].

    See `RingPass.forward`. The sinks are those of the heads of all Ulysses ranks.
    """
    context = context_of(handle)

    def run(handle: int = handle) -> tuple[Tensor, Tensor]:
        # Outside the guard: a refused call sends nothing, so the mesh can still be used after it.
        made = _pass_of(q, k, v, handle, sinks=sinks)
        with _guarded(made):
            return made.forward(q, k, v, sinks if sinks is None else sinks[context.heads_here(q)])

    with context.mesh.in_call():
        if context.options.recompute == 1 or is_fake(q):
            return run()
        memory, rows = context.mesh.host_memory, None
        if context.options.recompute:
            first, slots = first_queries(context, q.shape[2], q.device)
            rows = KeptRows(slots, lambda: run(first.handle))
        call = (handle, q.shape, k.shape, v.shape, q.dtype)
        return kept_or_run(call, run, memory if memory.enabled else None, rows)


# Contiguous, whatever the strides of q: a fake result must have the strides of the real one.
@ring_attention_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, handle: int, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return fake_results(q, v)


def fake_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return fake (out, lse), used while a graph is traced."""
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty(q.shape[:-1], dtype=accumulator_dtype(q.dtype))


# The backward pass is an operator, too, so that the backward graph also has one opaque node for the pass.
@torch.library.custom_op("ds_ring::ring_attention_backward", mutates_args=(), tags=torch.Tag.cudagraph_unsafe)
def ring_attention_backward_op(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, handle: int,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (dq, dk, dv); see `RingPass.backward`."""
    with context_of(handle).mesh.in_call():
        here = (q, k, v) if q.device == grad_out.device else stand_ins((q, k, v), grad_out.device)
        q_here, k_here, v_here = here
        made = _pass_of(q_here, k_here, v_here, handle, grad_out, has_grad_lse=grad_lse is not None)
        with _guarded(made):
            return made.backward(grad_out, q, k, v, out, lse, grad_lse)


@ring_attention_backward_op.register_fake
def _(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, handle: int,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup(
    ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int, Tensor | None], output: tuple[Tensor, Tensor]
) -> None:
    q, k, v, handle, sinks = inputs
    out, lse = output
    # Save no hop's K/V: they travel again in the backward pass, which keeps memory at O(T / P).
    ctx.handle = handle
    ctx.context = context = context_of(handle)  # keep it alive until the backward pass
    saved = (q, k, v, out, lse)
    if context.options.offload_on(q.device.type, q.shape[2]):
        saved = saved_on_host(saved, context.mesh.host_memory)
    ctx.save_for_backward(*saved, sinks)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, sinks = ctx.saved_tensors
    if grad_out is None:  # run the pass nevertheless: another rank may need this rank's part of a gradient
        device = out.device if grad_lse is None else grad_lse.device
        grad_out = torch.zeros_like(out, device=device)
    grads = ring_attention_backward_op(grad_out, q, k, v, out, lse, ctx.handle, grad_lse)
    return (*grads, None, _sinks_gradient(sinks, ctx.context.heads_here(q), grad_out, out, lse, grad_lse))


def _sinks_gradient(
    sinks_H: Tensor | None, heads: slice, grad_out: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor | None
) -> Tensor | None:
    """Return the gradient of the sinks from this rank's queries, whose heads are `heads`; 0 for other heads.

    A sink is a key whose value is 0, so this is -sum over the rows of
    exp(sink - lse) (sum(out grad_out) - grad_lse).
    """
    if sinks_H is None:
        return None
    delta = _row_sums(out, grad_out, lse.dtype)
    lse = lse.to(delta.device)
    if grad_lse is not None:
        delta = delta - grad_lse
    # A row without keys and sinks has lse -inf; the clamp prevents a NaN.
    weights = torch.exp(sinks_H[heads].unsqueeze(-1) - lse.clamp_min(torch.finfo(lse.dtype).min))
    grad = torch.zeros_like(sinks_H)
    grad[heads] = -(weights * delta).sum((0, 2)).to(grad.dtype)
    return grad


def _row_sums(out: Tensor, grad_out: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sums of out x grad_out over head_dim, [B, H, S]; head by head if out is on the host."""
    if out.device == grad_out.device:
        return (out.to(dtype) * grad_out).sum(-1)
    heads = zip(out.unbind(1), grad_out.unbind(1), strict=True)
    return torch.stack([(o.to(g.device, dtype) * g).sum(-1) for o, g in heads], dim=1)


ring_attention_op.register_autograd(_backward, setup_context=_setup)


def _setup_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save nothing: there is no second derivative."""


def _refuse_second_derivative(ctx: Any, *grads: Tensor | None) -> NoReturn:
    raise RingConfigError(
        "ring attention: expected a first derivative, got a request for the second one (create_graph=True,"
        " then a gradient of that gradient); differentiate once, or use a model with plain attention for it"
    )


ring_attention_backward_op.register_autograd(_refuse_second_derivative, setup_context=_setup_nothing)


def _replicated(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, handle: int, grad_out: Tensor | None = None,
    sinks: Tensor | None = None, has_grad_lse: bool = False,
) -> ReplicatedPass:  # fmt: skip
    """Return the pass of a context for replicated queries, after all ranks have agreed to it."""
    context = context_of(handle)
    tiles, kernel, scale = context.prepare_replicated(q, k, v, positions, grad_out, sinks, has_grad_lse)
    return ReplicatedPass(tiles, kernel, context.exchange, scale)


@torch.library.custom_op("ds_ring::replicated_attention", mutates_args=(), tags=torch.Tag.cudagraph_unsafe)
def replicated_attention_op(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, handle: int, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of q [B, H, Q, D], equal on all ranks, over the ring's k, v; see `ReplicatedPass`.

    The positions are a tensor, so that a compiled graph of a decoding loop takes the step as an input.
    """
    with context_of(handle).mesh.in_call():
        made = _replicated(q, k, v, positions, handle, sinks=sinks)
        with _guarded(made):
            return made.forward(q, k, v, sinks)


@replicated_attention_op.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, handle: int, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return fake_results(q, v)


@torch.library.custom_op(
    "ds_ring::replicated_attention_backward", mutates_args=(), tags=torch.Tag.cudagraph_unsafe
)
def replicated_attention_backward_op(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor | None,
    out: Tensor,
    lse: Tensor,
    handle: int,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv); see `ReplicatedPass.backward`."""
    with context_of(handle).mesh.in_call():
        made = _replicated(q, k, v, positions, handle, grad_out, has_grad_lse=grad_lse is not None)
        with _guarded(made):
            return made.backward(grad_out, q, k, v, out, lse, grad_lse)


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
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_replicated(
    ctx: Any,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, int, Tensor | None],
    output: tuple[Tensor, Tensor],
) -> None:
    q, k, v, positions, handle, sinks = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, positions, out, lse, sinks)
    ctx.handle = handle
    ctx.context = context_of(handle)  # keep it alive until the backward pass
    ctx.set_materialize_grads(False)


def _backward_replicated(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    q, k, v, positions, out, lse, sinks = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    grads = replicated_attention_backward_op(grad_out, q, k, v, positions, out, lse, ctx.handle, grad_lse)
    return (*grads, None, None, _sinks_gradient(sinks, slice(None), grad_out, out, lse, grad_lse))


replicated_attention_op.register_autograd(_backward_replicated, setup_context=_setup_replicated)
replicated_attention_backward_op.register_autograd(_refuse_second_derivative, setup_context=_setup_nothing)


# Register the operator `ds_ring::placed_attention`: its context is data and no constant of the graph.
#
# Owns the number under which a graph finds a placement while it runs, and the operator that reads it.

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


def _setup_placed(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, which = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse, which)
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)


def _backward_placed(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, which = ctx.saved_tensors
    if grad_out is None:  # every rank must go through the pass: another rank's gradient may need it
        grad_out = torch.zeros_like(out)
    return (*placed_attention_backward_op(grad_out, q, k, v, out, lse, which), None)


placed_attention_op.register_autograd(_backward_placed, setup_context=_setup_placed)
