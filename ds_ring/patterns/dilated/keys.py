"""The keys of `Dilated` in the JSON's "pattern" section."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from ds_ring.config.messages import (
    WORD,
    Accepted,
    AtLeastOne,
    FurtherKeys,
    Refused,
    sentence,
    shown,
    without_effect,
)  # fmt: skip
from ds_ring.masks.pattern import Pattern
from ds_ring.patterns.dilated.pattern import Dilated

_LIST = Accepted("a list of rising whole numbers of at least 1", "write [2048, 4096], say")
Branches = Annotated[
    tuple[AtLeastOne, ...] | None,
    BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
    _LIST,
]
HeadOffsets = Annotated[Literal["paper", "paper_kv", "torchscale", "zero"], WORD]


class DilatedKeys(FurtherKeys):
    """Add LongNet's branches."""

    segment_lengths: Branches = Field(
        default=None, description="LongNet's w_i in tokens, one for each dilated branch"
    )
    dilation_rates: Branches = Field(
        default=None,
        description="LongNet's r_i: a branch keeps every r_i-th token",
    )
    head_offsets: HeadOffsets = Field(
        default="paper",
        description="the first token that a head keeps in a branch",
    )

    def composed(self, parts: list[Pattern], causal: bool) -> list[Pattern]:
        if self.segment_lengths is None or self.dilation_rates is None:
            return parts
        return [Dilated(self.segment_lengths, self.dilation_rates, causal, self.head_offsets), *parts]

    @field_validator("segment_lengths", "dilation_rates")
    @classmethod
    def _increases(cls, values: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if values == ():
            raise Refused(sentence(_LIST.what, "[]", "use null where the pattern is not dilated"))
        for before, after in pairwise(values or ()):
            if after <= before:
                got = f"{before} followed by {after} in {shown(values)}"
                raise Refused(sentence(_LIST.what, got, "sort the branches, none twice"))
        return values

    @field_validator("head_offsets")
    @classmethod
    def _offsets_are_read(cls, value: str, info: ValidationInfo) -> str:
        if value != "paper" and info.data.get("segment_lengths", ()) is None:
            raise Refused(without_effect(shown(value), "segment_lengths null", "is not dilated"))
        return value

    @field_validator("dilation_rates")
    @classmethod
    def _one_for_each_segment(
        cls, rates: tuple[int, ...] | None, info: ValidationInfo
    ) -> tuple[int, ...] | None:
        if "segment_lengths" not in info.data:  # refused already: nothing to compare with
            return rates
        segments: tuple[int, ...] | None = info.data["segment_lengths"]
        if segments is None and rates is not None:
            advice = f"add {len(rates)} segment_lengths, or set both to null"
            raise Refused(sentence("null while segment_lengths is null", shown(rates), advice))
        if segments is not None and len(segments) != len(rates or ()):
            expected = f"{len(segments)} rates, one for each of segment_lengths {shown(segments)}"
            got = "null" if rates is None else f"{len(rates)} in {shown(rates)}"
            raise Refused(sentence(expected, got, "make the two lists equally long, or set both to null"))
        return rates
