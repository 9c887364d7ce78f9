"""What differs between versions of Dynamo, the tracer of torch.compile. Imported only while it traces."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch._dynamo import guards
from torch._dynamo.comptime import comptime
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.variables import UserDefinedObjectVariable, functions
from torch._guards import Source


def takes_objects() -> bool:
    """Return whether Dynamo hands objects to functions that are marked as constant: from torch 2.12 on."""
    return "UserDefinedObjectVariable" in inspect.getsource(functions.invoke_and_store_as_constant)


class _Held(UserDefinedObjectVariable):
    """An object that is its own constant."""

    def as_python_constant(self) -> Any:
        return self.value


def hold(value: Any) -> Any:
    """Return an object as a constant, guarded by its identity. Traced by Dynamo."""
    held = value  # `_hold` writes this local
    comptime(_hold)
    return held


def _hold(context: Any) -> None:
    tx = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    variable = context.get_local("value")._i_will_not_complain_if_bc_breaks_VariableTracker().realize()
    if isinstance(variable, UserDefinedObjectVariable):
        if variable.source is not None:
            install_guard(variable.source.make_guard(GuardBuilder.ID_MATCH))
        tx.symbolic_locals["held"] = _Held(variable.value)


def resolve_source(tx: Any, source: Source) -> Any:
    """Return the value of a source, in the frame in which the compiled function began."""
    root = tx.output.root_tx
    scope, closures = {"G": root.f_globals, "L": root.f_locals}, guards._get_closure_vars()
    if hasattr(source, "get_value"):  # from torch 2.11 on
        return source.get_value(scope, closures, {})
    name: Any = source.name  # a method, before
    return eval(name(), scope, closures)


def add_guard(manager: Any, test: Callable[[Any], bool], text: str, stack: Any) -> None:
    """Add a guard that calls a function; from torch 2.10 on it takes the user's stack, too."""
    takes_stack = "arg2" in manager.add_lambda_guard.__doc__
    manager.add_lambda_guard(test, [text], *([stack] if takes_stack else []))
