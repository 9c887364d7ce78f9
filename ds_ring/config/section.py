"""The "ring_attention" section of the DeepSpeed JSON as a frozen model: keys, defaults, units and limits.

Other files have the keys that a pass reads (pass_options.py), the keys of "pattern" (pattern_section.py), the
search for the section (json_text.py) and the wording of errors (messages.py). Imports no torch.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache, partial, reduce
from operator import and_
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field, ValidationInfo, create_model, field_validator, model_validator

from ds_ring.config.json_text import SECTION, SP_KEY, Json, JsonSource, resolve
from ds_ring.config.messages import (
    ONE_UP,
    WORD,
    Accepted,
    Flag,
    PartKeys,
    Refused,
    Section,
    Timeout,
    part_from_word,
    sentence,
)
from ds_ring.config.pass_options import PassOptions
from ds_ring.config.pattern_section import FURTHER_KEYS, PATTERNS_BY_KEY, PatternConfig
from ds_ring.config.problems import listed  # fmt: skip
from ds_ring.errors import RingMeshError
from ds_ring.limits import MAX_RANKS, MAX_TOKENS, Timeouts, divisors
from ds_ring.masks.catalog import Causal, DilatedWindow, Full, Sinks, SlidingWindow
from ds_ring.masks.pattern import Pattern
from ds_ring.plugin import JSON_KEYS, LAYOUTS, PART_KEYS, load

_OPEN: Any = None  # filled in or refused by the validators: no finished model holds it
_AUTO: Any = "auto"

Ranks = Annotated[int, Field(ge=1, le=MAX_RANKS)]
RingSize = Annotated[Ranks, Accepted(f'{ONE_UP}, or "auto"', 'use "auto" for all of the sequence group')]
UlyssesSize = Annotated[Ranks, Accepted(ONE_UP, "use 1 to leave the heads together")]
SequenceRanks = Annotated[
    Ranks, Accepted(f"{ONE_UP} (ranks per sequence)", "use ring_size x ulysses_size", outside=True)
]
TokenCount = Annotated[
    int, Field(ge=0, le=MAX_TOKENS), Accepted("a whole number of tokens, 0 or more", "use 0 to shard all")
]
if TYPE_CHECKING:  # a type checker cannot read the words of a table
    from typing_extensions import Self

    LayoutName = str
else:
    LayoutName = Annotated[Literal[tuple(LAYOUTS)], WORD]
AttentionName = Annotated[Literal["ring", "as_is"], WORD]


class RingKeys(Section):
    """Say which ranks share a sequence, and which token and which pair is whose."""

    # The order matters: a validator sees the values of the fields above its own.
    sequence_parallel_size: SequenceRanks = Field(
        default=_OPEN,
        validate_default=False,
        description="ranks that share one sequence: ring_size x ulysses_size",
    )
    ulysses_size: UlyssesSize = Field(
        default=1, description="ranks that split the heads of one sequence by all-to-all"
    )
    ring_size: RingSize = Field(
        default=_AUTO, description='ranks in one K/V ring; "auto": sequence_parallel_size / ulysses_size'
    )
    layout: LayoutName = Field(
        default="auto",
        description="the rank of each token; auto: even work and least traffic",
    )
    pattern: Annotated[
        PatternConfig, Accepted("an object of pattern keys", 'write {"causal": true}, say')
    ] = Field(default=PatternConfig(), description="which query sees which key")
    attention: AttentionName = Field(
        default="ring",
        description="as_is: a transformers model keeps its sdpa, for engine.compile to rewrite",
    )
    heartbeat_timeout_seconds: Timeout = Field(
        default=10.0, description="silence after which a rank counts as lost"
    )


class CoreConfig(PassOptions, RingKeys):
    """Hold the section, resolved: `ring_size` is a number here even where the JSON says "auto".

    `sequence_parallel_size` is at the top level of the JSON, where DeepSpeed reads it. Left out, or "auto",
    it is ring_size x ulysses_size. If ring_size is "auto" as well, the number of ranks of a sequence is
    unknown; DeepSpeed's own default of 1 would silently be no ring at all, so that is an error.
    """

    min_sequence_length: TokenCount = Field(
        default=0,
        description="below this many tokens ranks take whole samples instead of shards",
    )
    step_timeout_seconds: Timeout = Field(
        default=Timeouts().step,
        description="longest wait for a rank outside the engine: in data or script",
    )
    checkpoint_timeout_seconds: Timeout = Field(
        default=Timeouts().checkpoint, description="the same for a rank that saves or loads a checkpoint"
    )
    start_timeout_seconds: Timeout = Field(
        default=Timeouts().start, description="longest wait until all ranks have made their engines"
    )
    check_modules: Flag = Field(
        default=True,
        description="first step: refuse your modules and hooks that mix tokens",
    )

    @classmethod
    def from_deepspeed(cls, source: JsonSource) -> Self:
        """Read our section of a whole DeepSpeed JSON (path or dict); one RingConfigError names all faults."""
        return resolve(source, cls)[0]

    def validate_world(self, world_size: int) -> None:
        """Raise RingMeshError unless `world_size` ranks fall into whole sequence groups."""
        if type(world_size) is not int or world_size < 1:
            advice = "pass the number of ranks"
            raise RingMeshError(f"world size: {sentence(ONE_UP, repr(world_size), advice)}")
        whole, ulysses = self.sequence_parallel_size, self.ulysses_size
        if world_size % whole == 0:
            return
        fits = [size for size in divisors(world_size) if size % ulysses == 0]
        advice = f"use {listed(fits)}" if fits else f"no multiple of ulysses_size {ulysses} does: change that"
        if world_size < whole:  # a script that was started without a launcher, say
            start = f"deepspeed --num_gpus {whole} SCRIPT.py, or ds-ring launch"
            advice += f", or start {whole} processes ({start})"
        raise RingMeshError(f"{SP_KEY} {whole} does not divide world size {world_size}; {advice}")

    @property
    def timeouts(self) -> Timeouts:
        """Return how long ranks wait for each other."""
        return Timeouts(*(getattr(self, f"{name}_timeout_seconds") for name in Timeouts._fields))

    def fingerprint(self) -> str:
        """Return 16 hex digits, equal on two ranks exactly if every key is."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def get(self, key: str, default: Any = False) -> Any:
        """Return the value of a capability's key; `default` where the capability is not there."""
        return getattr(self, key, default)

    @property
    def changes_models(self) -> bool:
        """Return whether a part of the section changes a transformers model, or may."""
        return any(getattr(self, part).changes_models for part in PARTS)

    @model_validator(mode="before")
    @classmethod
    def _fill_in_the_whole(cls, values: Any) -> Any:
        """Replace a missing whole by the product of valid sizes; anything else is refused below."""
        if not isinstance(values, dict) or values.get(SP_KEY, "auto") != "auto":
            return values
        keys = {name: value for name, value in values.items() if name != SP_KEY}
        ring, ulysses = keys.get("ring_size"), keys.get("ulysses_size", 1)
        both_good = all(type(size) is int and 1 <= size <= MAX_RANKS for size in (ring, ulysses))
        return keys | {SP_KEY: ring * ulysses} if both_good else keys

    @field_validator("ring_size", mode="before")
    @classmethod
    def _resolve_auto(cls, ring: object, info: ValidationInfo) -> object:
        if ring != "auto":
            return ring
        if not {SP_KEY, "ulysses_size"} <= info.data.keys():  # refused already; any number will do
            return 1
        whole, ulysses = info.data[SP_KEY], info.data["ulysses_size"]
        if whole is None:
            advice = f'add "{SP_KEY}": 4 at the top level of the JSON, or set ring_size to a number'
            raise Refused(sentence(ONE_UP, f'"auto" and no {SP_KEY}', advice))
        if whole % ulysses:
            expected, got = f'"auto" = {SP_KEY} / ulysses_size to be whole', f"{whole} / {ulysses}"
            raise Refused(sentence(expected, got, f"use ulysses_size {listed(divisors(whole))}"))
        return whole // ulysses

    @field_validator("ring_size")
    @classmethod
    def _multiplies_to_the_whole(cls, ring: int, info: ValidationInfo) -> int:
        whole, ulysses = info.data.get(SP_KEY), info.data.get("ulysses_size")
        if whole is None or ulysses is None or ring * ulysses == whole:
            return ring
        fits = f'ring_size to {whole // ulysses} or "auto"' if whole % ulysses == 0 else "ulysses_size to 1"
        raise Refused(
            f"ring_size {ring} x ulysses_size {ulysses} = {ring * ulysses}, but {SP_KEY} is {whole}; "
            f"set {fits}, or {SP_KEY} to {ring * ulysses}"
        )

    @field_validator(*(f"{name}_timeout_seconds" for name in Timeouts._fields))
    @classmethod
    def _outlasts_the_heartbeat(cls, limit: float, info: ValidationInfo) -> float:
        heartbeat = info.data.get("heartbeat_timeout_seconds", 0)
        if limit < heartbeat:
            advice = "raise it, or lower the other: a wait that gives up first cannot name the lost rank"
            raise Refused(
                sentence(f"at least heartbeat_timeout_seconds, {heartbeat:g}", f"{limit:g}", advice)
            )
        return limit


