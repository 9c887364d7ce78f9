"""The key "dynamic_ring" of the section."""

from __future__ import annotations

from pydantic import Field, ValidationInfo, field_validator

from ds_ring.config.messages import Flag, Refused, Section, sentence


class DynamicRingKeys(Section):
    """Say whether short samples go to smaller rings."""

    dynamic_ring: Flag = Field(
        default=False,
        description="the loader gives short samples to smaller rings and single ranks",
    )

    @field_validator("dynamic_ring")
    @classmethod
    def _has_plain_rings(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("ulysses_size", 1) > 1:
            why = "is for rings without Ulysses ranks"
            raise Refused(sentence("false", f"true beside ulysses_size {info.data['ulysses_size']}", why))
        if value and info.data.get("attention") == "as_is":
            raise Refused(sentence("false", 'true beside "attention": "as_is"', "a graph has one ring"))
        return value
