"""What a conversion reads of DeepSpeed's files: what it would change is refused, samples are counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ds_ring.checkpoint.manifest import files_in, record_files, write_manifest
from ds_ring.checkpoint.resize import _require_convertible, count_step_samples
from ds_ring.errors import RingCheckpointError


def save(folder: Path, optimizer: dict[str, Any], model: dict[str, Any]) -> Path:
    folder.mkdir()
    torch.save(model, folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    for rank in range(2):
        path = folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer}, path)
    return folder


def of_stage_3(*rates: float, names: tuple[str, ...] = ("step", "exp_avg", "exp_avg_sq")) -> dict[str, Any]:
    groups = [{"lr": rate, "params": [number]} for number, rate in enumerate(rates)]
    states = {"state": {0: dict.fromkeys(names, torch.ones(2))}, "param_groups": groups}
    return {"zero_stage": 3, "optimizer_state_dict": states}


@pytest.mark.parametrize(
    ("optimizer", "frozen", "says"),
    [
        (of_stage_3(0.1, 0.2), {}, "expected equal groups at ZeRO 3, got 2 different ones"),
        (of_stage_3(0.1, names=("momentum_buffer",)), {}, r"got \['momentum_buffer'\]"),
        (of_stage_3(0.1), {"weight": torch.Size([2])}, "no frozen weights at ZeRO 3"),
    ],
    ids=["groups", "another optimizer", "frozen"],
)
def test_states_that_would_become_others_are_refused(
    tmp_path: Path, optimizer: dict[str, Any], frozen: dict[str, Any], says: str
) -> None:
    _require_convertible(save(tmp_path / "alike", of_stage_3(0.1, 0.1), {}))
    with pytest.raises(RingCheckpointError, match=says):
        _require_convertible(save(tmp_path / "other", optimizer, {"frozen_param_shapes": frozen}))


def test_samples_of_a_step_are_those_of_the_replicas(tmp_path: Path) -> None:
    """Four ranks in rings of two are two replicas."""
    config = {
        "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5, "sequence_parallel_size": 2,
    }  # fmt: skip
    folder = save(tmp_path / "step", {}, {"ds_config": config, "dp_world_size": 4})
    write_manifest(folder, record_files(folder, files_in(folder)), 1)
    assert count_step_samples(tmp_path, "step") == 3 * 5 * 2
