"""Refusals of queries that are scaled by position."""

from __future__ import annotations

from torch import nn

from ds_ring.contrib.families.query_scale import layers as query_scale
from ds_ring.errors import RingConfigError
from tests.refusals import Refusals, refuse

CASES: Refusals = {
    "scaled queries that are told nothing": (
        lambda: query_scale.QueryScale(nn.Linear(1, 1)).before_forward(nn.Linear(1, 1), (), {}),
        RingConfigError,
        "attn_temperature_tuning",
    ),
}  # fmt: skip


test_it_is_refused = refuse(CASES)
