"""Attend to keys that queries chose: `selected_attention`, its operator and gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_ring.comm.collective import collective
from ds_ring.comm.device_tables import to_host
from ds_ring.comm.mesh import RingMesh, check_mesh
from ds_ring.compat.torch import operator
from ds_ring.errors import RingShapeError
from ds_ring.layers.selection.context import selection_context
from ds_ring.layers.selection.selected_pass import SelectedPass
from ds_ring.masks.catalog import Full
from ds_ring.ops.checks import check_heads, check_operand, check_tensors, check_tokens
from ds_ring.ops.context import RingContext, get_ring_context
from ds_ring.ops.eager import run_compared
from ds_ring.ops.passes import count_forward_pass, get_forward_call, run_gradient
from ds_ring.ops.ring_op import register
from ds_ring.ops.sinks import add_sinks, check_sinks, compute_sinks_gradient
from ds_ring.ops.tracing import forbid_tracing
from ds_ring.schedule.layout import Layout


@forbid_tracing
def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, *, layout: Layout, mesh: RingMesh,
    scale: float | None = None, sinks: Tensor | None = None, return_lse: bool = False, block_size: int = 1,
    hop_timeout_s: float = 60.0,
) -> Any:  # fmt: skip
    """Compute attention of each query over the keys that it chose, on a sharded sequence. Differentiable.

    Args:
        q: local queries [B, H, Q, D], as many as `chosen` is for: S, unless the keys are not those of tokens.
        k, v: local keys [B, G, S, D] and values [B, G, S, E]; H a multiple of G.
        chosen: what `ring_select` returned: positions [B, Q, k], or [B, C, Q, k] with C a divisor of G, where
            choice c is that of K/V heads c * G / C and on; or with C = H. -1 is no key; a position counts
            once.
        layout: of the keys.
        mesh, hop_timeout_s: as `ring_select` had them.
        scale: factor of the scores; None is 1 / sqrt(D).
        sinks: [H]; see `ring_attention`.
        return_lse: return the lse as well. Its gradient is exact.
        block_size: a chosen position means itself and the next block_size - 1; a query attends to none after
            itself. So a choice is one number a block; blocks must not overlap.

    Returns:
        out [B, H, Q, E] in q's dtype, and the lse [B, H, Q] with `return_lse`. A row that chose nothing has
        out 0 and lse -inf (or its sink).

    Raises:
        RingConfigError, RingShapeError, RingLayoutError: arguments that do not fit each other or the layout.
        RingMismatchError: ranks that call with other shapes or settings; nothing was sent.
        RingPeerError: another rank failed or was too late.
    """
    check_mesh(mesh)
    with collective(mesh, "attention over chosen keys"):
        context = selection_context(Full(), layout, mesh, hop_timeout_s, scale)
        for name, x in (("q", q), ("k", k), ("v", v), ("chosen", chosen)):
            check_operand(name, x)
    size = block_size if isinstance(block_size, int) else 0  # refused
    group, by_query_head = _group(q, k, chosen), False
    if group > 1 and sinks is None:  # see [Note: choices of query heads]
        by_query_head, (heads, slots) = True, q.shape[1:3]
        q, chosen = (
            x.unflatten(1, (-1, group)).transpose(2, 3).flatten(2, 3).contiguous() for x in (q, chosen)
        )
    operands = (q, k, v, chosen, context.handle, sinks, size)
    out, lse = run_compared(mesh, "selected_attention", selected_attention_op, *operands)
    if by_query_head:
        out, lse = (x.unflatten(2, (slots, group)).transpose(2, 3).flatten(1, 2) for x in (out, lse))
        assert out.shape[1] == heads
    return (out, lse) if return_lse else out


# [Note: choices of query heads]
# Query heads that share a K/V head and choose for themselves become queries of that head, slot by slot: a
# query of slot s and head h of the group is number s * r + h of r * S queries. So a row crosses once, however
# many heads of the group chose it.
def _group(q: Tensor, k: Tensor, chosen: Tensor) -> int:
    """Return how many query heads share a K/V head if each of them chooses for itself, else 1."""
    if not q.dim() == k.dim() == chosen.dim() == 4 or 0 in k.shape or q.shape[1] % k.shape[1]:
        return 1  # refused, or no choice of heads
    return q.shape[1] // k.shape[1] if chosen.shape[1] == q.shape[1] else 1


def _check_chosen(chosen: Tensor, q: Tensor, k: Tensor, layout: Layout, block: int, is_known: bool) -> None:
    """Raise RingShapeError for chosen positions that do not fit q and k, or a wrong size of blocks."""
    tokens = layout.tokens
    if block < 1 or (block > 1 and q.shape[2] % layout.local_tokens):
        raise RingShapeError(
            "block_size: expected a whole number of at least 1, and above 1 queries of all"
            f" {layout.local_tokens} slots, got {block} and {q.shape[2]} queries; pass those of the tokens"
        )
    shape, groups = tuple(chosen.shape), k.shape[1]
    fits = chosen.dim() in (3, 4) and shape[0] == len(q) and shape[-2] == q.shape[2] and shape[-1] > 0
    if not fits or (len(shape) == 4 and (shape[1] < 1 or groups % shape[1])):
        raise RingShapeError(
            f"chosen: expected [{len(q)}, {q.shape[2]}, k] or [{len(q)}, C, {q.shape[2]}, k] with C a"
            f" divisor of {groups} K/V heads, got {shape}; pass ring_select's, and no sinks where query heads"
            " choose"
        )
    if chosen.dtype not in (torch.int64, torch.int32) or chosen.device != q.device:
        raise RingShapeError(
            f"chosen: expected int64 or int32 on {q.device}, got {chosen.dtype} on {chosen.device}"
        )
    if is_known:  # the host would wait for them again
        return
    least, most = to_host(torch.stack(chosen.aminmax())).tolist()
    if least < -1 or most >= tokens:
        raise RingShapeError.wrong(
            "chosen", f"positions -1 to {tokens - 1}", f"{least} to {most}", "pass ring_select's result"
        )


def _agree(
    call: collective, context: RingContext, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor,
    sinks: Tensor | None, block: int, is_known: bool = False,
) -> None:  # fmt: skip
    """Check the tensors, without the positions in `chosen` if they are known; agree with the other ranks."""
    check_tensors(q, k, v)
    check_heads(q.shape[1], k.shape[1], 1)
    layout = context.layout_for(k.shape[2], k.device.type)
    check_tokens(k.shape[2], layout.local_tokens)
    check_sinks(sinks, q, q.shape[1])
    _check_chosen(chosen, q, k, layout, block, is_known)
    fields = {
        "head_dim of v": v.shape[-1],
        "shape of chosen": (*chosen.shape[1:-2], chosen.shape[-1]),
        "sinks": None if sinks is None else sinks.dtype,
        "block_size": block,
    }
    context.agree(call, q, k, fields)


@operator("ds_ring::selected_attention")
def selected_attention_op(
    q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, handle: int, sinks: Tensor | None = None, block: int = 1
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of `selected_attention`."""
    context = get_ring_context(handle)
    with context.call("attention over chosen keys forward", q) as call:
        _agree(call, context, q, k, v, chosen, sinks, block)
        count_forward_pass()
        return add_sinks(*SelectedPass(context, q, k, v, chosen, block).forward(), sinks)


