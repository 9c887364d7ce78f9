"""What is read of a checkpoint before it is converted for other ranks."""

from __future__ import annotations

from pathlib import Path

import torch

from ds_ring.checkpoint.manifest import files_in, record_files, write_manifest
from ds_ring.checkpoint.resize import count_step_samples


def test_samples_of_a_step_are_those_of_the_replicas(tmp_path: Path) -> None:
    """Four ranks in rings of two are two replicas."""
    folder = tmp_path / "step"
    folder.mkdir()
    config = {
        "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5, "sequence_parallel_size": 2,
    }  # fmt: skip
    model = {"ds_config": config, "dp_world_size": 4}
    torch.save(model, folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    write_manifest(folder, record_files(folder, files_in(folder)), 1)
    assert count_step_samples(tmp_path, "step") == 3 * 5 * 2
