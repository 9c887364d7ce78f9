"""Attend from few queries, which every rank has, to a long sharded K/V cache: `decode_attention`.

K/V stay where they are: each rank attends from all queries to its own shard, and one all-reduce of (out, lse)
gives every rank the same bits. The backward pass assumes that every rank computes the same loss from (out,
lse), and differentiates this loss once, not P times. Each rank gets the whole dq, and dk and dv of its own
shard. If parameter gradients are summed over the ring, the sum has P times the gradient of the parameters
that q is computed from. Multiply dq by 1 / P in this case. Every rank has the whole gradient of sinks, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ds_ring.comm.mesh import RingMesh
from ds_ring.compat.torch import assume_constant
from ds_ring.config.pass_options import PassOptions
from ds_ring.decode.replicated_op import replicated_attention_op
from ds_ring.errors import RingConfigError, shown
from ds_ring.masks.catalog import Causal
from ds_ring.masks.pair_masks import ScoreFunction
from ds_ring.masks.pattern import Pattern
from ds_ring.ops.checks import NAMES
from ds_ring.ops.compiled import (
    GraphRefusal,
    check_traced,
    differentiable,
    get_handle,
    make_refused_results,
    raise_in_trace,
    refusal_from,
)  # fmt: skip
from ds_ring.ops.context import AskedContext, RingContext, get_call_context, get_ring_context
from ds_ring.ops.eager import check_eager, run_compared
from ds_ring.schedule.layout import Layout


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, *, layout: Layout | str, mesh: RingMesh, pattern: Pattern | None = None,
    positions: Sequence[int] | Tensor | None = None, scale: float | None = None,
    sinks: Tensor | None = None, score_mod: ScoreFunction | None = None, return_lse: bool = False,
    options: PassOptions | None = None,
) -> Any:  # fmt: skip
    """Compute exact attention of few queries, equal on all ranks, over sharded keys. Differentiable.

    Args:
        q: queries [B, H, Q, D], the same on all ranks.
        k, v: local keys [B, G, S, D] and values [B, G, S, E]; H a multiple of G.
        layout: of the keys.
        mesh: this process's place in the grid of ranks, without Ulysses; every rank of the ring must call.
        pattern: which query position attends to which key position; None is `Causal`.
        positions: of the queries, [Q] integers, best on the CPU. None means the last Q positions of the
            layout. If a cache is not full, pass the true positions. `Full` needs none: with it, Q may exceed
            the length of the layout.
        scale, sinks, score_mod, return_lse: see `ring_attention`.
        options: see `ring_attention`. Nothing is sent hop by hop, so payload dtypes have their defaults.

    Returns:
        out [B, H, Q, E] in q's dtype, the same bits on all ranks; with `return_lse` (out, lse).

    Raises:
        RingConfigError: a mesh with Ulysses, or options that would have no effect.
        RingError: as in `ring_attention`.
    """
    query_pattern = Causal() if pattern is None else pattern
    request = AskedContext(query_pattern, layout, mesh, scale, "auto", options, score_mod)
    if torch.compiler.is_compiling():
        check_traced(mesh, return_lse, NAMES, q, k, v, sinks)
        handle = _checked(get_handle(request))
        if isinstance(handle, tuple):
            return make_refused_results(q, v.shape[-1], handle, mesh, return_lse)
    else:
        context = get_call_context(request, check_context)
        check_eager(context, return_lse, NAMES, q, k, v, sinks)
        handle = context.handle
    if positions is not None and not isinstance(positions, Tensor):
        try:
            positions = torch.as_tensor(positions, device="cpu")
        except Exception:
            got = shown(positions).removeprefix("list ")
            why = f"positions: expected integers [Q], got {got}; pass a tensor"
            raise_in_trace(mesh, "RingShapeError", why)
    operands = (q, k, v, positions, handle, sinks)
    out, lse = run_compared(mesh, "decode_attention", replicated_attention_op, *operands)
    return (out, lse) if return_lse else out


def check_context(context: RingContext) -> None:
    """Raise RingConfigError for a mesh, or options, that have no effect where K/V do not move."""
    mesh, options = context.mesh, context.options
    if mesh.ulysses_size > 1:
        raise RingConfigError.wrong(
            "decode_attention", "a mesh with ulysses_size 1", mesh.ulysses_size, "use ring_size"
        )
    if options.transport_spec.few_queries is not None:
        return
    name = "gradient_payload" if options.has_hops else "transport"
    value, usual = getattr(options, name), type(options).model_fields[name].default
    if value != usual:
        raise RingConfigError(
            f'decode_attention sends no K/V: expected {name} "{usual}", got "{value}"; leave it out'
        )


def _checked(handle: int | GraphRefusal) -> int | GraphRefusal:
    """Return the handle, or why the call is refused, in a function that torch.compile traces."""
    handle_or_refusal = differentiable(handle)
    return handle_or_refusal if isinstance(handle_or_refusal, tuple) else _checked_handle(handle_or_refusal)


@assume_constant
def _checked_handle(handle: int) -> int | GraphRefusal:
    return refusal_from(check_context, get_ring_context(handle)) or handle
