"""Define the "pattern" part of the section: its keys, defaults, limits, and how they depend on each other."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from ds_ring.config.messages import Refused, Section, Takes, sentence, shown

ONE_UP = "a whole number of at least 1"
WORD = Takes("a word", "write one of these in double quotes")
BRANCHES = Takes(f"a list, each item {ONE_UP} and larger than the one before", "write [2048, 4096], say")
MOST = 2**53  # positions are numbers of 64 bits, and their products must be
AtLeastOne = Annotated[int, Field(ge=1, le=MOST)]
Flag = Annotated[bool, Takes("true or false", "write true or false, without quotes")]
Window = Annotated[AtLeastOne | None, Takes(f"{ONE_UP}, or null", "use null for no window")]
Branches = Annotated[
    tuple[AtLeastOne, ...] | None,
    BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
    BRANCHES,
]
HeadOffsets = Annotated[Literal["paper", "paper_kv", "torchscale", "zero"], WORD]


class PatternConfig(Section):
    """Say which query position attends to which key position. Lengths are tokens of the global sequence."""

    causal: Flag = Field(default=True, description="a query sees no later key")
    window: Window = Field(
        default=None, description="sliding window in tokens; two-sided where causal is false"
    )
    segment_lengths: Branches = Field(
        default=None, description="LongNet's w_i in tokens, one for each dilated branch; null: not dilated"
    )
    dilation_rates: Branches = Field(
        default=None,
        description="LongNet's r_i, one for each segment length: a branch keeps every r_i-th token",
    )
    head_offsets: HeadOffsets = Field(
        default="paper",
        description="the first token that query head h of H keeps in a branch of dilation r: paper h mod r; "
        "paper_kv the same by K/V head, which sends less under GQA; torchscale h // ceil(H / r); zero 0",
    )
    documents: Flag = Field(
        default=False, description="tokens see their own document only; the batch's ids say which that is"
    )

    @field_validator("segment_lengths", "dilation_rates")
    @classmethod
    def _increases(cls, values: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if values == ():
            raise Refused(sentence(BRANCHES.what, "[]", "use null where the pattern is not dilated"))
        for before, after in pairwise(values or ()):
            if after <= before:
                got = f"{before} followed by {after} in {shown(values)}"
                raise Refused(sentence(BRANCHES.what, got, "sort the branches, none twice"))
        return values

    @field_validator("head_offsets")
    @classmethod
    def _of_a_dilation(cls, offsets: str, info: ValidationInfo) -> str:
        if offsets != "paper" and info.data.get("segment_lengths", ()) is None:
            raise Refused(without_effect(shown(offsets), "segment_lengths null", "is not dilated"))
        return offsets

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


def without_effect(got: str, beside: str, why: str) -> str:
    """Format the sentence for a value that nothing would read."""
    return sentence("the default", f"{got} beside {beside}, which {why}", "leave it out: it has no effect")
