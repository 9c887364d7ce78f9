"""Describe the errors of a configuration in sentences: where, expected, got, what to do.

`Section` is the strict base model of pydantic; an `Accepted` in a field's annotation describes its values.
"""

from __future__ import annotations

import json
import operator
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)  # fmt: skip

from ds_ring.errors import show_items
from ds_ring.errors import shown as shown_in_errors
from ds_ring.limits import MAX_SECONDS, MAX_TOKENS

if TYPE_CHECKING:
    from ds_ring.masks.pattern import Pattern


@dataclass(frozen=True)
class Accepted:
    """Describe what a field accepts, and what to do when it got something else. Annotated onto the field."""

    # `outside` marks a field whose key is at the top level of the JSON, outside the section.

    what: str
    advice: str
    outside: bool = False


class Refused(ValueError):
    """Carry a whole sentence out of a validator; pydantic keeps it, `problems.py` unwraps it."""


def sentence(expected: str, got: str, advice: str) -> str:
    """Format a complaint: expected, got, what to do."""
    return f"expected {expected}, got {got}; {advice}"


def shown(value: object) -> str:
    """Show `value` as JSON text, cut where it is long, so that "4" and 4 look different."""
    if isinstance(value, int) and abs(value) >= 10**30:
        return "a number of more than 30 digits"
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = shown_in_errors(value)
    if isinstance(value, (list, tuple)) and len(text) > 80:  # the ids of tokens, say
        text = show_items(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


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


class Section(BaseModel):
    """Forbid unknown keys and conversions, freeze, and let no raw pydantic error out of its call."""

    # Every field of a subclass has an `Accepted`.

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", validate_default=True)

    def __init__(self, /, **values: Any) -> None:
        try:
            self.__pydantic_validator__.validate_python(values, self_instance=self)
        except ValidationError as error:
            from ds_ring.config.problems import config_error, list_problems

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
