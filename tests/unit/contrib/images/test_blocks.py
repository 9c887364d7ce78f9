"""Which tokens of a batch see each other both ways, by the type of the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_ring.contrib.images.blocks import numbers_blocks

VISION = SimpleNamespace(use_bidirectional_attention="vision", sliding_window=8)


@pytest.mark.parametrize(
    ("kind", "types", "blocks"),
    [
        ("paligemma", [0, 0, 1, 0, 1, 1], [0, 0, -1, 0, -1, -1]),  # the prompt, whatever is in it
        ("molmo2", [0, 1, 1, 0, 1, 0], [-1, 0, 0, -1, 0, -1]),  # all images of a sample
        ("gemma3", [0, 1, 1, 0, 1, 0], [-1, 0, 0, -1, 1, -1]),  # each image
        ("gemma4", [0, 1, 1, 0, 2, 0], [-1, 0, 0, -1, 1, -1]),  # and each frame
        ("gemma3", [0, 1, 1, 0, 2, 0], [-1, 0, 0, -1, -1, -1]),
        ("gemma3", [0] * 6, None),
        ("llava", [0, 1, 1, 0, 1, 0], None),
    ],
)
def test_blocks_are_those_of_the_family(kind: str, types: list[int], blocks: list[int] | None) -> None:
    config = SimpleNamespace(model_type=kind, **({"text_config": VISION} if kind == "gemma4" else {}))
    name = "token_type_ids" if kind in ("gemma3", "paligemma") else "mm_token_type_ids"
    number = numbers_blocks(SimpleNamespace(config=config))
    assert number({}) is None
    batch: dict[str, Any] = {name: torch.tensor([types])}
    found = number(batch)
    assert (found is None) if blocks is None else found.clamp_min(-1).tolist() == [blocks]
    if blocks is not None:  # padding is in no block
        found = number(batch | {"attention_mask": torch.tensor([[1, 0, 1, 1, 1, 1]])})
        assert found.clamp_min(-1).tolist() == [[blocks[0], -1, *blocks[2:]]]
