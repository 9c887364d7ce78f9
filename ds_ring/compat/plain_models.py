"""Check the options of a pass without pydantic: the part of its interface that options use.

`compat/pydantic.py` takes this where pydantic is not installed. Values are checked by the same annotations,
with the same errors: tests/unit/compat/test_plain_models.py compares both. The JSON needs pydantic itself.
"""

from __future__ import annotations

import math
import operator
import types
from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

ConfigDict = dict
ErrorDetails = dict[str, Any]
_LIMITS = {
    "gt": ("greater_than", operator.gt),
    "ge": ("greater_than_equal", operator.ge),
    "lt": ("less_than", operator.lt),
    "le": ("less_than_equal", operator.le),
}


class JsonValue:
    """Stand for any value of JSON in an annotation."""


class BeforeValidator(NamedTuple):
    """Change a value before it is checked. Annotated onto a type."""

    func: Callable[[Any], Any]


class PlainValidator(NamedTuple):
    """Check a value in place of its type. Annotated onto a type."""

    func: Callable[[Any], Any]


class ValidationInfo(NamedTuple):
    """Hold the fields that were checked before, and the name of this one."""

    data: dict[str, Any]
    field_name: str


class ValidationError(ValueError):
    """Carry one entry for each wrong value, in pydantic's form."""

    def __init__(self, details: list[ErrorDetails]) -> None:
        super().__init__(details)
        self.details = details

    def errors(self, include_url: bool = True) -> list[ErrorDetails]:
        """Return the entries."""
        return self.details


class _Invalid(ValueError):
    """Say which kind of error a value is, with its limit."""

    def __init__(self, kind: str = "type", **context: Any) -> None:
        super().__init__(kind)
        self.kind, self.context = kind, context


class FieldInfo:
    """Describe a field: its default, its limits, and what its annotation says."""

    def __init__(self, default: Any = ..., description: str = "", **limits: Any) -> None:
        self.default, self.description, self.limits = default, description, limits
        self.annotation: Any = None
        self.metadata: tuple[Any, ...] = ()

    def with_hint(self, hint: Any) -> FieldInfo:
        """Return the field of an annotation."""
        field = FieldInfo(self.default, self.description, **self.limits)
        is_annotated = get_origin(hint) is Annotated
        field.annotation, *notes = get_args(hint) if is_annotated else (hint,)
        field.metadata = tuple(notes)
        return field

    def check(self, value: Any) -> None:
        """Raise _Invalid for a number beyond a limit."""
        if self.limits.get("allow_inf_nan") is False and not math.isfinite(value):
            raise _Invalid("finite_number")
        for name, limit in self.limits.items():
            if name in _LIMITS and not _LIMITS[name][1](value, limit):
                raise _Invalid(_LIMITS[name][0], **{name: limit})


Field = FieldInfo


def field_validator(*names: str) -> Callable[[Any], Any]:
    """Mark a class method that checks fields after their types."""

    def mark(method: Any) -> Any:
        method.__func__.validates = names
        return method

    return mark


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_json(item) for name, item in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or isinstance(value, (str, int, float, bool))


def _check(annotation: Any, notes: tuple[Any, ...], value: Any) -> Any:
    """Return a value of the annotated type, or raise ValueError."""
    for note in reversed(notes):
        if isinstance(note, PlainValidator):
            return note.func(value)
        if isinstance(note, BeforeValidator):
            value = note.func(value)
    value = _check_type(annotation, value)
    for note in notes:
        if isinstance(note, FieldInfo):
            note.check(value)
    return value


def _check_type(annotation: Any, value: Any) -> Any:
    kind, choices = get_origin(annotation), get_args(annotation)
    if kind is Annotated:
        return _check(choices[0], choices[1:], value)
    if kind in (Union, types.UnionType):
        errors = []
        for choice in choices:
            try:
                return _check_type(choice, value)
            except ValueError as error:
                errors.append(error)
        raise errors[0]
    is_right = (
        annotation is Any
        or (kind is Literal and any(value == word and type(value) is type(word) for word in choices))
        or (kind is dict and type(value) is dict and _is_json(value))
        or (annotation is float and type(value) is int)
        or type(value) is annotation
    )
    if not is_right:
        raise _Invalid
    return float(value) if annotation is float else value


class _Validator:
    """Fill an instance, as pydantic's validator of a class does."""

    def validate_python(self, values: dict[str, Any], self_instance: Any) -> None:
        """Check all values and set them as attributes; raise ValidationError for all that are wrong."""
        model, data = type(self_instance), dict[str, Any]()
        details = []
        for name, field in model.model_fields.items():
            given = values.get(name, field.default)
            try:
                value = _check(field.annotation, (*field.metadata, field), given)
                for check in (getattr(model, check) for check in model.checks.get(name, ())):
                    value = check(value, ValidationInfo(data, name))
                data[name] = value
            except ValueError as error:
                kind, context = "value_error", {"error": error}
                if isinstance(error, _Invalid):
                    kind, context = error.kind, error.context
                details.append({"type": kind, "loc": (name,), "input": given, "ctx": context})
        unknown = [name for name in values if name not in model.model_fields]
        details += [{"type": "extra_forbidden", "loc": (name,), "input": values[name]} for name in unknown]
        if details:
            raise ValidationError(details)
        vars(self_instance).update(data)


class BaseModel:
    """Fields by annotations, and a validator that checks them. Frozen."""

    model_fields: ClassVar[dict[str, FieldInfo]] = {}
    checks: ClassVar[dict[str, list[str]]] = {}  # names of methods, by field
    __pydantic_validator__: ClassVar[_Validator] = _Validator()

    def __init_subclass__(cls) -> None:
        hints = get_type_hints(cls, include_extras=True)
        fields = {name: getattr(cls, name, None) for name in hints}
        cls.model_fields = {
            name: field.with_hint(hints[name])
            for name, field in fields.items()
            if isinstance(field, FieldInfo)
        }
        cls.checks = {}
        for name in dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base)):
            for field in getattr(getattr(cls, name), "validates", ()):
                cls.checks.setdefault(field, []).append(name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise ValidationError([{"type": "frozen_instance", "loc": (name,), "input": value}])

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return ((name, value) for name, value in vars(self).items() if not name.startswith("_"))

    def __eq__(self, another: object) -> bool:
        if type(self) is not type(another):
            return NotImplemented
        return all(getattr(self, name) == getattr(another, name) for name in self.model_fields)

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.model_fields)
        return f"{type(self).__name__}({fields})"
