"""A part of tools/check_training.py: what no other test trains, one cell each."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.training_table import CLIP, VARIANTS, errors, train_alone, train_on_ring

CELLS = {
    "offload": (3, "ring 2"),
    "checkpoint by DeepSpeed": (1, "ring 2"),
    "clip": (2, "ring 2"),
    "LoRA": (3, "ring 2"),
    "zero.Init": (3, "ring 2"),
}


@pytest.mark.day("checkpoint by DeepSpeed", "zero.Init")
@pytest.mark.parametrize("name", CELLS)
def test_a_variant_trains_as_on_one_process(rank_pool: Any, name: str) -> None:
    if name == "LoRA":
        pytest.importorskip("peft")
    stage, mesh = CELLS[name]
    expected, allowed = train_alone(name), VARIANTS[name].errors
    loss, gradient = errors(rank_pool(2).run(train_on_ring, name, stage, mesh), expected)
    assert loss <= allowed[0]
    assert gradient <= allowed[1]
    if name == "clip":  # it does clip: the losses are others than without
        norm = sum(float(x.square().sum()) for x in expected.gradients.values()) ** 0.5
        assert norm > 2 * CLIP
        assert train_alone("plain").losses[2] != pytest.approx(expected.losses[2], rel=1e-3)
