"""What a drafter's batch is refused for, and its loss against distributions; without a ring."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_ring.comm.mesh import RingMesh
from ds_ring.contrib.drafter.attention import draft_loss
from ds_ring.contrib.drafter.batch import LABELS, WEIGHTS, drafter_batch
from ds_ring.errors import RingPatternError, RingShapeError

IDS = torch.arange(12).view(2, 6)


@pytest.mark.parametrize(
    ("ids", "options", "error", "words"),
    [
        (IDS[0], {}, RingShapeError, "expected input_ids [samples, tokens], got [6]; add a dimension"),
        (IDS, {"draft": 0}, RingPatternError, "drafter_batch: draft: expected"),
        (IDS, {"weights": [1.0]}, RingShapeError, "expected 2 weights, got 1; give one for each"),
        (IDS, {"whole": object()}, RingShapeError, "expected a trunk of texts, got one of images"),
        (IDS, {"anchors": torch.tensor([[1], [2]])}, RingShapeError, "anchors [2, blocks] and a mask_token"),
        (IDS, {"anchors": torch.tensor([[1], [6]]), "mask_token": 3}, RingPatternError, "got 1 to 6"),
    ],
)
def test_a_wrong_batch_is_refused(ids: Any, options: dict[str, Any], error: type, words: str) -> None:
    options = dict(options)
    session: Any = SimpleNamespace(needs=SimpleNamespace(whole=options.pop("whole", None)))
    with pytest.raises(error) as caught:
        drafter_batch(session, ids, options.pop("draft", 2), **options)
    assert words in str(caught.value)


def test_distributions_of_one_token_are_labels() -> None:
    session: Any = SimpleNamespace(
        run_mesh=RingMesh.single(), gradient_divisor=1.0, mean_loss=lambda loss: loss.detach()
    )
    logits, labels = torch.randn(2, 3, 7, dtype=torch.float64), torch.randint(7, (2, 3))
    batch = {LABELS: labels, WEIGHTS: torch.tensor([[1.0, 0.5, 0.0], [2.0, 1.0, 0.25]])}
    by_labels = float(draft_loss(session, logits, batch).backward_loss)
    targets = torch.nn.functional.one_hot(labels, 7).double()
    by_targets = float(draft_loss(session, logits, batch, targets).backward_loss)
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    weights = batch[WEIGHTS].flatten().double()
    assert by_labels == pytest.approx(float((losses * weights).sum() / weights.sum()), rel=1e-6)
    assert by_targets == pytest.approx(by_labels, rel=1e-12)
