"""The key "slices" of the JSON's "pattern" section."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from ds_ring.config.messages import Accepted, FurtherKeys, Refused
from ds_ring.errors import RingPatternError
from ds_ring.masks.catalog import Causal
from ds_ring.masks.pattern import Pattern
from ds_ring.patterns.slices.pattern import Slices


def _checked(value: Any) -> Any:
    """Return the slices as nested tuples; Refused with the pattern's own error."""
    try:
        return None if value is None else Slices(value).slices
    except RingPatternError as error:
        raise Refused(str(error).removeprefix("Slices: ")) from None


_SLICE = '[[q_start, q_end], [k_start, k_end], "full", "causal", "inverse-causal" or "bi-causal"]'
SliceList = Annotated[
    tuple[tuple[tuple[int, int], tuple[int, int], str], ...] | None,
    BeforeValidator(_checked),
    Accepted(f"a list of {_SLICE}", "use null for no slices"),
]


class SliceKeys(FurtherKeys):
    """Add MagiAttention's slices."""

    slices: SliceList = Field(
        default=None,
        description="MagiAttention's slices, ends excluded, none overlapping",
    )

    def composed(self, parts: list[Pattern], causal: bool) -> list[Pattern]:
        if self.slices is None:
            return parts
        # each kind of slice is causal or not; with "causal": true slices may only hide more
        return [*parts, Slices(self.slices), *([Causal()] if causal and not parts else [])]
