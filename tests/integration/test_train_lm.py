"""The training script on two processes: what it leaves behind; a resumed run is the run that it resumes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_ring_launcher.cluster.cluster_file import read_cluster
from ds_ring_launcher.demo import train_lm
from ds_ring_launcher.demo.lm_compare import Comparison
from tests.dist.deepspeed_ranks import start_deepspeed
from tests.dist.harness import run_ranks

ROOT = Path(__file__).resolve().parents[2]
QUICK_START = "--steps 2 --sequence_length 512 --hidden_size 64 --layers 1 --evaluate_every 2"
TINY = ["--sequence_length", "101", "--hidden_size", "16", "--layers", "1", "--evaluate_every", "2"]


def train(output: Path, config: dict[str, Any], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Two ranks by torchrun, which finds itself a free port."""
    output.mkdir(parents=True, exist_ok=True)
    (output / "ds_config.json").write_text(json.dumps(config))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(ROOT / "launcher/demo/train_lm.py"), "--deepspeed_config", str(output / "ds_config.json")]
    return subprocess.run(
        [*torchrun, *script, "--output", str(output), *TINY, *arguments],
        env=os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=150,
    )


def check_comparison(log: dict[str, Any]) -> None:
    """The ring is what one process is, parameter by parameter."""
    comparison = log["comparison"]
    assert comparison["exact"] is True
    assert abs(comparison["loss_on_ring"] - comparison["loss_alone"]) < 1e-5
    assert comparison["gradient_difference"] < 2e-4
    assert comparison["gradients"] == 12  # a layer has 9, and there are embedding, last norm and head
    assert len(comparison["ranks_mib"]) == 2


def check_quick_start(output: Path) -> None:
    """What README's first command leaves behind."""
    comparison = log_of(output)["comparison"]
    check_comparison(log_of(output))
    assert max(comparison["ranks_mib"]) < 0.75 * comparison["alone_mib"]
    assert (output / "training.png").read_bytes().startswith(b"\x89PNG")


def log_of(output: Path) -> dict[str, Any]:
    return json.loads((output / "log.json").read_text())


@pytest.mark.slow
@pytest.mark.night
def test_a_resumed_run_has_the_losses_of_the_whole_run(tmp_path):
    """With ZeRO 3, two micro-batches in a step, and a length that no ring divides."""
    config = json.loads((ROOT / "configs/quickstart.json").read_text())
    config |= {"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": 2}
    config["train_micro_batch_size_per_gpu"] = 2
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    run = train(whole, config, "--steps", "4", "--save_every", "2")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "peak memory per rank" in run.stdout
    assert (whole / "training.png").read_bytes().startswith(b"\x89PNG")
    log = log_of(whole)
    assert len(log["losses"]) == 4
    assert all(5.0 < loss < 6.0 for loss in log["losses"]), "a byte of 257 guessed at random costs 5.55"
    assert len(log["peak_mib"]) == 2
    check_comparison(log)
    assert [step for step, _ in log["held_out"]] == [2, 4]

    shutil.copytree(whole / "checkpoints", resumed / "checkpoints")
    shard = next((resumed / "checkpoints" / "global_step4").glob("*pp_rank_1*_optim_states.pt"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1  # one bit of the newest checkpoint: the one before is taken
    shard.write_bytes(data)
    run = train(resumed, config, "--steps", "4", "--resume")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "FutureWarning" not in run.stderr, "torch's, of the collectives that DeepSpeed calls"
    assert f"{shard.name}: expected sha256" in run.stderr
    assert "checkpoint global_step4 is damaged, trying global_step2 instead" in run.stderr
    again = log_of(resumed)
    assert again["losses"] == log["losses"]
    assert again["held_out"] == log["held_out"]


@pytest.mark.slow
@pytest.mark.night
def test_the_longnet_configuration_trains(tmp_path):
    """`packed` is run by test_documents.py, as configs/README.md says."""
    config = json.loads((ROOT / "configs/longnet.json").read_text())
    config["ring_attention"]["pattern"] |= {"segment_lengths": [8, 32, 128], "dilation_rates": [1, 2, 4]}
    run = train(tmp_path, config, "--steps", "2")
    assert run.returncode == 0, run.stdout + run.stderr
    assert all(5.0 < loss < 6.0 for loss in log_of(tmp_path)["losses"])
    check_comparison(log_of(tmp_path))


def quick_start(rank: int, world_size: int, output: str) -> str:
    """What README's first command prints on this rank."""
    start_deepspeed()
    cluster = read_cluster(ROOT / "configs/quickstart.yaml")
    sys.argv = [str(cluster.script), "--deepspeed_config", str(cluster.deepspeed_config), "--output", output]
    sys.argv += QUICK_START.split()
    torch.distributed.destroy_process_group = lambda: None  # the harness does that
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(sys.argv[0], run_name="__main__")
    return printed.getvalue()


def test_the_quick_start_is_exact(tmp_path):
    """On ranks that have torch loaded already; at night test_documents.py runs the command itself."""
    output, other = run_ranks(quick_start, 2, str(tmp_path))
    assert "loss of the trained model on 4 x 512 tokens, one process" in output and not other
    check_quick_start(tmp_path)
    assert len(log_of(tmp_path)["losses"]) == 2


def test_a_difference_is_seen_in_the_rows():
    """Loss, the gradient that differs most, memory."""
    same = {"tokens": 8, "loss_alone": 2.0, "gradients": 3, "alone_mib": 10.0, "ranks_mib": [6.0, 5.0]}
    worst = {"worst": "head.weight", "gradient_difference": 0.19}
    comparison = Comparison(samples=1, loss_on_ring=2.5, exact=False, **same, **worst)
    *_, loss, gradient, alone, ranks = comparison.rows().values()
    assert (loss, gradient) == ("5.0e-01", "1.9e-01 (head.weight)")
    assert (alone, ranks) == ("10 MiB", "6, 5 MiB (60 %)")
    with pytest.raises(SystemExit, match="differ by more than rounding: see the lines above"):
        train_lm.require_exact(comparison)
    train_lm.require_exact(replace(comparison, exact=True))


def help_of_the_script(rank: int, world_size: int) -> tuple[int | str | None, str]:
    """Its exit status and what it prints."""
    script = str(ROOT / "launcher/demo/train_lm.py")
    sys.argv = [script, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as ended:
            return ended.code, printed.getvalue()
    return None, printed.getvalue()


def test_help_has_an_example():
    ((status, printed),) = run_ranks(help_of_the_script, 1)
    assert status == 0
    assert "ds-ring launch configs/quickstart.yaml" in printed
    assert "--deepspeed_config" in printed
