"""The key "monitor" of the section."""

from __future__ import annotations

from pydantic import Field, ValidationInfo, field_validator

from ds_ring.config.messages import Flag, Section
from ds_ring.config.pass_options import refuse_without_hops


class MeasureKeys(Section):
    """Say which figures of training steps are measured."""

    monitor: Flag = Field(
        default=False, description="report hop times, bytes and memory to DeepSpeed's monitor"
    )

    @field_validator("monitor")
    @classmethod
    def _has_hops_to_report(cls, value: bool, info: ValidationInfo) -> bool:
        return bool(refuse_without_hops(cls, value, info))
