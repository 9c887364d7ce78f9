"""Run one call of attention: find its context, also in compiled code, check its tensors, call the operator.

Owns what stands between the public calls in module.py and the operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ds_ring.errors import RingConfigError, RingError, RingShapeError, shown
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.score_mod import ScoreFunction, ScoreMod
from ds_ring.runtime.autograd import replicated_attention_op, ring_attention_op
from ds_ring.runtime.checks import why_not_an_operand, why_not_this_derivative
from ds_ring.runtime.context import Options, context_for, context_of, refusing_context
from ds_ring.runtime.mesh import RingMesh, check_mesh
from ds_ring.runtime.ulysses import heads_to_tokens, tokens_to_heads
from ds_ring.schedule.layout import Layout

_HEX = "hexadecimal scale"  # says that a text is a number; one that the user gave is refused


def constant(scale: Any) -> Any:
    """Return a scale as something that torch.compile takes for a constant."""
    # Dynamo makes a float symbolic at its second value, and a symbol is no constant; its text is one.
    if isinstance(scale, (int, float)) and not isinstance(scale, bool) and -1e300 < scale < 1e300:
        return _HEX, float(scale).hex()
    return scale


# [Note: handles in compiled code]
# torch.compile runs a function marked `assume_constant_result` while it traces and keeps the result, here the
# integer by which the operator finds pattern, layout, mesh and options. It guards the arguments: numbers and
# texts by value, objects that come from outside by identity. An object that the traced code itself makes is
# handed over without its attributes, so that nothing may be wrapped into an object before such a call: it
# would arrive with its defaults.
@torch.compiler.assume_constant_result
def handle_of(
    pattern: Pattern,
    layout: Layout | str,
    mesh: RingMesh,
    settings: tuple[Any, ...],  # the first options, in order; the scale as `constant` makes it
    score_mod: ScoreFunction | None,
    why_not: str | None,  # why the call cannot be honoured, if it is known already
    in_a_graph: bool,
) -> int:
    """Return the number by which the operator finds its arguments: [Note: handles in compiled code]."""
    check_mesh(mesh)
    scale, *others = settings
    is_text = isinstance(scale, tuple) and len(scale) == 2 and scale[0] == _HEX
    number: Any = float.fromhex(scale[1]) if is_text else scale
    try:
        if why_not is not None:
            raise RingConfigError(why_not)
        mod = None if score_mod is None else ScoreMod(score_mod)
        options = replace(Options(number, *others), score_mod=mod)
        context = context_for(pattern, layout, mesh, options)
    except RingError as error:
        context = refusing_context(mesh, error)
    context.in_a_graph |= in_a_graph
    return context.handle


def _as_tensor(q_positions: Sequence[int] | Tensor | None, handle: int) -> Tensor | None:
    if q_positions is None or isinstance(q_positions, Tensor):
        return q_positions
    try:
        return torch.as_tensor(q_positions)
    except Exception:
        got = shown(q_positions).removeprefix("list ")
        _refuse(handle, f"q_positions: expected a 1-D list of integers, got {got}; pass a tensor")
        raise


@torch.compiler.assume_constant_result
def refusing_handle(
    mesh: RingMesh, why: str, in_a_graph: bool, error: type[RingError] = RingConfigError
) -> int:
    """Return the number of a context whose calls are refused, on all ranks."""
    context = refusing_context(mesh, error(why))
    context.in_a_graph |= in_a_graph
    return context.handle


@torch.compiler.assume_constant_result
def _refuse(handle: int, why: str) -> None:
    context_of(handle).refuse(RingShapeError(why))


@torch.compiler.assume_constant_result
def _differentiable(handle: int, in_a_graph: bool) -> int:
    """Return the handle, or a refusing one for derivatives that the operator would lose silently."""
    why = why_not_this_derivative()
    if why is None:
        return handle
    if not in_a_graph:  # functorch would raise before the operator's body
        context_of(handle).refuse(RingConfigError(why))
    return refusing_handle(context_of(handle).mesh, why, in_a_graph)


def _check_operands(
    q: Tensor, k: Tensor, v: Tensor, handle: int, sinks: Tensor | None, return_lse: object
) -> None:
    """Refuse what the operator's body would not get to see, for all ranks to hear."""
    for name, x in (("q", q), ("k", k), ("v", v), ("sinks", sinks)):
        why = None if x is None and name == "sinks" else why_not_an_operand(name, x)
        if why is not None:
            _refuse(handle, why)
    if not isinstance(return_lse, bool):
        _refuse(handle, f"return_lse: expected True or False, got {shown(return_lse)}; use a bool")


def attend(
    q: Tensor, k: Tensor, v: Tensor, handle: int, ulysses_size: int, sinks: Tensor | None, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Return out [B, H, S, E] of queries that are sharded; with `return_lse` (out, lse)."""
    handle = _differentiable(handle, torch.compiler.is_compiling())
    _check_operands(q, k, v, handle, sinks, return_lse)
    if ulysses_size == 1:
        out, lse = ring_attention_op(q, k, v, handle, sinks)
        return (out, lse) if return_lse else out
    q, k, v = tokens_to_heads(q, k, v, handle)
    out, lse = ring_attention_op(q, k, v, handle, sinks)
    if not return_lse:
        return heads_to_tokens([out], handle)[0]
    out, lse = heads_to_tokens([out, lse.unsqueeze(-1)], handle)
    return out, lse.squeeze(-1)


def attend_replicated(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    handle: int,
    q_positions: Sequence[int] | Tensor | None,
    sinks: Tensor | None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return out [B, H, Q, E] of queries that every rank has; with `return_lse` (out, lse)."""
    handle = _differentiable(handle, torch.compiler.is_compiling())
    _check_operands(q, k, v, handle, sinks, return_lse)
    results = replicated_attention_op(q, k, v, _as_tensor(q_positions, handle), handle, sinks)
    return results if return_lse else results[0]
