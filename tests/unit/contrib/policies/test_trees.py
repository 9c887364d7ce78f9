"""What trees of rollouts refuse, on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_ring.contrib.policies.trees import TreeBatch, read_trees
from ds_ring.errors import RingPatternError, RingShapeError
from tests.refusals import refuse
from tests.sessions import session_of

IDS = torch.arange(1, 9)


def losses(**changes: Any) -> Any:
    """Losses of documents, of a tree."""
    session = session_of()
    local = session.shard_batch(session.tree_batch([[1, 2, 3], [1, 2, 4]]).batch)
    batch = {name: x for name, x in (local | changes).items() if x is not None}
    return session.document_losses(torch.zeros(local["input_ids"].shape), batch)


test_it_is_refused = refuse({
    "values of fewer tokens": (
        lambda: TreeBatch([IDS[:4], IDS[:6]]).of_rollouts(torch.zeros(1, 5)), RingShapeError,
        r"expected 6 values, got \[1, 5\]"),
    **{
        f"ends in {ends.dtype} of {ends.dim()} dimensions": (
            lambda ends=ends: read_trees(ends), RingShapeError, r"expected integers \[samples, tokens\], got")
        for ends in (IDS, IDS[None].float(), IDS[None] > 3)
    },
    "documents to report": (losses, RingPatternError,
        r"expected documents, got a tree; use tree\.of_rollouts"),
    "labels that are not there": (lambda: losses(shift_labels=None), RingShapeError,
        "document_losses: expected shift_labels, got"),
})  # fmt: skip


def test_each_branch_begins_with_the_last_common_token() -> None:
    """So that each slot has one next token, as the labels of a batch require."""
    rollouts = [torch.tensor(row) for row in ([1, 2, 3, 5], [1, 2, 4], [1, 2, 3, 6])]
    tree = TreeBatch(rollouts)
    ids, labels = tree.batch["input_ids"][0], tree.batch["shift_labels"][0]
    for rollout, places in zip(rollouts, tree.places, strict=True):
        slots = torch.as_tensor(places)
        assert ids[slots].tolist() == rollout.tolist()
        assert labels[slots[:-1]].tolist() == rollout[1:].tolist()


def test_a_session_has_no_methods_but_its_own_and_those_of_rows() -> None:
    session = session_of()
    assert callable(session.tree_batch)
    with pytest.raises(AttributeError, match=r"engine\.ring has no attribute 'three_batch'"):
        session.three_batch  # noqa: B018
