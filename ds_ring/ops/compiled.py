"""Make the calls of functions that torch.compile traces. The first such call loads this file.

A traced call carries the handle of its context ([Note: handles in compiled code] in `context.py`). Dynamo
wraps what traced code raises into an error of its own; only an operator can raise an error unchanged, when
the graph runs. So a call that a check refuses becomes the operator `ds_ring::refuse`, and class and text of
the error are constants of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, NoReturn

from torch import Tensor

from ds_ring import errors
from ds_ring.comm.collective import collective
from ds_ring.comm.mesh import RingMesh, check_mesh
from ds_ring.compat.torch import assume_constant, operator
from ds_ring.config.pass_options import PassOptions
from ds_ring.errors import RingConfigError, RingError
from ds_ring.ops.checks import NAMES, check_operand, check_operands
from ds_ring.ops.context import AskedContext, get_object, get_ring_context, make_context, new_handle
from ds_ring.ops.eager import attend_all_heads, check_derivatives
from ds_ring.ops.ring_op import make_fake_results, ring_attention_op
from ds_ring.ops.tracing import constant, is_constant, read_number
from ds_ring.schedule.layout import Layout

GraphRefusal = tuple[str, str]  # name of the error's class, and its text


def refusal_from(check: Callable[..., object], *arguments: Any) -> GraphRefusal | None:
    """Return what a check raises as constants of a graph; None if it raises nothing. Traced by Dynamo."""
    try:
        check(*arguments)
    except RingError as error:
        return type(error).__name__, error.args[0]
    return None


@operator("ds_ring::refuse")
def refuse_op(q: Tensor, value_dim: int, kind: str, why: str, handle: int) -> tuple[Tensor, Tensor]:
    """Raise the error on all ranks of a mesh; in a graph its results are those of attention."""
    raise_in_trace(get_object(handle, RingMesh), kind, why)


@refuse_op.register_fake
def _(q: Tensor, value_dim: int, kind: str, why: str, handle: int) -> tuple[Tensor, Tensor]:
    return make_fake_results(q, q.new_empty((0, value_dim)))


def make_refused_results(
    q: Tensor, value_dim: int, refusal: GraphRefusal, mesh: RingMesh, return_lse: bool
) -> Any:
    """Return the results of a refused call, in a function that torch.compile traces."""
    if refusal_from(check_operand, "q", q) is not None:
        raise_in_trace(mesh, *refusal)  # no operator would run on it
    out, lse = refuse_op(q.detach(), value_dim, *refusal, new_handle(mesh))
    return (out, lse) if return_lse else out


@assume_constant
def raise_in_trace(mesh: RingMesh, kind: str, why: str) -> NoReturn:
    """Raise the error on all ranks, now."""
    with collective(mesh, "attention"):
        error: type[RingError] = getattr(errors, kind)
        raise error(why)


def check_traced(mesh: RingMesh, *operands: Any) -> None:
    """Do the checks of `check_operands`, in a function that torch.compile traces."""
    refusal = refusal_from(check_operands, *operands)
    if refusal is not None:
        raise_in_trace(mesh, *refusal)


def differentiable(handle: int | GraphRefusal) -> int | GraphRefusal:
    """Return the handle, or why the call is refused: it would lose a derivative silently."""
    return handle if isinstance(handle, tuple) else _check_handle(handle)


@assume_constant
def _check_handle(handle: int) -> int | GraphRefusal:
    return refusal_from(check_derivatives, get_ring_context(handle)) or handle


def attend_compiled(
    q: Tensor, k: Tensor, v: Tensor, handle: int | GraphRefusal, mesh: RingMesh, sinks: Tensor | None,
    return_lse: bool,
) -> Any:  # fmt: skip
    """Do what `attend` does, in a function that torch.compile traces."""
    check_traced(mesh, return_lse, NAMES, q, k, v, sinks)
    result = differentiable(handle)
    if isinstance(result, tuple):
        return make_refused_results(q, v.shape[-1], result, mesh, return_lse)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return ring_attention_op(q, k, v, result, sinks)

    return attend_all_heads(run, q, k, v, result, mesh.ulysses_size, return_lse)


_PARTS, _OBJECT = "ds_ring parts", "ds_ring object"


def described(value: Any, objects: list[Any]) -> Any:
    """Return a pattern or a score_mod as constants; what is none is put into `objects`. Traced by Dynamo."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return constant(value)
    if isinstance(value, tuple):
        return tuple([described(item, objects) for item in value])
    if getattr(value, "made_in_graphs", False):
        kind = type(value)
        return (_PARTS, kind, *[described(getattr(value, name), objects) for name in kind.__match_args__])
    from ds_ring.ops.traced_objects import taken

    objects.append(taken(value))
    return _OBJECT, len(objects) - 1


def _make_again(value: Any, objects: tuple[Any, ...]) -> Any:
    """Return what `described` was given, or raise the RingConfigError that refuses an object."""
    if isinstance(value, tuple) and value[:1] == (_PARTS,):
        return value[1](*(_make_again(item, objects) for item in value[2:]))
    if isinstance(value, tuple) and value[:1] == (_OBJECT,):
        instance = objects[value[1]].value
        lost = is_dataclass(instance) and any(
            attribute.init and not hasattr(instance, attribute.name) for attribute in fields(instance)
        )
        if lost:
            kind, expected = type(instance).__name__, "one that is made outside of the compiled function"
            got = "one that is made inside, whose attributes torch.compile does not hand over"
            raise RingConfigError.wrong(kind, expected, got, f"make the {kind} before the call")
        return instance
    if isinstance(value, tuple) and not is_constant(value):
        return tuple(_make_again(item, objects) for item in value)
    return read_number(value)


def get_handle(request: AskedContext) -> int | GraphRefusal:
    """Return the handle of a call, or why it is refused, in a function that torch.compile traces."""
    pattern, layout, mesh, scale, kernel, options, score_mod = request
    objects: list[Any] = []
    descriptions = described(pattern, objects), described(score_mod, objects)
    return _make_handle(*descriptions, layout, mesh, (constant(scale), kernel), options, *objects)


@assume_constant
def _make_handle(
    pattern: Any, score_mod: Any, layout: Layout | str, mesh: RingMesh, settings: tuple[Any, str],
    options: PassOptions | None, *objects: Any,
) -> int | GraphRefusal:  # fmt: skip
    check_mesh(mesh)
    try:
        real_pattern, mod = _make_again(pattern, objects), _make_again(score_mod, objects)
        scale, kernel = read_number(settings[0]), settings[1]
        request = AskedContext(real_pattern, layout, mesh, scale, kernel, options, mod)
        context = make_context(request)
    except RingError as error:
        return type(error).__name__, str(error)
    context.in_a_graph = True
    return context.handle
