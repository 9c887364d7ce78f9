"""The loss: a local sum, divided so that the engine's average over ranks is the mean over all tokens."""

from __future__ import annotations

import pytest
import torch

from ds_ring import RingMesh
from ds_ring.data.batch import IGNORE
from ds_ring.data.loss import items_per_batch, local_loss, world_mean

CPU = torch.device("cpu")


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_average_over_ranks_is_the_mean_over_tokens(ranks):
    torch.manual_seed(0)
    logits = torch.randn(1, 8, 5, requires_grad=True)
    labels = torch.tensor([[1, IGNORE, 2, 3, IGNORE, IGNORE, IGNORE, 4]])
    items = items_per_batch(4, ranks, CPU)
    shards = zip(logits.chunk(ranks, dim=1), labels.chunk(ranks, dim=1), strict=True)
    average = sum(local_loss(*shard, items) for shard in shards) / ranks
    expected = torch.nn.functional.cross_entropy(logits[0], labels[0])
    assert torch.allclose(average, expected)
    (got,), (wanted,) = (torch.autograd.grad(loss, logits) for loss in (average, expected))
    assert torch.allclose(got, wanted, rtol=1e-6)


def test_no_label_at_all_is_a_loss_of_zero():
    logits = torch.randn(1, 4, 5, requires_grad=True)
    loss = local_loss(logits, torch.full((1, 4), IGNORE), items_per_batch(0, 2.0, CPU))
    loss.backward()
    assert loss.item() == 0.0
    assert not logits.grad.any()


def test_world_mean_without_a_world():
    assert world_mean(torch.tensor(3.0, requires_grad=True), 1.0, RingMesh.single()).item() == 3.0
