"""Make eager calls: refuse derivatives that would be lost, compare ranks, choose how autograd sees a pass.

`compiled.py` makes the calls of functions that torch.compile traces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, strided
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from ds_ring.comm.collective import collective
from ds_ring.comm.mesh import RingMesh
from ds_ring.ops.checks import NAMES, check_derivative, check_operands, sees_plain, shards
from ds_ring.ops.context import RingContext
from ds_ring.ops.ring_op import EagerAttention, ring_attention_op

T = TypeVar("T")


def loses_derivatives() -> bool:
    """Return whether a torch.func transform or a dual level is active; `check_derivative` may refuse it."""
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def run_compared(mesh: RingMesh, name: str, function: Callable[..., T], *arguments: Any) -> T:
    """Return `function(*arguments)`, a forward call that sends.

    Its headers say whether an operand requires a gradient: [Note: a header on every call] in `collective.py`.

    Raises:
        RingConfigError: a transform or a dual level under which the call would lose a derivative.
        RingMismatchError: some ranks' operands require a gradient, and others' do not; nothing was sent.
    """
    if torch.compiler.is_compiling():
        return function(*arguments)
    if loses_derivatives():
        with collective(mesh, name):
            check_derivative(name)
    if mesh.sequence_size == 1:
        return function(*arguments)
    requires = torch.is_grad_enabled() and _check_requires_grad(arguments)
    words = "one that requires it" if requires else "none that requires it"
    state, before = mesh.state, mesh.state.compared
    state.compared = "operands and a gradient", 1 + requires, words
    try:
        return function(*arguments)
    finally:
        state.compared = before


def _check_requires_grad(arguments: Sequence[Any]) -> bool:
    for x in arguments:
        if isinstance(x, (list, tuple)):
            if _check_requires_grad(x):
                return True
        elif isinstance(x, Tensor) and x.requires_grad:
            return True
    return False


def check_derivatives(context: RingContext) -> None:
    """Refuse derivatives that the operator would lose silently."""
    check_derivative()
    if context.options.score_mod is not None:
        context.options.score_mod.check_gradient()


def check_eager(
    context: RingContext, return_lse: object, names: tuple[str, ...], *operands: Tensor | None
) -> bool:
    """Check the arguments of an eager call; return whether all tensors are plain (`sees_plain`).

    A plain tensor is handled by autograd alone: no mode, transform or subclass. Dense plain tensors need no
    further check, unless there is a score_mod, a transform or a dual level. All others get the checks of a
    compiled call, and a refusal reaches all ranks.
    """
    is_plain = sees_plain(operands)
    is_dense = is_plain and (return_lse is True or return_lse is False)
    for name, x in zip(names, operands, strict=True):
        if x is None:
            is_dense = is_dense and name == "sinks"
        else:
            is_dense = is_dense and x.layout is strided and not (x.is_meta or x.is_nested or x.is_quantized)
            shard = shards.get(id(x))
            is_dense = is_dense and (shard is None or shard.layout is context.layout)
    # Check transforms here: functorch would raise before the operator's body, where ranks compare headers.
    if not is_dense or loses_derivatives() or context.options.score_mod is not None:
        with collective(context.mesh, "attention"):
            check_operands(return_lse, names, *operands)
            if shards:
                from ds_ring.ops.shard import check_shards

                check_shards(context, names, operands)
            check_derivatives(context)
    return is_plain


def attend(
    q: Tensor, k: Tensor, v: Tensor, context: RingContext, sinks: Tensor | None, return_lse: bool
) -> Any:
    """Return out [B, H, S, E] of queries that are sharded; with `return_lse` (out, lse). Eager."""
    is_plain = check_eager(context, return_lse, NAMES, q, k, v, sinks)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        if is_plain:
            return run_compared(context.mesh, "ring attention", EagerAttention.apply, q, k, v, context, sinks)
        # The operator, if a transform, a mode or a subclass must see one node.
        return run_compared(context.mesh, "ring attention", ring_attention_op, q, k, v, context.handle, sinks)

    return attend_all_heads(run, q, k, v, context.handle, context.mesh.ulysses_size, return_lse)


def attend_all_heads(
    run: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, handle: int, ulysses_size: int, return_lse: bool
) -> Any:
    """Call `run` on q, k and v and return all heads; inside `run`, a Ulysses rank has some of the heads."""
    if ulysses_size > 1:
        from ds_ring.ops.ulysses import with_ulysses

        return with_ulysses(run, q, k, v, handle, ulysses_size, return_lse)
    out, lse = run(q, k, v)
    return (out, lse) if return_lse else out
