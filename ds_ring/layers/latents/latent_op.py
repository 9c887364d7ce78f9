"""Register the operator `ds_ring::latent_attention` and its gradient.

[Note: latents on the wire]
With an up-projection, k and v of a pass are latents [B, 1, S, L] and rotary keys [B, 1, S, R]: one K/V
head, for which plan, schedule and exchange need nothing new. `LatentKernel` expands them where they arrive,
again in the backward pass. On each rank the gradient of the up-projection is the part of this rank's
queries: sum it over the sequence's ranks, as for other replicated parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_ring.compat.torch import operator
from ds_ring.layers.latents.kernel import UpProjection, latent_value_dim
from ds_ring.ops.context import get_ring_context
from ds_ring.ops.passes import refuse_second_derivative, run_gradient
from ds_ring.ops.ring_op import make_fake_results, run_backward, run_forward, save
from ds_ring.ops.sinks import compute_sinks_gradient


@operator("ds_ring::latent_attention")
def latent_attention_op(
    q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, handle: int, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of q [B, H, S, N + R] over latents; `up` is that of all heads, [H * (N + E), L]."""
    return run_forward(get_ring_context(handle), q, latent, rope, sinks, [UpProjection(up)])


@latent_attention_op.register_fake
def _(
    q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, handle: int, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    width = latent_value_dim(q, rope, up, q.shape[1] * get_ring_context(handle).mesh.ulysses_size)
    return make_fake_results(
        q, rope.new_empty((0, max(width, 1)))
    )  # what does not fit is refused by the operator


@operator("ds_ring::latent_attention_backward")
def latent_attention_backward_op(
    grad_out: Tensor, q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, out: Tensor, lse: Tensor,
    handle: int, grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, latent, rope and up."""
    context, of_up = get_ring_context(handle), UpProjection(up)
    tokens = context.tokens_here(grad_out)
    if tokens < latent.shape[2]:  # NaN of padding times a gradient of 0 is NaN
        latent = latent.clone()
        latent[:, :, tokens:].zero_()
    grads = run_backward(context, grad_out, q, latent, rope, out, lse, grad_lse, [of_up])
    return *grads, of_up.gradient()


latent_attention_backward_op.register_fake(
    lambda _, q, latent, rope, up, *rest: tuple(x.new_empty(x.shape) for x in (q, latent, rope, up))
)


def _setup_latents(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, latent, rope, up, handle, sinks = inputs
    save(ctx, get_ring_context(handle), (q, latent, rope, handle, sinks), output, eager=False, further=(up,))


def _backward_latents(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    q, latent, rope, out, lse, sinks, up = ctx.saved_tensors
    if grad_out is None:  # as in `_backward`
        grad_out = torch.zeros_like(out, device=up.device)
    handle = ctx.context.handle
    inputs = (grad_out, q, latent, rope, up, out, lse, handle, grad_lse)
    grads = run_gradient(ctx.context.mesh, ctx.call, latent_attention_backward_op, *inputs)
    if sinks is None:
        return (*grads, None, None)
    heads, tokens = ctx.context.heads_here(q), ctx.context.tokens_here(grad_out)
    return (*grads, None, compute_sinks_gradient(sinks, heads, grad_out, out, lse, grad_lse, tokens))


latent_attention_op.register_autograd(_backward_latents, setup_context=_setup_latents)
latent_attention_backward_op.register_autograd(
    refuse_second_derivative("latent_attention"), setup_context=lambda ctx, inputs, output: None
)
