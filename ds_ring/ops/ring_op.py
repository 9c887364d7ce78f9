"""Register the operator `ds_ring::ring_attention` and its gradient.

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

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor, peek_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import pad

from ds_ring.comm.collective import collective
from ds_ring.errors import RingConfigError
from ds_ring.kernels.interface import Operands
from ds_ring.layers.latents.kernel import LatentKernel
from ds_ring.ops.context import Prepared, RingContext, context_of
from ds_ring.ops.handles import operator
from ds_ring.ops.passes import Pass
from ds_ring.ring.merge import accumulator_dtype
from ds_ring.ring.observer import Observers
from ds_ring.ring.pool import Buffers
from ds_ring.ring.ring_pass import RingPass


def pass_of(
    call: collective, q: Tensor, k: Tensor, v: Tensor, context: RingContext, grad_out: Tensor | None = None,
    sinks: Tensor | None = None, has_grad_lse: bool = False, up: Tensor | None = None,
) -> Pass:  # fmt: skip
    """Return the pass of a context (backward if there is a gradient), after all ranks have agreed to it."""
    found, finish_header_check = context.prepare(call, q, k, v, grad_out, sinks, has_grad_lse, up)
    if up is not None:
        assert isinstance(found.kernel, LatentKernel), "prepared without the up-projection"
        by_head = up.unflatten(0, (q.shape[1] * context.mesh.ulysses_size, -1))
        kernel = found.kernel.of(by_head[context.heads_here(q)], backward=grad_out is not None)
        found = found._replace(kernel=kernel)
    return context.make_pass(context, found, Operands(q, k, v, grad_out, has_grad_lse), finish_header_check)


def make_pass(
    context: RingContext, found: Prepared, operands: Operands, finish_header_check: Callable[[], None] | None,
    buffers: Buffers | None = None,
) -> RingPass:  # fmt: skip
    """Return the ring pass, with buffers of the mesh if none are given."""
    options, mesh, exchange = context.options, context.mesh, context.exchange
    observers: Observers = mesh.owners[Observers]
    return RingPass(
        found.own,
        found.kernel,
        exchange,
        found.scale,
        options.overlap,
        found.chunk_bytes,
        mesh.owners[Buffers] if buffers is None else buffers,
        context.check_finite if options.check_finite else None,
        observer=observers[-1] if observers else None,
        load_heads=partial(context.saved.load_heads, context) if found.offload else None,
        finish_header_check=finish_header_check,
        prepared=context.passes,
    )


def run_forward(
    context: RingContext, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None,
    up: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (out, lse) of a pass, or those that a checkpointed region has kept."""

    def run(context: RingContext) -> tuple[Tensor, Tensor]:
        is_fake = isinstance(q, FakeTensor)
        with collective(context.mesh, "attention forward", context.exchange, is_fake) as call:
            made = pass_of(call, q, k, v, context, sinks=sinks, up=up)
            return made.forward(q, k, v, sinks if sinks is None else sinks[context.heads_here(q)])

    return context.saved.run(context, run, q, (q.shape, k.shape, v.shape, q.dtype, up is None))


