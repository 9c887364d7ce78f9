"""Refusals of keys that an indexer selects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_ring.contrib.families.indexed import layers as indexed
from ds_ring.data import batch
from ds_ring.errors import RingConfigError, RingError, RingPatternError
from tests.refusals import Refusals, refuse
from tests.unit.models.calls import IDS, attend
from tests.unit.models.test_attention import attached


def keys() -> Any:
    return indexed.KeysOfAllRanks(lambda *_: torch.zeros(1), torch.Size([1]), lambda *_: torch.zeros(1))


CASES: Refusals = {
    "chosen keys with a cap": (
        lambda: attend(indices=IDS, softcap=1.0), RingConfigError, "no softcap beside chosen keys"
    ),
    "scores times a tensor": (lambda: keys() * IDS, RingConfigError, "multiplies scores by Tensor"),
    "scores with another mask": (lambda: keys().masked_fill(IDS, 0), RingConfigError, "a mask of its own"),
    "chosen along samples": (lambda: keys().topk(1, dim=0), RingConfigError, "chooses along dimension 0"),
    "another function of keys": (lambda: torch.sin(keys()), RingConfigError, "calls sin"),
    "another attribute of keys": (lambda: keys().grad, RingConfigError, "reads grad of its keys"),
    "keys chosen in a generation": (
        lambda: indexed.IndexedLayer.give_keys(
            SimpleNamespace(_sharding=None),  # type: ignore[arg-type]
            nn.Linear(1, 1), (), {"past_key_values": 1},
        ),
        RingError,
        "Linear",
    ),
    "a protocol of Python's": (lambda: len(keys()), TypeError, "has no len"),
    "an attribute of a protocol": (lambda: keys().__array__, AttributeError, "__array__"),
}  # fmt: skip


test_it_is_refused = refuse(CASES)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_an_indexer_gets_its_keys_by_its_own_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Indexer(nn.Module):
        if name == "cache":

            def forward(self, x: Tensor, cache: Any = None) -> Tensor:
                return x
        else:

            def forward(self, x: Tensor, past_key_values: Any = None) -> Tensor:
                return x

    layer = nn.Module()
    layer.indexer = Indexer()
    hooks = indexed.IndexedLayer(layer)
    with pytest.raises(RingConfigError, match="Indexer: expected a call without a cache"):
        hooks.give_keys(layer.indexer, (), {name: object()})


def test_an_indexer_that_gets_no_mask_of_its_layer_is_refused():
    _, session = attached()
    session.shard_batch({"input_ids": IDS})
    hooks = indexed.IndexedLayer(torch.nn.Identity())
    hooks.note(torch.nn.Identity(), (), {batch.SHARDING: session.batches.current})
    with pytest.raises(RingPatternError, match="got 0 masks and BatchSharding"):
        hooks.give_keys(torch.nn.Identity(), (IDS,), {})