def _make_part(part: str) -> type[PartKeys]:
    keys = [load(home) for name, home in PART_KEYS.items() if name.startswith(f"{part}.")]
    name = f"{part.title().replace('_', '')}Config"
    return create_model(name, __base__=tuple(reversed(keys)), __module__=__name__)


# Parts of the section whose keys are those of capabilities, "long_sequence" for example.
PARTS = {part: _make_part(part) for part in dict.fromkeys(name.partition(".")[0] for name in PART_KEYS)}
globals().update({kind.__name__: kind for kind in PARTS.values()})  # where pickle finds them


def _make_part_field(kind: Any) -> tuple[Any, Any]:
    advice = 'write "auto" for all that the model allows'
    accepted = Accepted('"off", "auto", or an object of its keys', advice)
    annotation = Annotated[kind, BeforeValidator(partial(part_from_word, kind)), accepted]
    return annotation, Field(default=kind(), description=kind.description)


if TYPE_CHECKING:

    class RingConfig(CoreConfig):
        """Add the keys of capabilities (`plugin.JSON_KEYS`)."""

        def __getattr__(self, name: str) -> Any: ...

else:
    _KEYS = [load(home) for home in JSON_KEYS.values()]
    RingConfig = create_model(
        "RingConfig",
        __base__=(*reversed(_KEYS), CoreConfig),  # the fields of the last base come first
        __module__=__name__,
        __doc__=CoreConfig.__doc__,
        **{part: _make_part_field(kind) for part, kind in PARTS.items()},
    )
    RingConfig.__hash__ = CoreConfig.__hash__  # of values that can be hashed


