"""Hand the patterns and functions of a traced call over as real objects, and guard what they captured.

The first traced call that has one loads this file. It runs while Dynamo traces, and uses its internals
through `torch._dynamo.comptime`.

[Note: guards of functions]
Dynamo guards the code of a function that comes from outside, and neither its closure nor its defaults, since
these are guarded where the function is inlined; ours is opaque. So the walk over all that the function
captured (`CapturedValues`) is a guard: another function is the same if it has the same code, equal numbers
and the same unchanged tensors and objects; else Dynamo compiles again. A function that the traced code makes
is made here, of the values that Dynamo knows at that time. A tensor that the graph computes has none.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.comptime import comptime
from torch._dynamo.guards import install_guard
from torch._dynamo.source import GlobalStateSource
from torch._dynamo.variables import (
    NestedUserFunctionVariable,
    TensorVariable,
    UserDefinedObjectVariable,
    UserMethodVariable,
)
from torch._dynamo.variables.functions import FunctoolsPartialVariable
from torch._dynamo.variables.tensor import SymNodeVariable
from torch._guards import Guard, Source

from ds_ring.compat.dynamo import add_guard, resolve_source
from ds_ring.errors import RingConfigError, RingError, RingPatternError
from ds_ring.masks.pattern import Pattern
from ds_ring.plugin import TRACERS, load

_CHANGED = "a mask or score function of ds_ring has captured other values"
_NUMBERS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class Taken:
    """Hold a real object, or why it is refused. Traced code hands it over whole."""

    def __init__(self, value: object, refusal: RingError | None = None) -> None:
        self._value, self._refusal = value, refusal

    @property
    def value(self) -> Any:
        """Return the object, or raise the RingConfigError that refuses it."""
        if self._refusal is not None:
            raise self._refusal
        return self._value


def taken(value: Any) -> Any:
    """Return the `Taken` of a pattern, a mask function or a score function. Traced by Dynamo."""
    handed_over = value  # `_take` writes this local
    comptime(_take)
    return handed_over


def _take(context: Any) -> None:
    tx = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    variable = context.get_local("value")._i_will_not_complain_if_bc_breaks_VariableTracker()
    try:
        handed_over = Taken(_resolve(tx, variable))
    except RingError as error:
        handed_over = Taken(None, error)
    tx.symbolic_locals["handed_over"] = UserDefinedObjectVariable(handed_over)


def _resolve(tx: Any, variable: Any) -> Any:
    """Return the object that a variable of Dynamo stands for, guarded.

    Raises:
        RingConfigError: the compiled function computes or changes it.
    """
    variable = variable.realize()
    if isinstance(variable, SymNodeVariable):
        return variable.evaluate_expr(tx.output)
    if variable.source is None or isinstance(variable, NestedUserFunctionVariable):
        return _make_object(tx, variable)
    if variable.is_python_constant() and isinstance(variable.as_python_constant(), _NUMBERS):
        return variable.as_python_constant()
    value = resolve_source(tx, variable.source)
    if variable in tx.output.side_effects and tx.output.side_effects.is_modified(variable):
        raise _make_refusal(value, "an object that is changed inside")
    if isinstance(variable, TensorVariable) and variable.as_proxy().node.op != "placeholder":
        raise _make_refusal(value, "a tensor that is computed inside")
    _guard(tx, variable.source, value)
    return value


def _make_object(tx: Any, variable: Any) -> Any:
    """Return a real object in place of one that the traced code makes."""
    if isinstance(variable, NestedUserFunctionVariable):
        function = _make_function(tx, variable)
        if "captured" in TRACERS:
            captured = load(TRACERS["captured"]).by(function)
            _install(GlobalStateSource(), lambda _: captured.is_same(function))
        return function
    if isinstance(variable, FunctoolsPartialVariable):
        keywords = {name: _resolve(tx, argument) for name, argument in variable.keywords.items()}
        return functools.partial(
            _resolve(tx, variable.func), *[_resolve(tx, argument) for argument in variable.args], **keywords
        )
    if isinstance(variable, UserMethodVariable):
        return types.MethodType(variable.fn, _resolve(tx, variable.obj))
    if isinstance(variable, TensorVariable):
        raise _make_refusal(torch.Tensor, "a tensor that is computed inside")
    if isinstance(variable, UserDefinedObjectVariable):
        return variable.value
    if variable.is_python_constant():
        return variable.as_python_constant()
    raise _make_refusal(variable.python_type(), "one that is made inside")


def _make_function(tx: Any, variable: Any) -> types.FunctionType:
    def contents(cell: Any) -> Any:
        content = tx.output.side_effects.load_cell(cell)
        if content is variable:
            raise _make_refusal(types.FunctionType, "one that calls itself")
        return _resolve(tx, content)

    cells = (
        tuple(types.CellType(contents(cell)) for cell in variable.closure.items) if variable.closure else ()
    )
    name = variable.fn_name.as_python_constant()
    function = types.FunctionType(variable.get_code(), variable.f_globals, name, closure=cells)
    if variable.defaults is not None:
        function.__defaults__ = tuple(_resolve(tx, default) for default in variable.defaults.items)
    if variable.kwdefaults is not None:
        defaults = variable.kwdefaults.items
        function.__kwdefaults__ = {
            key.vt.as_python_constant(): _resolve(tx, default) for key, default in defaults.items()
        }
    return function


def _check_unwritten(tx: Any, value: object, tensors: list[torch.Tensor]) -> None:
    """Refuse captured tensors that the traced code has written to: these writes come when the graph runs."""
    for node in tx.output.placeholders:
        argument = node.meta.get("grapharg")
        if argument is None or not any(argument.example is tensor for tensor in tensors):
            continue
        if node.meta["example_value"]._version > 0:
            raise _make_refusal(value, "a tensor that is written to inside")


def _guard(tx: Any, source: Source, value: Any) -> None:
    """Compile again where the source has another object, or one that captured something else."""
    if isinstance(value, Pattern):
        unchanged = _is_unchanged(value)  # a graph of one that is changed refuses it
        _install(source, lambda x: x is value and _is_unchanged(value) == unchanged)
    elif "captured" not in TRACERS:
        _install(source, lambda x: x is value)
    else:
        captured = load(TRACERS["captured"]).by(value)
        _check_unwritten(tx, value, captured.tensors)
        _install(source, captured.is_same)


def _is_unchanged(pattern: Pattern) -> bool:
    try:
        pattern.check_unchanged()
    except RingPatternError:
        return False
    return True


def _install(source: Source, is_same: Callable[[Any], bool]) -> None:
    def create(builder: Any, guard: Guard) -> None:
        whole = isinstance(source, GlobalStateSource)
        manager = builder.guard_manager.root if whole else builder.get_guard_manager(guard)
        add_guard(manager, is_same, _CHANGED, guard.user_stack)

    install_guard(source.make_guard(create))


def _make_refusal(value: object, got: str) -> RingConfigError:
    kind = getattr(value, "__name__", type(value).__name__)
    expected = "values that exist before the compiled function runs"
    advice = "make it outside of the compiled function, or leave the call out of the graph"
    return RingConfigError.wrong(f"mask or score function ({kind})", expected, got, advice)
