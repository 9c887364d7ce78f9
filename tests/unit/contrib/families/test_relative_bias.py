"""Refusals of a learned bias of distances."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ds_ring.contrib.families.relative_bias import layers as relative_bias
from ds_ring.errors import RingConfigError
from tests.unit.models.calls import attend


def biased() -> Any:
    bias = object.__new__(relative_bias.RelativeBias)
    vars(bias)["has_table"] = True
    return attend(position_bias=bias)


COMPILED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a bias of distances": (biased, RingConfigError, "adds a learned bias of distances"),
}  # fmt: skip


@pytest.mark.parametrize("case", COMPILED)
def test_compiled_code_is_refused(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, error, words = COMPILED[case]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(error, match=words):
        call()