def strip_section(source: JsonSource) -> Json:
    """Return the JSON that deepspeed.initialize should get: a deep copy without our section.

    `sequence_parallel_size` is in it as a number, even if the JSON has "auto". Pass this dict to DeepSpeed,
    not a path: given a path, it looks for that key among the letters of the path.
    """
    config, whole = resolve(source, RingConfig)
    rest = {key: copy.deepcopy(value) for key, value in whole.items() if key != SECTION}
    return rest | {SP_KEY: config.sequence_parallel_size}


def pattern_from_config(config: RingConfig) -> Pattern:
    """Build the pattern of the section; its parts are composed with `&`."""
    # Without documents: they change with every batch, and are added with the batch.
    return _pattern(config.pattern)


def named_patterns(config: RingConfig) -> dict[int, Pattern]:
    """Return the patterns of the layers that "layers" names, by their numbers from 0."""
    return {layer: _pattern(section) for layer, section in config.pattern.layers or ()}


@lru_cache(maxsize=256)
def _pattern(section: PatternConfig) -> Pattern:
    parts: list[Pattern] = []
    if section.window is not None:
        near: Pattern = SlidingWindow(section.window, section.causal)
        if section.window_dilation > 1:
            near = DilatedWindow(section.window, section.window_dilation, section.causal)
        parts.append(near if section.sinks is None else near | Sinks(section.sinks, section.causal))
    for name, (_, kind) in PATTERNS_BY_KEY.items():
        tokens, make = getattr(section, name), cast(Callable[..., Pattern], kind)
        if tokens is not None:
            has_causal = any(field.name == "causal" for field in fields(kind))
            parts.append(make(tokens, section.causal) if has_causal else make(tokens))
    for keys in FURTHER_KEYS:
        parts = keys.composed(section, parts, section.causal)
    return reduce(and_, parts) if parts else Causal() if section.causal else Full()


def by_json_key(config: RingConfig) -> Json:
    """Return the values by their dotted JSON keys, with everything that was left out filled in."""
    values = config.model_dump(mode="json")
    flat = {SP_KEY: values.pop(SP_KEY)}
    for part in ("pattern", *PARTS):
        values |= {f"{part}.{name}": value for name, value in values.pop(part).items()}
    return flat | {f"{SECTION}.{name}": value for name, value in values.items()}
