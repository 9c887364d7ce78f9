"""Describe the errors of a configuration in sentences: where, expected, got, what to do.

`Section` is the strict base model of pydantic; an `Accepted` in a field's annotation describes its values.
"""

from __future__ import annotations

import difflib
import json
import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PlainValidator,
    ValidationError,
)  # fmt: skip
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from ds_ring.errors import RingConfigError
from ds_ring.errors import shown as shown_in_errors
from ds_ring.limits import MAX_SECONDS, MAX_TOKENS

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
    """Carry a whole sentence out of a validator; pydantic keeps it, `problems_of` unwraps it."""


def sentence(expected: str, got: str, advice: str) -> str:
    """Format a complaint: expected, got, what to do."""
    return f"expected {expected}, got {got}; {advice}"


def config_error(source: str, *problems: Problem | str) -> RingConfigError:
    """Build one error for all problems: one line for one, a list of at most 20 for more."""
    texts = []
    for item in problems[:MAX_PROBLEMS]:
        text = item if isinstance(item, str) else f"{item.key}: {item.sentence}"
        # Without characters that a terminal would obey.
        kept = [
            sign if sign.isprintable() or sign == "\n" else ascii(sign)[1:-1] for sign in text[:_MAX_LETTERS]
        ]
        text = "".join(kept)
        texts.append(text if len(text) < _MAX_LETTERS else f"{text}...")
    if len(problems) == 1:
        return RingConfigError(f"{source}: {texts[0]}")
    more = len(problems) - len(texts)
    texts += [f"and {more:,} more"] if more else []
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
    return text if len(text) <= 80 else f"{text[:77]}..."


def listed(choices: Sequence[object]) -> str:
    """Format choices as `a, b or c`."""
    words = [str(choice) for choice in choices]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def short_numbers(options: dict[str, Any]) -> dict[str, Any]:
    """Return JSON values as they are; Refused for an integer too long to be written as decimal digits."""
    try:
        json.dumps(options)
    except ValueError as error:
        got = str(error).split(";")[0]
        raise Refused(sentence("numbers that can be written", got, "use shorter ones")) from None
    return options


def without_effect(got: str, beside: str, why: str) -> str:
    """Format the sentence for a value that nothing would read."""
    return sentence("the default", f"{got} beside {beside}, which {why}", "leave it out: it has no effect")


# Types of fields that several sections have.
def as_int(value: Any) -> Any:
    """Return numpy's integers as Python's, and everything else as it is."""
    return value if isinstance(value, bool) or not isinstance(value, Integral) else operator.index(value)


SWITCH = Accepted('"auto", true or false', "write true or false, without quotes")


def _switch(value: object) -> Literal["auto"] | bool:
    if isinstance(value, bool) or (isinstance(value, str) and value == "auto"):
        return value  # type: ignore[return-value]
    raise Refused(sentence(SWITCH.what, shown(value), SWITCH.advice))


FLAG_OR_PART = Accepted(
    "true, false or a number between 0 and 1", "use 0.5 for the first half of the sequence"
)


def _flag_or_part(value: object) -> bool | float:
    if isinstance(value, bool) or (isinstance(value, float) and 0 < value < 1):
        return value
    raise Refused(sentence(FLAG_OR_PART.what, shown(value), FLAG_OR_PART.advice))


ONE_UP = "a whole number of at least 1"
WORD = Accepted("a word", "write one of these in double quotes")
JsonObject = Annotated[dict[str, JsonValue], AfterValidator(short_numbers)]
AtLeastOne = Annotated[int, BeforeValidator(as_int), Field(ge=1, le=MAX_TOKENS)]
Flag = Annotated[bool, Accepted("true or false", "write true or false, without quotes")]
Switch = Annotated[Literal["auto"] | bool, PlainValidator(_switch), SWITCH]
Timeout = Annotated[
    float,
    Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False),
    Accepted("a number of seconds above 0", "use 10 or 60, say"),
]
FlagOrPart = Annotated[bool | float, PlainValidator(_flag_or_part), FLAG_OR_PART]


def problems_of(error: ValidationError, model: type[BaseModel], prefix: str) -> list[Problem]:
    """Return every problem that pydantic found in `model`, whose keys are under `prefix`."""
    found = error.errors(include_url=False)
    # To look for what was meant by each of 40 000 unknown keys would take minutes.
    explained = [_problem(detail, model, prefix) for detail in found[:MAX_PROBLEMS]]
    return explained + [
        Problem(_dotted(prefix, detail["loc"]), detail["msg"]) for detail in found[MAX_PROBLEMS:]
    ]


