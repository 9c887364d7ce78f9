"""A batch whose tensors carry its sharding: where it stays, and where it is left behind."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ds_ring.data.ring_batch import RingBatch
from ds_ring.errors import RingShapeError
from tests.sessions import session_of

IDS = torch.arange(1, 9)[None]


def batches_of(*lengths: int) -> tuple[Any, list[RingBatch]]:
    session = session_of()
    return session, [session.shard_batch({"input_ids": IDS[:, :tokens].clone()}) for tokens in lengths]


def selected(session: Any, tensors: dict[str, Tensor]) -> Any:
    return session.batches.select(tensors.values())


def test_a_batch_is_a_dict_whose_tensors_carry_its_sharding() -> None:
    session, (first, second) = batches_of(7, 8)
    assert isinstance(first, dict) and set(first) == {"input_ids", "position_ids"}
    assert first.sharding.layout.tokens == 7 and second.sharding.layout.tokens == 8
    assert selected(session, dict(**first)) is first.sharding is session.batches.current
    assert selected(session, {"ids": second["input_ids"]}) is second.sharding


def test_a_batch_that_moves_keeps_its_sharding_and_a_cast_tensor_does_not() -> None:
    session, (first, second) = batches_of(8, 8)
    session.batches._recent.append(batches_of(8)[1][0].sharding)  # another one of this length
    moved = first.to(torch.float64)
    assert moved["input_ids"].dtype == torch.float64 and moved.sharding is first.sharding
    assert selected(session, moved) is first.sharding
    with pytest.raises(RingShapeError, match="was copied after shard_batch"):
        selected(session, {key: x.double() for key, x in second.items()})


def test_sessions_do_not_read_each_others_shardings() -> None:
    """On one rank the local tensors are the caller's own: both sessions give out the same data."""
    ones, others = session_of(), session_of()
    whole = {"input_ids": IDS.clone(), "position_ids": torch.arange(8)[None]}
    first, second = ones.shard_batch(whole), others.shard_batch(whole)
    assert selected(ones, first) is first.sharding and selected(others, second) is second.sharding
    assert first.sharding is not second.sharding
    other = others.shard_batch({"input_ids": IDS[:, :4].clone()})
    with pytest.raises(RingShapeError, match="local length"):
        selected(ones, other)


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_saved_batch_is_a_plain_one(weights_only: bool) -> None:
    _, (batch,) = batches_of(8)
    file = io.BytesIO()
    torch.save({"batch": batch, "ids": batch["input_ids"]}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=weights_only)
    assert loaded["batch"].keys() == batch.keys() and loaded["ids"].equal(batch["input_ids"])
    again = pickle.loads(pickle.dumps(batch))
    assert again["input_ids"].equal(batch["input_ids"]) and not isinstance(again, RingBatch)


def test_a_deep_copy_carries_the_sharding() -> None:
    session, (first, _) = batches_of(7, 8)
    assert selected(session, copy.deepcopy(first)) is first.sharding


def test_a_tree_of_tensors_is_a_batch_again() -> None:
    _, (batch,) = batches_of(8)
    doubled = tree_map(lambda x: 2 * x, batch)
    assert isinstance(doubled, RingBatch) and doubled["input_ids"].equal(2 * batch["input_ids"])
    assert doubled.sharding is None
