"""Describe all problems of a configuration in one error: pydantic's, as sentences with the key's path."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from ds_ring.config.messages import Accepted, Refused, sentence, shown
from ds_ring.errors import RingConfigError

MAX_PROBLEMS = 20


_MAX_LETTERS = 1200


class Problem(NamedTuple):
    """Name one thing that is wrong: the dotted key, and a sentence with expected, got and what to do."""

    key: str
    sentence: str


def config_error(source: str, *problems: Problem | str) -> RingConfigError:
    """Build one error for all problems: one line for one, a list of at most 20 for more."""
    texts = []
    for item in problems[:MAX_PROBLEMS]:
        text = item if isinstance(item, str) else f"{item.key}: {item.sentence}"
        # Without characters that a terminal would obey.
        signs = [
            sign if sign.isprintable() or sign == "\n" else ascii(sign)[1:-1] for sign in text[:_MAX_LETTERS]
        ]
        text = "".join(signs)
        texts.append(text if len(text) < _MAX_LETTERS else f"{text}...")
    if len(problems) == 1:
        return RingConfigError(f"{source}: {texts[0]}")
    omitted = len(problems) - len(texts)
    texts += [f"and {omitted:,} more"] if omitted else []
    return RingConfigError(f"{source}: {len(problems)} problems" + "".join(f"\n  - {text}" for text in texts))


def did_you_mean(word: object, choices: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the choice nearest to `word`, looking past case, dashes, underscores and blanks."""
    choices = list(choices)
    plain, *others = (re.sub(r"[^a-z0-9]", "", text.lower()) for text in (str(word), *choices))
    near = difflib.get_close_matches(plain, others, n=1, cutoff=cutoff)
    return choices[others.index(near[0])] if near else None


def listed(choices: Sequence[object]) -> str:
    """Format choices as `a, b or c`."""
    words = [str(choice) for choice in choices]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def list_problems(error: ValidationError, model: type[BaseModel], prefix: str) -> list[Problem]:
    """Return every problem that pydantic found in `model`, whose keys are under `prefix`."""
    details = error.errors(include_url=False)
    problems: dict[str, Problem] = {}  # one for each key: of a union, pydantic reports every member
    for done, detail in enumerate(details):
        if len(problems) >= MAX_PROBLEMS:  # more are only counted: 40 000 unknown keys would take minutes
            return [*problems.values(), *[Problem("", "")] * (len(details) - done)]
        problem = _problem(detail, model, prefix)
        problems.setdefault(problem.key, problem)
    return list(problems.values())


def _problem(detail: ErrorDetails, root: type[BaseModel], prefix: str) -> Problem:
    loc, value = detail["loc"], detail["input"]
    owner, field, depth = _field_at(root, loc)
    if field is None:
        known = _keys(owner)
        near = did_you_mean(loc[-1], known) or _elsewhere(loc[-1], root, prefix)
        unknown = f"the unknown key '{str(loc[-1])[:80]}'"
        if near:  # the list of all keys would hide it
            return Problem(_dotted(prefix, loc), sentence("a known key", unknown, f"did you mean '{near}'?"))
        what = sentence(f"one of {', '.join(known)}", unknown, "remove it, or move it to its section")
        return Problem(_dotted(prefix, loc), what)
    takes = accepted_by(field)
    # Inside a field there are indices, keys of an object of options, and members of a union: not keys.
    inside = [part for part in loc[depth:] if isinstance(part, int) or get_origin(field.annotation) is dict]
    key = _dotted("" if takes.outside else prefix, (*loc[:depth], *inside))
    refused = detail.get("ctx", {}).get("error")
    if isinstance(refused, Refused):
        return Problem(key, str(refused))
    choices = list_choices(field)
    expected = f"one of {', '.join(map(shown, choices))}" if choices else takes.what
    if detail["type"] == "less_than_equal" and "at most" not in expected:
        expected = f"{takes.what}, at most {detail['ctx']['le']:,.0f}"
    near = did_you_mean(value, choices) if isinstance(value, str) and choices else None
    advice = f'did you mean "{near}"?' if near else takes.advice
    if _is_quoted_number(value) and "number" in expected:
        advice = "write it without quotes"
    return Problem(key, sentence(expected, shown(value), advice))


def _is_quoted_number(value: object) -> bool:
    try:
        return isinstance(value, str) and math.isfinite(float(value))
    except ValueError:
        return False


def _field_at(
    root: type[BaseModel], loc: Sequence[int | str]
) -> tuple[type[BaseModel], FieldInfo | None, int]:
    """Return the model that owns the key at `loc`, its field (None if it is unknown), and the key's depth."""
    owner: type[BaseModel] = root
    field: FieldInfo | None = None
    inner: Any = root
    for depth, part in enumerate(loc):
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return owner, field, depth
        owner, field = inner, inner.model_fields.get(str(part))
        inner = field.annotation if field else None
    return owner, field, len(loc)


def _elsewhere(key: int | str, model: type[BaseModel], prefix: str) -> str | None:
    """Return the path of the key of this model, or of a section inside it, that `key` is or nearly is."""
    paths = {path.rpartition(".")[2]: path for path in _paths(model, prefix)}
    near = did_you_mean(key, paths, cutoff=0.8)  # another section's: a slip of the pen at most
    return None if near is None else paths[near]


def _paths(model: type[BaseModel], prefix: str) -> Iterator[str]:
    """Yield the path of each key, those of inner sections first."""
    for name, field in model.model_fields.items():
        inner, path = field.annotation, _dotted(prefix, (name,))
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _paths(inner, path)
        if not accepted_by(field).outside:
            yield path


def _dotted(prefix: str, loc: Sequence[int | str]) -> str:
    parts = [f"[{part}]" if isinstance(part, int) else f".{part[:80]}" for part in loc]
    return (prefix + "".join(parts)).removeprefix(".")


def accepted_by(field: FieldInfo) -> Accepted:
    """Return what a field of a `Section` accepts."""
    notes = [note for note in field.metadata if isinstance(note, Accepted)]
    assert notes, f"the field {field!r} needs an Accepted, or nothing can be said about its errors"
    return notes[0]


def list_choices(field: FieldInfo) -> tuple[str, ...]:
    """Return the words that a field of `Literal` type accepts; none for any other field."""
    return get_args(field.annotation) if get_origin(field.annotation) is Literal else ()


def _keys(model: type[BaseModel]) -> list[str]:
    return [name for name, field in model.model_fields.items() if not accepted_by(field).outside]
