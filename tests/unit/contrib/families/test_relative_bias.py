"""Refusals of a learned bias of distances."""

from __future__ import annotations

from typing import Any

from ds_ring.contrib.families.relative_bias import layers as relative_bias
from ds_ring.errors import RingConfigError
from tests.refusals import Refusals, refuse
from tests.unit.models.calls import attend


def biased() -> Any:
    bias = object.__new__(relative_bias.RelativeBias)
    vars(bias)["has_table"] = True
    return attend(position_bias=bias)


COMPILED: Refusals = {
    "a bias of distances": (biased, RingConfigError, "adds a learned bias of distances"),
}  # fmt: skip


test_compiled_code_is_refused = refuse(COMPILED, compiling=True)