class Section(BaseModel):
    """Forbid unknown keys and conversions, freeze, and let no raw pydantic error out of its call."""

    # Every field of a subclass has an `Accepted`.

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", validate_default=True)

    def __init__(self, /, **values: Any) -> None:
        try:
            self.__pydantic_validator__.validate_python(values, self_instance=self)
        except ValidationError as error:
            name = type(self).__name__
            raise config_error(f"{name}(...)", *problems_of(error, type(self), "")) from None

    # Only calls from Python come through __init__. Pydantic looks for this mark (BaseModel.__init__ bears it
    # too) and, finding it, builds nested sections itself and so keeps one list of all problems.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


def _problem(detail: ErrorDetails, root: type[BaseModel], prefix: str) -> Problem:
    loc, value = detail["loc"], detail["input"]
    owner, field = _field_at(root, loc)
    if field is None:
        return Problem(_dotted(prefix, loc), _unknown_key(str(loc[-1]), owner, root))
    takes = accepted_by(field)
    key = _dotted("" if takes.outside else prefix, loc)
    refused = detail.get("ctx", {}).get("error")
    if isinstance(refused, Refused):
        return Problem(key, str(refused))
    choices = choices_of(field)
    expected = f"one of {', '.join(map(shown, choices))}" if choices else takes.what
    if detail["type"] in ("less_than", "less_than_equal") and "at most" not in expected:
        limit = detail["ctx"].get("le", detail["ctx"].get("lt"))
        expected = f"{takes.what}, at most {limit:,.0f}"
    near = did_you_mean(value, choices) if isinstance(value, str) and choices else None
    guess = f'did you mean "{near}"?' if near else None
    advice = _type_advice(value, takes.what) or guess or takes.advice
    return Problem(key, sentence(expected, shown(value), advice))


def _field_at(root: type[BaseModel], loc: Sequence[int | str]) -> tuple[type[BaseModel], FieldInfo | None]:
    """Return the model that owns the key at `loc`, and its field; no field where the key is unknown."""
    owner: type[BaseModel] = root
    field: FieldInfo | None = None
    inner: Any = root
    for part in loc:
        # Inside a list or an options object the field stays.
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            break
        owner, field = inner, inner.model_fields.get(str(part))
        inner = field.annotation if field else None
    return owner, field


def _dotted(prefix: str, loc: Sequence[int | str]) -> str:
    parts = [f"[{part}]" if isinstance(part, int) else f".{part[:80]}" for part in loc]
    return (prefix + "".join(parts)).removeprefix(".")


def accepted_by(field: FieldInfo) -> Accepted:
    """Return what a field of a `Section` accepts."""
    found = [note for note in field.metadata if isinstance(note, Accepted)]
    assert found, f"the field {field!r} needs an Accepted, or nothing can be said about its errors"
    return found[0]


def choices_of(field: FieldInfo) -> tuple[str, ...]:
    """Return the words that a field of `Literal` type accepts; none for any other field."""
    return get_args(field.annotation) if get_origin(field.annotation) is Literal else ()


def _keys(model: type[BaseModel]) -> list[str]:
    return [name for name, field in model.model_fields.items() if not accepted_by(field).outside]


def _unknown_key(word: str, owner: type[BaseModel], root: type[BaseModel]) -> str:
    """Describe an unknown key: a near miss here, a key of the neighbouring section, or neither."""
    known = _keys(owner)
    near = did_you_mean(word, known)
    advice = "remove it, or move it to the section that it belongs to"
    if near:
        advice = f"did you mean '{near}'?"
    for name, field in root.model_fields.items():
        section: Any = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel) and word in section.model_fields:
            advice = f'move it to the sub-section "{name}"'
    if owner is not root and word in _keys(root):
        advice = "move it to the section above"
    return sentence(f"one of {', '.join(known)}", f"the unknown key '{word[:80]}'", advice)


def _type_advice(value: object, what: str) -> str | None:
    """Return what to write instead of a value that is right but for its JSON type."""
    if isinstance(value, bool) and "number" in what:
        return "true and false are no numbers: write the number itself"
    if isinstance(value, float) and value.is_integer() and "whole number" in what:
        return f"write {int(value)} without the point"
    if isinstance(value, str) and re.fullmatch(r"\s*[-+]?[\d.]+\s*", value) and "number" in what:
        return f"write {value.strip()} without quotes"
    if isinstance(value, str) and value.lower() in ("true", "false", "null", "none"):
        return f"write {value.lower().replace('none', 'null')} without quotes"
    if isinstance(value, (int, float)) and what.startswith("a list") and 0 < value < 10**15:
        return f"write [{value}]"
    return None
