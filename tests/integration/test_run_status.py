"""What is known of a run from its folder: while it trains, after a rank was killed, and at the end.

With a script of plain Python that writes the files of `run_folder.py`, and with real training, whose imports
are most of the time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_ring_launcher.run.run_folder import RunFolder
from ds_ring_launcher.status.run_status import read_run
from tests.clock import wait_until
from tests.integration.test_launch import DS_RING, Workplace, workplace  # noqa: F401  a fixture

ROOT = Path(__file__).resolve().parents[2]
STEPS, KILLED = 24, 12
YAML = """engine: {engine}
device: cpu
hosts: local
slots: 2
script: {script}
deepspeed_config: ds.json
run_folder: run
relaunch: {{checkpoints: out/checkpoints, backoff_seconds: 0.1}}
"""
# Steps with a loss that falls, in the layout of `run_folder.py`; `latest` is its checkpoint.
PLAIN = """
import argparse, json, os, pathlib, signal, time
parser = argparse.ArgumentParser(allow_abbrev=False)
for name in ("--output", "--steps", "--step-seconds", "--fault-step", "--deepspeed_config"):
    parser.add_argument(name)
options, _ = parser.parse_known_args()
rank, out = int(os.environ["RANK"]), pathlib.Path(options.output)
folder, latest = pathlib.Path(os.environ["DS_RING_RUN_FOLDER"]), out / "checkpoints" / "latest"
latest.parent.mkdir(exist_ok=True)
first = int(latest.read_text()) if latest.exists() else 0
for step in range(first + 1, int(options.steps) + 1):
    time.sleep(float(options.step_seconds))
    if rank == 1 and step == int(options.fault_step) and (out / "armed").exists():
        (out / "armed").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    link = {"from": 1 - rank, "hops": 2, "hop_seconds": 0.01, "wait_seconds": 0.002, "bytes": 4096}
    figures = {"rank": rank, "at": time.time(), "step": step, "loss": 5 / step, "step_seconds": 0.2,
               "tokens_per_second": 1e4 + step, "memory_bytes": 2**28, "ring_rank": rank, "links": [link]}
    part = folder / f".{rank}.part"
    part.write_text(json.dumps(figures))
    part.rename(folder / f"rank-{rank}.metrics.json")
    if rank == 0:
        with open(folder / "history.jsonl", "a") as file:
            file.write(json.dumps(figures) + "\\n")
        with open(out / "losses.jsonl", "a") as file:
            file.write(json.dumps(figures) + "\\n")
        if step % 2 == 0:
            latest.with_suffix(".part").write_text(str(step))
            latest.with_suffix(".part").rename(latest)
"""
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "sequence_parallel_size": 2,
    "ring_attention": {},
}


def objects(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.needs("mpirun")
@pytest.mark.parametrize("script", ["plain", "training"])
@pytest.mark.night
def test_a_run_its_fault_and_its_end_are_known(workplace: Workplace, script: str) -> None:  # noqa: F811
    place, run = workplace.folder, RunFolder(workplace.folder / "run")
    (place / "out").mkdir()
    (place / "out/armed").touch()
    (place / "ds.json").write_text(json.dumps(CONFIG))
    (place / "plain.py").write_text(PLAIN)
    train = ROOT / "tests/dist/relaunch_train.py" if script == "training" else place / "plain.py"
    engine = "torchrun" if script == "training" else "mpirun"  # which starts without torch
    (place / "cluster.yaml").write_text(YAML.format(engine=engine, script=train))
    fault = ["--fault", "kill", "--fault-step", str(KILLED), "--fault-rank", "1"]
    options = ["--output", str(place / "out"), "--steps", str(STEPS), "--step-seconds", "0.2", *fault]
    started = workplace.start([*DS_RING, str(place / "cluster.yaml"), "--", *options])
    history = run.attempt(1) / "history.jsonl"
    wait_until(lambda: history.exists() and history.read_text().count("\n") >= 3)
    status = read_run(run.path)
    assert status.state == "running" and status.latest is not None and status.latest.step >= 3
    assert status.links and {rank.state for rank in status.ranks} == {"at work"}

    wait_until(lambda: any(one["event"] == "start" and one["attempt"] == 2 for one in run.events()))
    (fault,) = read_run(run.path).attempts[0].faults
    assert fault.startswith("rank 1 on localhost was lost")

    code, output = workplace.finish(started)
    assert code == 0, output
    status = read_run(run.path)
    assert status.state == "done" and status.latest is not None and status.latest.step == STEPS
    losses = {one["step"]: one["loss"] for one in objects(place / "out/losses.jsonl")}
    for attempt in (1, 2):
        course = objects(run.attempt(attempt) / "history.jsonl")
        assert course and all(one["loss"] == pytest.approx(losses[one["step"]], rel=1e-6) for one in course)
