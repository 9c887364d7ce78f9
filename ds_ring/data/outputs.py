"""Return what a module computed of this rank's tokens as if it had computed the whole batch.

Owns the forms of outputs: a ModelOutput, a dict, a dataclass or another object with attributes, a tuple, a
named tuple, a list, a tensor. What has a name is gathered when it is read, since logits of a long text fill a
memory; elements of tuples and lists at once, since torch reads a tuple without calling Python. How a sequence
is gathered, and what a loss is worth, is enable.py's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from functools import lru_cache, partial
from types import BuiltinFunctionType
from typing import Any

from torch import Tensor

Gather = Callable[[Tensor], Tensor]


class LocalOutput(OrderedDict[str, Any]):
    """Hold results of a forward pass that are returned as they are."""


def is_number(value: Any) -> bool:
    """Return whether an output is a loss, or another number that a module computed of its tokens."""
    return isinstance(value, Tensor) and value.ndim == 0 and value.is_floating_point()


def make_whole_output(
    output: Any, number: Callable[[Tensor], Tensor], gather: Gather, by_name: Mapping[str, Gather]
) -> Any:
    """Return the output for the whole batch. Collective: for its numbers now, and when a sequence is read.

    Args:
        output: of a forward pass of this rank's tokens.
        number: makes the number of the whole batch of this rank's.
        gather: makes a sequence whole, and leaves other tensors as they are.
        by_name: what does so in place of both for the outputs of these names.
    """
    if isinstance(output, Tensor):
        return number(output) if is_number(output) else gather(output)
    if isinstance(output, tuple | list):
        parts = [make_whole_output(part, number, gather, {}) for part in output]
        return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
    if isinstance(output, LocalOutput):
        return output
    if isinstance(output, Mapping) and not isinstance(output, dict):
        output = dict(output)
    values = _values(output)
    if not values:
        return output
    numbers = {name: by_name.get(name, number)(value) for name, value in values.items() if is_number(value)}
    later = {
        name: partial(make_whole_output, number=number, gather=by_name.get(name, gather), by_name={})
        for name in values
        if name not in numbers
    }
    return _copy_gathering(output, values | numbers, later)


def _values(output: Any) -> dict[Any, Any]:
    """Return the parts of an output by name; none of an object without tensors."""
    if isinstance(output, dict):
        return {name: dict.__getitem__(output, name) for name in output}
    slots = (name for kind in type(output).__mro__ for name in getattr(kind, "__slots__", ()))
    values = {name: getattr(output, name) for name in slots if hasattr(output, name)}
    values |= getattr(output, "__dict__", {})
    return values if any(isinstance(value, Tensor) for value in values.values()) else {}


def _copy_gathering(output: Any, values: dict[Any, Any], later: Mapping[Any, Callable[[Any], Any]]) -> Any:
    """Return a copy of an object that gathers the values of `later` when they are read."""
    kind: Any = type(output)
    new = (kind.__new__ if isinstance(kind.__new__, BuiltinFunctionType) else object.__new__)(
        _make_class(kind)
    )
    attributes = object.__getattribute__(new, "__dict__")
    attributes.update(getattr(output, "__dict__", {}))
    for name, value in values.items():
        _store(new, name, value)
    attributes["_later"] = dict(later)
    return new


def _store(output: Any, name: Any, value: Any) -> None:
    """Set a part of an output, past what its class does then."""
    if isinstance(output, dict):
        (OrderedDict if isinstance(output, OrderedDict) else dict).__setitem__(output, name, value)
    if not isinstance(output, dict) or name in vars(output):
        object.__setattr__(output, name, value)


class _ReadLater:
    """Gather a value of an output when it is read; a base of the class of each such output."""

    def __getattribute__(self, name: str) -> Any:
        if name[0] != "_":
            attributes = super().__getattribute__("__dict__")
            if name in attributes.get("_later", ()) and (name in attributes or not isinstance(self, dict)):
                _read(self, name)
        return super().__getattribute__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self).get("_later", {}).pop(name, None)
        super().__setattr__(name, value)


class _ReadLaterByKey(_ReadLater):
    """Do so for a dict; a ModelOutput is read by integers and slices, too."""

    # Subclasses are dicts. `dict(output)` and `**output` call these only where a class has its own __iter__.
    def __iter__(self: Any) -> Iterator[Any]:
        return super().__iter__()  # type: ignore[misc]

    def __getitem__(self: Any, key: Any) -> Any:
        if hasattr(type(self), "to_tuple") and isinstance(key, int | slice):
            names = list(self)[key]
            return tuple(self[name] for name in names) if isinstance(key, slice) else self[names]
        if key in self:
            return _read(self, key)
        if hasattr(type(self), "to_tuple"):  # whose class would read all of them to find none
            raise KeyError(key)
        return super().__getitem__(key)  # type: ignore[misc]

    def __setitem__(self: Any, key: Any, value: Any) -> None:
        vars(self).get("_later", {}).pop(key, None)
        super().__setitem__(key, value)  # type: ignore[misc]

    def __or__(self: Any, right: Any) -> Any:
        return dict(self.items()) | right

    def get(self: Any, key: Any, default: Any = None) -> Any:
        if key not in self:
            return default
        return self[key]

    def pop(self: Any, key: Any, *default: Any) -> Any:
        if key in self:
            self[key]
        return super().pop(key, *default)  # type: ignore[misc]

    def setdefault(self: Any, key: Any, default: Any = None) -> Any:
        if key in self:
            self[key]
        return super().setdefault(key, default)  # type: ignore[misc]

    def copy(self: Any) -> Any:
        return dict(self.items())

    def items(self: Any) -> ItemsView[Any, Any]:
        return {name: self[name] for name in self}.items()

    def values(self: Any) -> ValuesView[Any]:
        return dict(self.items()).values()


def _read(output: Any, name: Any) -> Any:
    """Return a part of an output, made whole."""
    by_key, later = isinstance(output, dict), vars(output).get("_later", {})
    if name in later:
        gather = later.pop(name)
        _store(output, name, gather(dict.__getitem__(output, name) if by_key else getattr(output, name)))
    return dict.__getitem__(output, name) if by_key else getattr(output, name)


@lru_cache(maxsize=64)
def _make_class(kind: Any) -> Any:
    base = _ReadLaterByKey if issubclass(kind, dict) else _ReadLater
    return type(f"Whole{kind.__name__}", (base, kind), {})
