"""Refusals of queries that are scaled by position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from ds_ring.contrib.families.query_scale import layers as query_scale
from ds_ring.errors import RingConfigError

CASES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "scaled queries that are told nothing": (
        lambda: query_scale.QueryScale(nn.Linear(1, 1)).before_forward(nn.Linear(1, 1), (), {}),
        RingConfigError,
        "attn_temperature_tuning",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused(case: str) -> None:
    call, error, words = CASES[case]
    with pytest.raises(error, match=words):
        call()
