"""Run the calls behind `ring_attention` and `RingAttention`.

An eager call carries its context, and a check that refuses it raises at once. A compiled call carries a
handle ([Note: handles in compiled code]); one that is refused becomes an operator that raises (`refusal.py`).
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from ds_ring.comm.collective import collective
from ds_ring.comm.mesh import RingMesh, check_mesh
from ds_ring.config.pass_options import PassOptions
from ds_ring.errors import RingShapeError, shown
from ds_ring.masks.pattern import Pattern
from ds_ring.ops.checks import check_derivative, check_operand
from ds_ring.ops.context import ContextCache, RingContext, context_for, context_of
from ds_ring.ops.handles import constant_in_graphs
from ds_ring.ops.options import Options
from ds_ring.ops.refusal import Refusal, raise_in_trace, refusal_from, refused_results
from ds_ring.ops.ring_op import EagerAttention, ring_attention_op, sees_plain
from ds_ring.ops.ulysses import with_ulysses
from ds_ring.schedule.layout import Layout

if TYPE_CHECKING:
    from ds_ring.masks.mask_mod import ScoreFunction

Settings = tuple[float | None, str, PassOptions | None]  # scale, kernel and options of a call


def context_of_call(
    pattern: Pattern,
    layout: Layout | str,
    mesh: RingMesh,
    settings: Settings,
    score_mod: ScoreFunction | None,
) -> RingContext:
    """Return the context of an eager call; refused arguments raise on all ranks."""
    check_mesh(mesh)
    key: tuple[Any, ...] = ()
    found: RingContext | None = None
    with suppress(Exception):  # what cannot be hashed or compared is refused below, by name
        if score_mod is None:
            key = (pattern, layout, settings, tuple(map(type, settings)))  # the types tell 1 from True
            found = mesh.owners[ContextCache].recent.get(key)
    if found is None:
        with collective(mesh, "attention"):
            found = made_context(pattern, layout, mesh, settings, score_mod)
        # Functions are not kept here: the values that they captured may change.
        if key and not pattern.masks:
            mesh.owners[ContextCache].recent[key] = found
    return found


def made_context(
    pattern: Pattern, layout: Layout | str, mesh: RingMesh, settings: Settings,
    score_mod: ScoreFunction | None, keeps_functions: bool = False,
) -> RingContext:  # fmt: skip
    """Return the context of these arguments, or raise the RingError that refuses one of them."""
    mod = None
    if score_mod is not None:
        from ds_ring.masks.mask_mod import ScoreMod  # loaded with the first function of pairs

        mod = ScoreMod.lookup(score_mod)
    scale, kernel, given = settings
    chosen = {} if isinstance(kernel, str) and kernel == "auto" else {"kernel": kernel}
    options = Options.of(given, scale=scale, score_mod=mod, **chosen)
    return context_for(pattern, layout, mesh, options, keeps_functions)


@constant_in_graphs
def _checked_handle(handle: int) -> int | Refusal:
    context = context_of(handle)
    return refusal_from(_check_derivatives, context) or handle


def _check_derivatives(context: RingContext) -> None:
    """Refuse derivatives that the operator would lose silently."""
    check_derivative()
    if context.options.score_mod is not None:
        context.options.score_mod.check_gradient()


def differentiable(handle: int | Refusal) -> int | Refusal:
    """Return the handle, or why the call is refused: it would lose a derivative silently."""
    return handle if isinstance(handle, tuple) else _checked_handle(handle)


def check_operands(return_lse: object, names: tuple[str, ...], *operands: object) -> None:
    """Refuse what the operator's body would not get to see; the sinks alone may be None.

    Raises:
        RingShapeError: names it.
    """
    for name, x in zip(names, operands, strict=True):
        if x is not None or name != "sinks":
            check_operand(name, x)
    if not isinstance(return_lse, bool):
        raise RingShapeError(f"return_lse: expected True or False, got {shown(return_lse)}; use a bool")


def check_traced(mesh: RingMesh, *given: Any) -> None:
    """Do the checks of `check_operands`, in a function that torch.compile traces."""
    refusal = refusal_from(check_operands, *given)
    if refusal is not None:
        raise_in_trace(mesh, *refusal)


def check_eager(
    context: RingContext, return_lse: object, names: tuple[str, ...], *operands: Tensor | None
) -> None:
    """Do the checks of a compiled call, on all ranks; ordinary dense tensors pass at once."""
    usual = return_lse is True or return_lse is False
    for name, x in zip(names, operands, strict=True):
        if x is None:
            usual = usual and name == "sinks"
        else:
            usual = usual and type(x) is Tensor and x.layout is torch.strided
            usual = usual and not (x.is_meta or x.is_nested or x.is_quantized)
    # functorch would raise before the operator's body
    is_transformed = peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    if not usual or is_transformed or context.options.score_mod is not None:
        with collective(context.mesh, "attention"):
            check_operands(return_lse, names, *operands)
            _check_derivatives(context)


_NAMES = ("q", "k", "v", "sinks")


def attend(
    q: Tensor, k: Tensor, v: Tensor, context: RingContext, sinks: Tensor | None, return_lse: bool
) -> Any:
    """Return out [B, H, S, E] of queries that are sharded; with `return_lse` (out, lse). Eager."""
    check_eager(context, return_lse, _NAMES, q, k, v, sinks)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        # By the operator if a transform, a mode or a subclass must see one node.
        if sees_plain((q, k, v, sinks)):
            return EagerAttention.apply(q, k, v, context, sinks)
        return ring_attention_op(q, k, v, context.handle, sinks)

    return with_ulysses(run, q, k, v, context.handle, context.mesh.ulysses_size, return_lse)


def attend_compiled(
    q: Tensor, k: Tensor, v: Tensor, handle: int | Refusal, mesh: RingMesh, sinks: Tensor | None,
    return_lse: bool,
) -> Any:  # fmt: skip
    """Do what `attend` does, in a function that torch.compile traces."""
    check_traced(mesh, return_lse, _NAMES, q, k, v, sinks)
    found = differentiable(handle)
    if isinstance(found, tuple):
        out, lse = refused_results(q, v.shape[-1], found, mesh)
        return (out, lse) if return_lse else out

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return ring_attention_op(q, k, v, found, sinks)

    return with_ulysses(run, q, k, v, found, mesh.ulysses_size, return_lse)
