"""The keys "rank_speeds" and "monitor" of the section."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from ds_ring.config.messages import Accepted, Flag, Refused, Section, sentence, shown, without_effect
from ds_ring.config.pass_options import refuse_without_hops
from ds_ring.plugin import LAYOUTS

SpeedsOfRanks = Annotated[
    Literal["measured"] | list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] | None,
    Accepted('"measured", a number above 0 for each ring rank, or null', 'use "measured"'),
]


class MeasureKeys(Section):
    """Say which figures of training steps are measured, and what they change."""

    rank_speeds: SpeedsOfRanks = Field(
        default=None,
        description="relative speeds: slow ranks of the ring get less attention work",
    )
    monitor: Flag = Field(
        default=False, description="report hop times, bytes and memory to DeepSpeed's monitor"
    )

    @field_validator("monitor")
    @classmethod
    def _has_hops_to_report(cls, value: bool, info: ValidationInfo) -> bool:
        return bool(refuse_without_hops(cls, value, info))

    @field_validator("rank_speeds")
    @classmethod
    def _has_work_to_deal_out(cls, value: Any, info: ValidationInfo) -> Any:
        layout, ring_size = info.data.get("layout", "auto"), info.data.get("ring_size")
        if value is not None and not LAYOUTS[layout].takes_speeds:
            raise Refused(without_effect(shown(value), f'"layout": "{layout}"', "deals out no work"))
        if isinstance(value, list) and type(ring_size) is int and len(value) != ring_size:
            expected = f"{ring_size} numbers (ring_size)"
            raise Refused(sentence(expected, str(len(value)), "give one for each rank of the ring"))
        return value
