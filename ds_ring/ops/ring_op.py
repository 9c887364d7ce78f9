"""Register the operator `ds_ring::ring_attention` and its gradient with torch.library.

In an eager call, `attend` (`eager.py`) calls the autograd function `EagerAttention` for plain tensors, and
the operator for other tensors. A compiled call has the operator in its graph (backend "ds_ring": another one,
in contrib/compile). The gradient of both is `_backward`, which runs the backward pass by `run_backward`.

[Note: an opaque operator]
torch.compile sees the whole pass as one opaque node. So a compiled graph has no break, and does not grow with
the number of ranks. If torch.compile traced the messages of a pass, the partitioner could save every shard
that arrives, and memory would be O(T). Inductor could also reorder the sends. With torch.compile's backend
"ds_ring", one graph serves all inputs of one local length, for any layout and pattern: each run of the graph
computes the handle of its context ([Note: placements in compiled code] in contrib/compile/placed_op.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ds_ring.comm.collective import collective
from ds_ring.comm.messages import Observers
from ds_ring.compat.torch import operator
from ds_ring.kernels.interface import Kernel, Operands
from ds_ring.ops.checks import sees_plain
from ds_ring.ops.context import RingContext, get_ring_context
from ds_ring.ops.passes import get_forward_call, refuse_second_derivative, run_gradient, running_region
from ds_ring.ops.prepare import Prepared, prepare_pass
from ds_ring.ring.merge import get_accumulator_dtype
from ds_ring.ring.pool import Buffers
from ds_ring.ring.ring_pass import RingPass

if TYPE_CHECKING:
    from ds_ring.ops.extra_operand import ExtraOperand


def make_pass(
    context: RingContext, prepared: Prepared, finish_header_check: Callable[[], None] | None
) -> RingPass:
    """Return the ring pass, with buffers of the mesh."""
    options, mesh, exchange = context.options, context.mesh, context.exchange
    observers: Observers = mesh.owners[Observers]
    kernel: Kernel = prepared.kernel
    if options.check_finite:
        from ds_ring.ops.finite import FiniteKernel

        kernel = FiniteKernel(kernel, prepared.rank_plan)
    return RingPass(
        prepared.rank_plan,
        kernel,
        exchange,
        prepared.scale,
        options.overlap,
        prepared.chunk_bytes,
        mesh.owners[Buffers],
        observer=observers[-1] if observers else None,
        load_heads=partial(context.saved.load_heads, context) if prepared.offload else None,
        finish_header_check=finish_header_check,
        prepared=context.passes,
    )


def run_forward(
    context: RingContext, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None,
    extras: Sequence[ExtraOperand] = (),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run a forward pass; return (out, lse), with the effect of sinks and other extra operands.

    If a checkpointed region runs again, and the results of the first run were kept, return these results.
    """
    if sinks is not None:
        from ds_ring.ops.sinks import SinkLogits

        extras = (SinkLogits(sinks), *extras)

    def run(context: RingContext) -> tuple[Tensor, Tensor]:
        is_fake = isinstance(q, FakeTensor)
        with collective(context.mesh, "attention forward", context.exchange, is_fake) as call:
            results = prepare_pass(context, call, Operands(q, k, v), extras).forward(q, k, v)
            for operand in extras:
                results = operand.finish(context, results)
            return results

    if running_region()[0] is None or context.kept_results is None:
        return run(context)
    return context.kept_results.run(context, run, q, (q.shape, k.shape, v.shape, q.dtype, len(extras)))


