"""What does not go with block diffusion in a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_ring import Causal, SlidingWindow
from ds_ring.contrib.diffusion.batch import DiffusionRows
from ds_ring.data.batch import DOCUMENT_IDS
from ds_ring.errors import RingPatternError, RingShapeError

IDS = torch.zeros(1, 4)


@pytest.mark.parametrize(
    ("batch", "pattern", "error", "words"),
    [
        (
            {},
            SlidingWindow(4),
            RingPatternError,
            "expected Causal() and no other documents or attention_mask",
        ),
        ({DOCUMENT_IDS: IDS}, Causal(), RingPatternError, "number blocks by engine.ring.diffusion_batch"),
        ({"labels": IDS, "position_ids": IDS}, Causal(), RingShapeError, "expected no labels with diffusion"),
        ({}, Causal(), RingShapeError, "expected position_ids with diffusion_blocks"),
    ],
)
def test_a_batch_of_another_kind_is_refused(
    batch: dict[str, Any], pattern: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as caught:
        DiffusionRows().check(batch, pattern, False)
    assert words in str(caught.value)
    DiffusionRows().check({"position_ids": IDS}, Causal(), False)