def run_backward(
    context: RingContext, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    grad_lse: Tensor | None = None, up: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return (dq, dk, dv) of a pass, see `RingPass.backward`; with latents also that of `up`."""
    is_fake = isinstance(q, FakeTensor)
    with collective(context.mesh, "attention backward", context.exchange, is_fake) as call:
        q_here, k_here, v_here = q, k, v
        if q.device != grad_out.device:  # shapes and dtypes, where they take no memory
            q_here, k_here, v_here = (
                torch.zeros((), dtype=x.dtype, device=grad_out.device).expand(x.shape) for x in (q, k, v)
            )
        has_grad_lse = grad_lse is not None
        made = pass_of(call, q_here, k_here, v_here, context, grad_out, has_grad_lse=has_grad_lse, up=up)
        dq, dk, dv = made.backward(grad_out, q, k, v, out, lse, grad_lse)
        if up is None:
            return dq, dk, dv
        assert isinstance(made.kernel, LatentKernel) and made.kernel.gradient is not None
        gradient, of_up = made.kernel.gradient, torch.zeros(up.shape, dtype=up.dtype, device=up.device)
        of_up.unflatten(0, (-1, gradient.shape[1]))[context.heads_here(q)].copy_(gradient)
        return dq, dk, dv, of_up


@operator("ds_ring::ring_attention")
def ring_attention_op(
    q: Tensor, k: Tensor, v: Tensor, handle: int, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of local q [B, H, S, D] over the ring's k [B, G, S, D] and v [B, G, S, E].

    See `RingPass.forward`. The sinks are those of the heads of all Ulysses ranks.
    """
    return run_forward(context_of(handle), q, k, v, sinks)


def fake_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return fake (out, lse), used while a graph is traced."""
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty(q.shape[:-1], dtype=accumulator_dtype(q.dtype))


# The backward pass is an operator, too, so that the backward graph also has one opaque node for the pass.
@operator("ds_ring::ring_attention_backward")
def ring_attention_backward_op(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, handle: int,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (dq, dk, dv); see `RingPass.backward`."""
    dq, dk, dv = run_backward(context_of(handle), grad_out, q, k, v, out, lse, grad_lse)
    return dq, dk, dv


def save(
    ctx: Any, context: RingContext, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor], eager: bool,
    *, up: Tensor | None = None,
) -> None:  # fmt: skip
    q, k, v, _, sinks = inputs
    ctx.eager = eager
    # Save no hop's K/V: they travel again in the backward pass, which keeps memory at O(T / P).
    saved = context.saved.save(context, (q, k, v, *output))
    ctx.context = context  # keeps it alive until the backward pass
    ctx.save_for_backward(*saved, sinks, *(() if up is None else (up,)))
    ctx.set_materialize_grads(False)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    save(ctx, context_of(inputs[3]), inputs, output, eager=False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, sinks = ctx.saved_tensors
    context: RingContext = ctx.context
    if grad_out is None:  # run the pass nevertheless: another rank may need this rank's part of a gradient
        device = out.device if grad_lse is None else grad_lse.device
        grad_out = torch.zeros_like(out, device=device)
    given = (q, k, v, out, lse)
    if ctx.eager and not torch.is_grad_enabled() and sees_plain((*given, grad_out)):
        grads = run_backward(context, grad_out, *given, grad_lse)
    else:
        grads = ring_attention_backward_op(grad_out, *given, context.handle, grad_lse)
    if sinks is None:
        return (*grads, None, None)
    return (*grads, None, sinks_gradient(sinks, context.heads_here(q), grad_out, out, lse, grad_lse))


class EagerAttention(torch.autograd.Function):
    """The pass of an eager call: as `ring_attention_op`, with the context in place of its handle."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, context: RingContext, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        results = run_forward(context, q, k, v, sinks)
        save(ctx, context, (q, k, v, context, sinks), results, eager=True)
        return results

    backward = staticmethod(_backward)


_PLAIN = {Tensor, torch.nn.Parameter, type(None)}


def sees_plain(tensors: Sequence[Tensor | None]) -> bool:
    """Return whether nothing but autograd looks at these tensors: no transform, mode or subclass."""
    if peek_interpreter_stack() is not None or torch._C._len_torch_dispatch_stack():
        return False
    # of `is_grads_batched=True`: an operator is called for one gradient after the other
    for x in tensors:
        if x is not None and is_legacy_batchedtensor(x):
            return False
    return set(map(type, tensors)) <= _PLAIN


def sinks_gradient(
    sinks_H: Tensor | None, heads: slice, grad_out: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor | None
) -> Tensor | None:
    """Return the gradient of the sinks from this rank's queries, whose heads are `heads`; 0 for other heads.

    A sink is a key whose value is 0, so this is -sum over the rows of
    exp(sink - lse) (sum(out grad_out) - grad_lse).
    """
    if sinks_H is None:
        return None
    if out.device == grad_out.device:
        delta = (out.to(lse.dtype) * grad_out).sum(-1)
    else:  # head by head, if out is on the host
        by_head = zip(out.unbind(1), grad_out.unbind(1), strict=True)
        delta = torch.stack([(o.to(g.device, lse.dtype) * g).sum(-1) for o, g in by_head], dim=1)
    lse = lse.to(delta.device)
    if grad_lse is not None:
        delta = delta - grad_lse
    # A row without keys and sinks has lse -inf; the clamp prevents a NaN.
    weights = torch.exp(sinks_H[heads].unsqueeze(-1) - lse.clamp_min(torch.finfo(lse.dtype).min))
    found = -(weights * delta).sum((0, 2)).to(sinks_H.dtype)
    first, end, _ = heads.indices(len(sinks_H))
    return pad(found, (first, len(sinks_H) - end))


def refuse_second_derivative(ctx: Any, *grads: Tensor | None) -> NoReturn:
    raise RingConfigError(
        "ring attention: expected a first derivative, got a request for the second one (create_graph=True,"
        " then a gradient of that gradient); differentiate once, or use a model with plain attention for it"
    )


def register(forward: Any, backward: Any, setup: Callable[..., None], gradients: Callable[..., Any]) -> None:
    """Register fake results and gradients of an operator, and those of the operator for its gradients."""
    # Fake results are contiguous, whatever the strides of q: they must have the strides of real ones.
    forward.register_fake(lambda q, k, v, *_: fake_results(q, v))
    backward.register_fake(lambda _, q, k, v, *more: tuple(x.new_empty(x.shape) for x in (q, k, v)))
    forward.register_autograd(gradients, setup_context=setup)
    backward.register_autograd(refuse_second_derivative, setup_context=lambda ctx, inputs, output: None)


register(ring_attention_op, ring_attention_backward_op, _setup, _backward)
