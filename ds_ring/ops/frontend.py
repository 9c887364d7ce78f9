"""Run the eager calls behind `ring_attention` and `RingAttention`: each carries its context.

`compiled.py` makes the calls of functions that torch.compile traces.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, strided

from ds_ring.comm.collective import collective
from ds_ring.comm.mesh import RingMesh, check_mesh
from ds_ring.config.pass_options import PassOptions
from ds_ring.errors import RingShapeError, shown
from ds_ring.masks.pattern import Pattern
from ds_ring.ops.checks import check_derivative, check_operand
from ds_ring.ops.context import ContextCache, RingContext, make_ring_context
from ds_ring.ops.gradients import loses_derivatives, run_compared, sees_plain
from ds_ring.ops.options import Options, as_value
from ds_ring.ops.ring_op import EagerAttention, ring_attention_op
from ds_ring.schedule.layout import Layout

if TYPE_CHECKING:
    from ds_ring.masks.tiles import ScoreFunction

NAMES = ("q", "k", "v", "sinks")


class AskedContext(NamedTuple):
    """The arguments of a public call from which its context is made; see `ring_attention`."""

    pattern: Pattern
    layout: Layout | str
    mesh: RingMesh
    scale: float | None = None
    kernel: str = "auto"
    options: PassOptions | None = None
    score_mod: ScoreFunction | None = None


def get_call_context(
    request: AskedContext, check: Callable[[RingContext], None] | None = None
) -> RingContext:
    """Return the context of an eager call; arguments that are refused, by `check` too, raise on all ranks."""
    pattern, layout, mesh, *settings, score_mod = request
    check_mesh(mesh)
    key: tuple[Any, ...] = ()
    context: RingContext | None = None
    with suppress(Exception):  # what cannot be hashed or compared is refused below, by name
        if score_mod is None:
            key = (pattern, layout, *settings, *map(type, settings), check)  # the types tell 1 from True
            context = mesh.owners[ContextCache].recent.get(key)
    if context is None:
        with collective(mesh, "attention"):
            context = make_context(request)
            if check is not None:
                check(context)
        # Functions are not kept here: the values that they captured may change.
        if key and not pattern.masks:
            mesh.owners[ContextCache].recent[key] = context
    return context


def make_context(request: AskedContext) -> RingContext:
    """Return the context of these arguments, or raise the RingError that refuses one of them."""
    pattern, layout, mesh, scale, kernel, pass_options, score_mod = request
    chosen = {} if isinstance(kernel, str) and kernel == "auto" else {"kernel": kernel}
    options = Options.make(pass_options, scale=scale, score_mod=as_value(score_mod), **chosen)
    return make_ring_context(pattern, layout, mesh, options)


def check_derivatives(context: RingContext) -> None:
    """Refuse derivatives that the operator would lose silently."""
    check_derivative()
    if context.options.score_mod is not None:
        context.options.score_mod.check_gradient()


def check_operands(return_lse: object, names: tuple[str, ...], *operands: object) -> None:
    """Refuse arguments that the operator's schema would reject before its body runs; only sinks may be None.

    Raises:
        RingShapeError: names it.
    """
    for name, x in zip(names, operands, strict=True):
        if x is not None or name != "sinks":
            check_operand(name, x)
    if not isinstance(return_lse, bool):
        raise RingShapeError(f"return_lse: expected True or False, got {shown(return_lse)}; use a bool")


def check_eager(
    context: RingContext, return_lse: object, names: tuple[str, ...], *operands: Tensor | None
) -> None:
    """Check the arguments of an eager call: plain dense tensors pass at once.

    Others get the checks of a compiled call, and a refusal reaches all ranks.
    """
    is_plain_call = return_lse is True or return_lse is False
    for name, x in zip(names, operands, strict=True):
        if x is None:
            is_plain_call = is_plain_call and name == "sinks"
        else:
            is_plain_call = is_plain_call and type(x) is Tensor and x.layout is strided
            is_plain_call = is_plain_call and not (x.is_meta or x.is_nested or x.is_quantized)
    # functorch would raise before the operator's body
    if not is_plain_call or loses_derivatives() or context.options.score_mod is not None:
        with collective(context.mesh, "attention"):
            check_operands(return_lse, names, *operands)
            check_derivatives(context)


def attend(
    q: Tensor, k: Tensor, v: Tensor, context: RingContext, sinks: Tensor | None, return_lse: bool
) -> Any:
    """Return out [B, H, S, E] of queries that are sharded; with `return_lse` (out, lse). Eager."""
    check_eager(context, return_lse, NAMES, q, k, v, sinks)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        if sees_plain((q, k, v, sinks)):
            return run_compared(context.mesh, "ring attention", EagerAttention.apply, q, k, v, context, sinks)
        # The operator, if a transform, a mode or a subclass must see one node.
        return run_compared(context.mesh, "ring attention", ring_attention_op, q, k, v, context.handle, sinks)

    if context.mesh.ulysses_size > 1:
        from ds_ring.ops.ulysses import with_ulysses

        return with_ulysses(run, q, k, v, context.handle, context.mesh.ulysses_size, return_lse)
    out, lse = run(q, k, v)
    return (out, lse) if return_lse else out
