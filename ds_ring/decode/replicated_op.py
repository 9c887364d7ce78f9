"""Register the operator `ds_ring::replicated_attention` and its gradient: few queries, equal on all ranks."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_ring.comm.collective import collective
from ds_ring.comm.streams import is_fake
from ds_ring.compat.torch import operator
from ds_ring.decode.replicated import ReplicatedPass
from ds_ring.decode.tiles import query_positions, replicated_tiles
from ds_ring.kernels.interface import Operands, PassHeads, compiles
from ds_ring.ops.checks import check_finite, check_heads, check_tensors, check_tokens
from ds_ring.ops.context import RingContext, get_ring_context
from ds_ring.ops.passes import count_forward_pass, get_forward_call, run_gradient
from ds_ring.ops.ring_op import register
from ds_ring.ops.sinks import add_sinks, check_sinks, compute_sinks_gradient
from ds_ring.plugin import load
from ds_ring.schedule.lowering import count_heads


@operator("ds_ring::replicated_attention")
def replicated_attention_op(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, handle: int, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of q [B, H, Q, D], equal on all ranks, over the ring's k, v; see `ReplicatedPass`.

    The positions are a tensor, so that a compiled graph of a decoding loop takes the step as an input.
    """
    return run_replicated(get_ring_context(handle), q, k, v, positions, sinks)


def run_replicated(
    context: RingContext, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run the forward pass and return (out, lse), with sinks."""
    with context.call("replicated attention forward", q) as call:
        attention_pass = _prepared(context, call, q, k, v, positions, sinks=sinks)
        forward, maker = attention_pass.forward, context.options.transport_spec.few_queries
        if maker is not None:
            layout = context.layout_for(k.shape[2], k.device.type)
            where = query_positions(context.pattern, layout, q.shape[2], _as_array(positions))
            forward = load(maker)(context, attention_pass.kernel, attention_pass.scale, layout, where)
        return add_sinks(*forward(q, k, v), sinks)


@operator("ds_ring::replicated_attention_backward")
def replicated_attention_backward_op(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, out: Tensor, lse: Tensor,
    handle: int, grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (dq, dk, dv); see `ReplicatedPass.backward`."""
    context = get_ring_context(handle)
    with context.call("replicated attention backward", q) as call:
        attention_pass = _prepared(context, call, q, k, v, positions, grad_out, grad_lse=grad_lse)
        return attention_pass.backward(grad_out, q, k, v, out, lse, grad_lse)


def _setup_replicated(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, positions, handle, sinks = inputs
    ctx.save_for_backward(q, k, v, positions, *output, sinks)
    ctx.context = get_ring_context(handle)  # keep it alive until the backward pass
    ctx.call = get_forward_call(ctx.context.exchange)
    ctx.set_materialize_grads(False)


def _backward_replicated(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    *operands, out, lse, sinks = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    context = ctx.context
    grads = run_gradient(
        context.mesh, ctx.call, replicated_attention_backward_op, grad_out, *operands, out, lse,
        context.handle, grad_lse,
    )  # fmt: skip
    return (*grads, None, None, compute_sinks_gradient(sinks, slice(None), grad_out, out, lse, grad_lse))


register(replicated_attention_op, replicated_attention_backward_op, _setup_replicated, _backward_replicated)


def _prepared(
    context: RingContext, call: collective, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None,
    grad_out: Tensor | None = None, sinks: Tensor | None = None, grad_lse: Tensor | None = None,
) -> ReplicatedPass:  # fmt: skip
    """Return the pass, after this rank's tensors were checked and all ranks have agreed to it.

    Raises:
        RingShapeError, RingMismatchError: as in `ops.prepare.prepare`.
    """
    if grad_out is None:
        context.check_functions()
    check_tensors(q, k, v)
    check_heads(q.shape[1], k.shape[1], 1)
    check_sinks(sinks, q, q.shape[1])
    layout = context.layout_for(k.shape[2], k.device.type)
    check_tokens(k.shape[2], layout.local_tokens)
    context.check_pairs(layout, q, q.shape[1])
    if context.options.check_finite:
        check_finite(context.mesh.ring_rank, None, q=q, k=k, v=v, grad_out=grad_out, sinks=sinks)
    kernel = context.choose_kernel(q)
    # As bytes, which are hashable: they are the key of the cached tiles.
    where = query_positions(context.pattern, layout, q.shape[2], _as_array(positions)).tobytes()
    fields = {
        "positions of the queries": f"checksum {zlib.crc32(where):08x}",
        "local keys": k.shape[2],
        "head_dim of v": v.shape[-1],
        "sinks": None if sinks is None else sinks.dtype,
        **_checksums(context, q=q, grad_out=grad_out, grad_lse=grad_lse, sinks=sinks),
    }
    tiles = replicated_tiles(context.pattern, layout, context.mesh.ring_rank, where, q.shape[1], k.shape[1])
    scale = context.get_scale(q)
    compiling = False
    if not call.alone:
        parts = [PassHeads(count_heads(h), count_heads(kv), [tile]) for h, kv, tile in tiles]
        compiling = compiles(kernel, Operands(q, k, v, grad_out, grad_lse is not None), parts, scale)
    context.agree(call, q, k, fields, compiles=compiling)
    if grad_out is None:
        count_forward_pass()
    return ReplicatedPass(tiles, kernel, context.exchange, scale)


def _checksums(context: RingContext, **tensors: Tensor | None) -> dict[str, object]:
    """Return checksums of small tensors that must be equal on all ranks; nothing else would detect it."""
    if context.exchange is None or any(x is not None and is_fake(x) for x in tensors.values()):
        return {}
    host_tensors = {name: x.detach().cpu().contiguous() for name, x in tensors.items() if x is not None}
    # As uint8: numpy has no bfloat16.
    sums = {name: zlib.crc32(x.view(torch.uint8).numpy().data) for name, x in host_tensors.items()}
    return {f"values of {name}": f"checksum {value:08x}" for name, value in sums.items()}


def _as_array(positions: Tensor | None) -> np.ndarray | None:
    """Return positions in numpy, integers as they are and other numbers in float64; None for None."""
    if positions is None:
        return None
    host = positions.detach().cpu()
    return (host.double() if host.is_floating_point() else host).numpy()  # numpy has no bfloat16
