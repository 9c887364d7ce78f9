"""What trees of rollouts refuse, on one rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ds_ring.contrib.policies.trees import TreeBatch, trees_of
from ds_ring.errors import RingPatternError, RingShapeError
from tests.sessions import session_of

IDS = torch.arange(1, 9)


def test_values_of_a_tree_are_of_all_its_tokens() -> None:
    tree = TreeBatch([IDS[:4], IDS[:6]])
    with pytest.raises(RingShapeError, match=r"expected 6 values, got \[1, 5\]"):
        tree.of_rollouts(torch.zeros(1, 5))


@pytest.mark.parametrize("ends", [IDS, IDS[None].float(), IDS[None] > 3])
def test_ends_of_trees_are_integers_by_sample(ends: Tensor) -> None:
    with pytest.raises(RingShapeError, match=r"expected integers \[samples, tokens\], got"):
        trees_of(ends)


def test_a_tree_of_rollouts_has_no_documents_to_report() -> None:
    session = session_of()
    tree = session.tree_batch([[1, 2, 3], [1, 2, 4]])
    local = session.shard_batch(tree.batch)
    with pytest.raises(RingPatternError, match=r"expected documents, got a tree; use tree\.of_rollouts"):
        session.document_losses(torch.zeros(local["input_ids"].shape), local)
    local.pop("shift_labels")
    with pytest.raises(RingShapeError, match="a batch with shift_labels, none, got"):
        session.document_losses(torch.zeros(local["input_ids"].shape), local)


def test_a_session_has_no_methods_but_its_own_and_those_of_rows() -> None:
    session = session_of()
    assert callable(session.tree_batch)
    with pytest.raises(AttributeError, match=r"engine\.ring has no attribute 'three_batch'"):
        session.three_batch  # noqa: B018
