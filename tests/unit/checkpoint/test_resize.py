"""What is read of a checkpoint before it is converted for other ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ds_ring.checkpoint import resize
from ds_ring.checkpoint.manifest import files_in, record_files, write_manifest
from ds_ring.checkpoint.resize import count_step_samples
from ds_ring_launcher.cli import main


def write_checkpoint(folder: Path, data_ranks: int) -> None:
    """Write what four ranks in rings of two know of a step: DeepSpeed may count the replicas alone."""
    folder.mkdir()
    config = {
        "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5, "sequence_parallel_size": 2,
    }  # fmt: skip
    model = {"ds_config": config, "dp_world_size": data_ranks}
    torch.save(model, folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    if data_ranks < 4:
        for rank in range(4):
            torch.save({}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    write_manifest(folder, record_files(folder, files_in(folder)), 1)


@pytest.mark.parametrize("data_ranks", [2, 4])
def test_samples_of_a_step_are_those_of_the_replicas(tmp_path: Path, data_ranks: int) -> None:
    """Four ranks in rings of two are two replicas."""
    write_checkpoint(tmp_path / "step", data_ranks)
    assert count_step_samples(tmp_path, "step") == 3 * 5 * 2


def test_samples_of_a_step_that_the_json_counts_together(tmp_path: Path) -> None:
    (tmp_path / "step").mkdir()
    model = {"ds_config": {"train_batch_size": 7}, "dp_world_size": 4}
    torch.save(model, tmp_path / "step" / "mp_rank_00_model_states.pt")
    write_manifest(tmp_path / "step", record_files(tmp_path / "step", files_in(tmp_path / "step")), 1)
    assert count_step_samples(tmp_path, "step") == 7


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_says_what_keeps_the_samples_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    """30 samples on eight ranks in rings of four: 15 for each replica. The conversion runs by night."""
    write_checkpoint(tmp_path / "step", 4)
    monkeypatch.setattr(resize, "resize_checkpoint", lambda folder, tag, workers: "converted")
    command = ["resize-checkpoint", str(tmp_path), "--tag", "step", "--world-size", "8", "--ring-size", "4"]
    assert main(command + ["--json"] * as_json) == 0
    printed = capsys.readouterr().out
    if as_json:
        wanted = {"tag": "converted", "sequence_parallel_size": 4, "samples_per_replica": 15}
        assert json.loads(printed) == wanted
    else:
        assert '"sequence_parallel_size": 4' in printed
        assert '"gradient_accumulation_steps" = 15 keep the 30 samples' in printed
    assert main([*command[:-3], "16", "--ring-size", "4"]) == 2
    assert "--world-size: expected replicas that divide 30 samples, got 4" in capsys.readouterr().err