@operator("ds_ring::selected_attention_backward")
def selected_attention_backward_op(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, out: Tensor, lse: Tensor, handle: int,
    block: int, grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (dq, dk, dv) of `selected_attention`."""
    context = get_ring_context(handle)
    with context.call("attention over chosen keys backward", q) as call:
        _agree(call, context, q, k, v, chosen, None, block, is_known=True)
        return SelectedPass(context, q, k, v, chosen, block, True).backward(grad_out, out, lse, grad_lse)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, chosen, handle, sinks, ctx.block = inputs
    ctx.save_for_backward(q, k, v, chosen, *output, sinks)
    ctx.context = get_ring_context(handle)  # keep it alive until the backward pass
    ctx.call = get_forward_call(ctx.context.exchange)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, chosen, out, lse, sinks = ctx.saved_tensors
    if grad_out is None:  # every rank must go through the pass: another rank's gradient may need it
        grad_out = torch.zeros_like(out)
    handle = ctx.context.handle
    operands = (grad_out, q, k, v, chosen, out, lse, handle, ctx.block, grad_lse)
    grads = run_gradient(ctx.context.mesh, ctx.call, selected_attention_backward_op, *operands)
    # queries of other slots than the keys' are all tokens, as far as the layout says
    tokens = ctx.context.tokens_here(grad_out) if q.shape[2] == k.shape[2] else None
    of_sinks = compute_sinks_gradient(sinks, slice(None), grad_out, out, lse, grad_lse, tokens)
    return (*grads, None, None, of_sinks, None)


register(selected_attention_op, selected_attention_backward_op, _setup, _backward)