def run_backward(
    context: RingContext, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    grad_lse: Tensor | None = None, extras: Sequence[ExtraOperand] = (),
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (dq, dk, dv) of a pass, see `RingPass.backward`; out and lse are those with sinks."""
    is_fake = isinstance(q, FakeTensor)
    with collective(context.mesh, "attention backward", context.exchange, is_fake) as call:
        q_here, k_here, v_here = q, k, v
        if q.device != grad_out.device:  # on the host: pass on shapes and dtypes only
            q_here, k_here, v_here = (
                torch.zeros((), dtype=x.dtype, device=grad_out.device).expand(x.shape) for x in (q, k, v)
            )
        operands = Operands(q_here, k_here, v_here, grad_out, grad_lse is not None)
        ring_pass = prepare_pass(context, call, operands, extras)
        return ring_pass.backward(grad_out, q, k, v, out, lse, grad_lse)


@operator("ds_ring::ring_attention")
def ring_attention_op(
    q: Tensor, k: Tensor, v: Tensor, handle: int, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of local q [B, H, S, D] over the ring's k [B, G, S, D] and v [B, G, S, E].

    See `RingPass.forward`. `sinks` has the heads of all Ulysses ranks.
    """
    return run_forward(get_ring_context(handle), q, k, v, sinks)


def make_fake_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return fake (out, lse), used while a graph is traced."""
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty(q.shape[:-1], dtype=get_accumulator_dtype(q.dtype))


# The backward pass is an operator, too: one opaque node of the backward graph.
@operator("ds_ring::ring_attention_backward")
def ring_attention_backward_op(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, handle: int,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (dq, dk, dv); see `RingPass.backward`."""
    return run_backward(get_ring_context(handle), grad_out, q, k, v, out, lse, grad_lse)


def save(
    ctx: Any, context: RingContext, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor], eager: bool,
    further: tuple[Tensor, ...] = (),
) -> None:  # fmt: skip
    """Save the tensors that the backward pass needs: local q, k, v, out, lse, sinks, then `further`."""
    q, k, v, _, sinks = inputs
    ctx.eager = eager
    # K/V of other ranks are not saved, because they travel again in the backward pass: memory is O(T / P).
    saved = context.saved.save(context, (q, k, v, *output))
    ctx.context = context
    ctx.call = get_forward_call(context.exchange)
    ctx.save_for_backward(*saved, sinks, *further)
    ctx.set_materialize_grads(False)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    save(ctx, get_ring_context(inputs[3]), inputs, output, eager=False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, sinks = ctx.saved_tensors
    context: RingContext = ctx.context
    if grad_out is None:  # run the pass nevertheless: another rank may need this rank's part of a gradient
        device = out.device if grad_lse is None else grad_lse.device
        grad_out = torch.zeros_like(out, device=device)
    saved = (q, k, v, out, lse)
    if ctx.eager and not torch.is_grad_enabled() and sees_plain((*saved, grad_out)):
        grads = run_gradient(context.mesh, ctx.call, run_backward, context, grad_out, *saved, grad_lse)
    else:
        rest = (context.handle, grad_lse)
        grads = run_gradient(context.mesh, ctx.call, ring_attention_backward_op, grad_out, *saved, *rest)
    if sinks is None:
        return (*grads, None, None)
    from ds_ring.ops.sinks import compute_sinks_gradient

    heads, tokens = context.heads_here(q), context.tokens_here(grad_out)
    return (*grads, None, compute_sinks_gradient(sinks, heads, grad_out, out, lse, grad_lse, tokens))


class EagerAttention(torch.autograd.Function):
    """Do in eager calls what `ring_attention_op` does in compiled calls; takes a context, not its handle."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, context: RingContext, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        results = run_forward(context, q, k, v, sinks)
        save(ctx, context, (q, k, v, context, sinks), results, eager=True)
        return results

    backward = staticmethod(_backward)


def register(forward: Any, backward: Any, setup: Callable[..., None], gradients: Callable[..., Any]) -> None:
    """Register fake results and gradients of a forward operator and of its backward operator."""
    # Fake results need the strides of real ones, which are contiguous for any strides of q.
    forward.register_fake(lambda q, k, v, *_: make_fake_results(q, v))
    backward.register_fake(lambda _, q, k, v, *rest: tuple(x.new_empty(x.shape) for x in (q, k, v)))
    forward.register_autograd(gradients, setup_context=setup)
    backward.register_autograd(
        refuse_second_derivative("ring attention"), setup_context=lambda ctx, inputs, output: None
    )


register(ring_attention_op, ring_attention_backward_op, _setup, _backward)
