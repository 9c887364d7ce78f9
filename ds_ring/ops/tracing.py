"""Write numbers so that torch.compile takes them for constants, and keep functions out of its graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


_HEX = "hexadecimal number"  # says that a text is a number


def constant(value: Any) -> Any:
    """Return a number as something that torch.compile takes for a constant; anything else as it is."""
    # Dynamo makes a number symbolic, at its second value or before. A symbol is no constant; its text is.
    most = 2**53 if isinstance(value, int) else 1e300
    if isinstance(value, (int, float)) and not isinstance(value, bool) and -most < value < most:
        return _HEX, float(value).hex(), isinstance(value, int)
    return value


def is_constant(value: object) -> bool:
    """Return whether it is a number that `constant` has written as a text."""
    return isinstance(value, tuple) and len(value) == 3 and value[0] == _HEX


def read_number(value: Any) -> Any:
    """Return the number that `constant` has written as a text; anything else as it is."""
    if not is_constant(value):
        return value
    number = float.fromhex(value[1])
    return int(number) if value[2] else number


def forbid_tracing(function: F) -> F:
    """Set the flags of `torch.compiler.disable`: a graph ends before the call, under fullgraph with an error.

    For functions whose tables depend on the layout, or that call a function of the user for each tile.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    why = f"ds_ring.{function.__name__} runs eagerly: call it outside of the graph, or without fullgraph=True"
    function._torchdynamo_disable_msg = why  # type: ignore[attr-defined]
    return function
