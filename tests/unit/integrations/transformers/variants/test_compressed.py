"""Refusals of compressed entries."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from ds_ring.errors import RingConfigError
from ds_ring.integrations.transformers.variants import compressed
from tests.unit.integrations.transformers.calls import IDS, ON, attend, sharding


def compressing(current: Any, cache: Any) -> Any:
    layer = SimpleNamespace(config=ON.config, compressor=nn.Linear(1, 1))
    self: Any = SimpleNamespace(_layer=layer, _sharding=current, _own=None)
    return compressed.CompressedEntries.compress(self, IDS, IDS, IDS, cache, 0)


class Compressing(nn.Module):
    """A layer whose compressor is the ring's."""

    def __init__(self) -> None:
        super().__init__()
        self.compressor = nn.Linear(1, 1)
        entries = object.__new__(compressed.CompressedEntries)
        self.compressor.forward = entries.compress  # type: ignore[assignment]


CASES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "compressed entries of a cache": (
        lambda: compressing(sharding(), object()), RingConfigError, "expected a call without a cache"
    ),
    "compressed entries of no batch": (
        lambda: compressing(None, None), RingConfigError, "expected the batch's sharding, got NoneType"
    ),
    "compressed entries with a cap": (
        lambda: attend(module=Compressing(), softcap=1.0), RingConfigError, "no softcap or score_mod with"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused(case: str) -> None:
    call, error, words = CASES[case]
    with pytest.raises(error, match=words):
        call()
