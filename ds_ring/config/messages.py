"""Describe the errors of a configuration in sentences: where, expected, got, what to do.

`Section` is the strict base model of pydantic; an `Accepted` in a field's annotation describes its values.
"""

from __future__ import annotations

import difflib
import json
import math
import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, get_args, get_origin

from ds_ring.compat.pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ErrorDetails,
    Field,
    FieldInfo,
    ValidationError,
)  # fmt: skip
from ds_ring.errors import RingConfigError
from ds_ring.errors import shown as shown_in_errors
from ds_ring.limits import MAX_SECONDS, MAX_TOKENS

if TYPE_CHECKING:
    from ds_ring.masks.pattern import Pattern

MAX_PROBLEMS = 20
_MAX_LETTERS = 1200


@dataclass(frozen=True)
class Accepted:
    """Describe what a field accepts, and what to do when it got something else. Annotated onto the field."""

    # `outside` marks a field whose key is at the top level of the JSON, outside the section.

    what: str
    advice: str
    outside: bool = False


class Problem(NamedTuple):
    """Name one thing that is wrong: the dotted key, and a sentence with expected, got and what to do."""

    key: str
    sentence: str


class Refused(ValueError):
    """Carry a whole sentence out of a validator; pydantic keeps it, `list_problems` unwraps it."""


def sentence(expected: str, got: str, advice: str) -> str:
    """Format a complaint: expected, got, what to do."""
    return f"expected {expected}, got {got}; {advice}"


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
    if len(str(word)) > 200:  # no typing error; the comparison would be slow
        return None
    choices = list(choices)
    plain, *others = (re.sub(r"[^a-z0-9]", "", text.lower()) for text in (str(word), *choices))
    near = difflib.get_close_matches(plain, others, n=1, cutoff=cutoff)
    return choices[others.index(near[0])] if near else None


def shown(value: object) -> str:
    """Show `value` as JSON text, cut where it is long, so that "4" and 4 look different."""
    if isinstance(value, int) and abs(value) >= 10**30:
        return "a number of more than 30 digits"
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = shown_in_errors(value)
    if isinstance(value, (list, tuple)) and len(text) > 80:  # the ids of tokens, say
        text = shown_in_errors(value).partition(" ")[2]
    return text if len(text) <= 80 else f"{text[:77]}..."


def listed(choices: Sequence[object]) -> str:
    """Format choices as `a, b or c`."""
    words = [str(choice) for choice in choices]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def without_effect(got: str, beside: str, why: str) -> str:
    """Format the sentence for a value that nothing would read."""
    return sentence("the default", f"{got} beside {beside}, which {why}", "leave it out: it has no effect")


# Types of fields that several sections have.
def as_int(value: Any) -> Any:
    """Return numpy's integers as Python's, and everything else as it is."""
    return value if isinstance(value, bool) or not isinstance(value, Integral) else operator.index(value)


ONE_UP = "a whole number of at least 1"
WORD = Accepted("a word", "write one of these in double quotes")
AtLeastOne = Annotated[int, BeforeValidator(as_int), Field(ge=1, le=MAX_TOKENS)]
Flag = Annotated[bool, Accepted("true or false", "write true or false, without quotes")]
Switch = Annotated[
    Literal["auto"] | bool, Accepted('"auto", true or false', "write true or false, without quotes")
]
Timeout = Annotated[
    float,
    Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False),
    Accepted("a number of seconds above 0", "use 10 or 60, say"),
]
FlagOrPart = Annotated[
    bool | Annotated[float, Field(gt=0, lt=1)],
    Accepted("true, false or a number between 0 and 1", "use 0.5 for the first half of the sequence"),
]


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


class Section(BaseModel):
    """Forbid unknown keys and conversions, freeze, and let no raw pydantic error out of its call."""

    # Every field of a subclass has an `Accepted`.

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", validate_default=True)

    def __init__(self, /, **values: Any) -> None:
        try:
            self.__pydantic_validator__.validate_python(values, self_instance=self)
        except ValidationError as error:
            name = type(self).__name__
            raise config_error(f"{name}(...)", *list_problems(error, type(self), "")) from None

    # Only calls from Python come through __init__. Pydantic looks for this mark (BaseModel.__init__ bears it
    # too) and, finding it, builds nested sections itself and so keeps one list of all problems.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


class FurtherKeys(Section):
    """Base of the keys of "pattern" that a pattern's own folder has (`PATTERN_KEYS` in `plugin.py`)."""

    def composed(self, parts: list[Pattern], causal: bool) -> list[Pattern]:
        """Return the patterns that are composed with `&`: `parts`, and that of these keys if they are set."""
        raise NotImplementedError


class PartKeys(Section):
    """Base of the keys of a part of the section that several capabilities have.

    The part is "off", "auto" or an object of keys. A key that is `true` is an error where the model does not
    allow it; one that is "auto" is left out there, with a line in the log.

    Attributes:
        description: of the part.
    """

    description: ClassVar[str]

    @property
    def changes_models(self) -> bool:
        """Return whether a part of a transformers model is on, or may be."""
        return False


def part_from_word(part: type[PartKeys], value: Any) -> Any:
    """Replace "off" by no key, and "auto" by every key that the model allows."""
    if value == "off":
        return {}
    return dict.fromkeys(part.model_fields, "auto") if value == "auto" else value


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
