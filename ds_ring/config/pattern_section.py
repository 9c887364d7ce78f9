"""Define the "pattern" part of the section: its keys, defaults, limits, and how they depend on each other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
)

from ds_ring.config.messages import (
    ONE_UP,
    Accepted,
    AtLeastOne,
    Flag,
    FurtherKeys,
    Refused,
    Section,
    sentence,
    shown,
    without_effect,
)
from ds_ring.config.problems import list_problems  # fmt: skip
from ds_ring.masks.pattern import Pattern
from ds_ring.plugin import PATTERN_KEYS, PATTERNS, load

Window = Annotated[AtLeastOne | None, Accepted(f"{ONE_UP}, or null", "use null for no window")]
Beside = Annotated[AtLeastOne | None, Accepted(f"{ONE_UP}, or null", "use null for none")]
DilationStep = Annotated[AtLeastOne, Accepted(ONE_UP, "use 1 for every token")]


class PatternKeys(Section):
    """Say which query position attends to which key position. Lengths are tokens of the global sequence."""

    causal: Flag = Field(default=True, description="a query sees no later key")
    window: Window = Field(
        default=None, description="sliding window in tokens; two-sided where causal is false"
    )
    window_dilation: DilationStep = Field(
        default=1, description="the window keeps every n-th token, and reaches n times as far"
    )
    sinks: Beside = Field(
        default=None, description="all later tokens see the first n, outside the window, too"
    )
    documents: Flag = Field(
        default=False, description="tokens see their own document only; ids come with the batch"
    )

    @field_validator("window_dilation", "sinks")
    @classmethod
    def _is_read(cls, value: Any, info: ValidationInfo) -> Any:
        usual = cls.model_fields[str(info.field_name)].default
        if value != usual and info.data.get("window", ()) is None:
            raise Refused(without_effect(shown(value), "window null", "sees all tokens already"))
        return value


FURTHER_KEYS: list[type[FurtherKeys]] = [load(home) for home in PATTERN_KEYS.values()]

# Patterns that say themselves what their key is (`Pattern.json_key`).
_PATTERNS: list[type[Pattern]] = [load(home) for home in PATTERNS.values()]
PATTERNS_BY_KEY = {kind.json_key.name: (kind.json_key, kind) for kind in _PATTERNS if kind.json_key}


_KEYS: list[type[Section]] = [PatternKeys, *FURTHER_KEYS]
_DEFAULTS = {name: key.default for section in _KEYS for name, key in section.model_fields.items()}


def _has_an_effect(value: int | None, info: ValidationInfo) -> int | None:
    """Refuse a pattern's key together with a key that conflicts with it by the `json_key` of either."""
    if value is not None:
        key = PATTERNS_BY_KEY[str(info.field_name)][0]
        for name, got in info.data.items():
            usual = _DEFAULTS.get(name)
            theirs = PATTERNS_BY_KEY[name][0].conflicts if name in PATTERNS_BY_KEY else {}
            why = key.conflicts.get(name) or theirs.get(key.name)
            if got != usual and why:
                raise Refused(without_effect(shown(value), f"{name} {shown(got)}", why))
    return value


def _by_number(layers: Any, info: ValidationInfo) -> Any:
    """Return each named layer's number and whole pattern."""
    if not isinstance(layers, dict):
        return layers
    patterns: dict[int, PatternKeys] = {}
    for names, options in layers.items():
        pattern = _merge_layer_keys(info.data, names, options)
        for layer in _numbers(names):
            if layer in patterns:
                raise Refused(sentence("each layer once", f"{layer} twice", "name it in one place"))
            patterns[layer] = pattern
    return tuple(sorted(patterns.items(), key=lambda item: item[0]))


def _numbers(names: str) -> Iterator[int]:
    """Yield the layers of "0-4, 6", both ends of a range included."""
    for name in names.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})(?:\s*-\s*(\d{1,4}))?\s*", name, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise Refused(sentence('numbers and ranges of layers, "0-4, 6"', shown(names), "count from 0"))
        yield from range(first, last + 1)


def _merge_layer_keys(others: dict[str, Any], names: str, options: Any) -> PatternKeys:
    """Return the whole pattern of some layers: keys that they do not have are those of the section."""
    if not isinstance(options, dict):
        raise Refused(sentence("an object of pattern keys", shown(options), 'write {"window": 512}, say'))
    for key in ("layers", "documents", "causal"):
        if key in options:
            what = sentence(
                f"no {key} in {shown(names)}", shown(options[key]), "it is the same for all layers"
            )
            raise Refused(what)
    whole = {key: value for key, value in others.items() if key != "documents"} | options
    try:
        return PatternConfig.model_validate(whole)
    except ValidationError as error:
        problems = list_problems(error, PatternConfig, "")
        raise Refused(
            "; ".join(f"{shown(names)}.{problem.key}: {problem.sentence}" for problem in problems)
        ) from None


LayerList = Annotated[
    tuple[tuple[int, Any], ...] | None,
    BeforeValidator(_by_number),
    Accepted(
        "an object of layer numbers and pattern keys, or null", 'write {"0-4, 6": {"window": 512}}, say'
    ),
]
if TYPE_CHECKING:

    class PatternConfig(PatternKeys, FurtherKeys):
        """Add the keys of the patterns' own files, and of single layers."""

        layers: LayerList = None
else:
    _OWN = Annotated[Beside, AfterValidator(_has_an_effect)]
    PatternConfig = create_model(
        "PatternConfig",
        __base__=(*reversed(FURTHER_KEYS), PatternKeys),  # the fields of the last base come first
        __module__=__name__,
        __doc__=PatternKeys.__doc__,
        **{
            name: (_OWN, Field(default=None, description=key.meaning))
            for name, (key, _) in PATTERNS_BY_KEY.items()
        },
        layers=(
            LayerList,
            Field(default=None, description="patterns of single layers, by number from 0"),
        ),  # last: it reads all others
    )
