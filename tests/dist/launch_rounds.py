"""Rounds of two `ds-ring launch` of one run at the same instant: one goes on, one is refused, nothing is lost.

Owns the job and what is wrong with a round; `tools/campaign.py launch` plays many. Real launchers in processes
of their own, a real engine (mpirun, which starts without torch), and a script that saves a checkpoint each
step. `python -m tests.dist.launch_rounds FOLDER ROUNDS` prints a JSON list, one text for each round.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing.synchronize import Barrier
from pathlib import Path

from ds_ring_launcher import cli
from ds_ring_launcher.cluster import checks, cluster_file  # noqa: F401  imported before the instant
from ds_ring_launcher.run import relaunch, start  # noqa: F401
from ds_ring_launcher.run.run_folder import RunFolder
from ds_ring_launcher.run.run_records import LauncherRecord, read_record

STEPS, STEP_SECONDS = 6, 0.1
_DEADLINE_SECONDS = 120.0
_SCRIPT = f"""
import os, pathlib, time
folder = pathlib.Path(__file__).parent / "checkpoints"
folder.mkdir(exist_ok=True)
latest = folder / "latest"
step = int(latest.read_text().removeprefix("global_step")) if latest.exists() else 0
while step < {STEPS}:
    time.sleep({STEP_SECONDS})
    step += 1
    if os.environ["RANK"] == "0":
        (folder / f"global_step{{step}}").mkdir()
        with open(folder / "saved", "a") as file:
            file.write(f"{{step}} {{os.getpid()}}\\n")
        part = folder / ".latest"
        part.write_text(f"global_step{{step}}")
        part.rename(latest)
"""
_YAML = """\
engine: mpirun
device: cpu
hosts: local
slots: 2
script: train.py
deepspeed_config: ds.json
run_folder: run
relaunch: {checkpoints: checkpoints, backoff_seconds: 0.1}
"""


def play_rounds(folder: Path, rounds: int) -> list[str]:
    """Play so many rounds; return what is wrong with each, "" for a good one."""
    command = [sys.executable, "-m", "tests.dist.launch_rounds", str(folder), str(rounds)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=rounds * _DEADLINE_SECONDS,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    result: list[str] = json.loads(done.stdout)
    return result


def _round(folder: Path) -> str:
    """Play one round in a new folder."""
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(_SCRIPT)
    sizes = {"train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": 2}
    (folder / "ds.json").write_text(json.dumps({**sizes, "ring_attention": {"ring_size": 2}}))
    (folder / "cluster.yaml").write_text(_YAML)
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(2)
    both = [context.Process(target=_launch, args=(folder, number, barrier)) for number in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(_DEADLINE_SECONDS)
        if process.exitcode is None:
            process.kill()
            return "a launcher did not end"
    return _wrong(folder, [(process.pid, process.exitcode) for process in both])


def _launch(folder: Path, number: int, barrier: Barrier) -> None:
    """Be the command `ds-ring launch`, from the instant on at which both are here."""
    log = os.open(folder / f"log-{number}", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    barrier.wait()
    sys.exit(cli.main(["launch", str(folder / "cluster.yaml")]))


def _wrong(folder: Path, ended: list[tuple[int | None, int | None]]) -> str:
    logs = [(folder / f"log-{number}").read_text() for number in range(2)]
    if sorted(status or 0 for _, status in ended) != [0, cli.WRONG_INPUT]:
        return f"expected one launch to end with 0 and one with 2, got {ended}: {logs}"
    first = 0 if ended[0][1] == 0 else 1
    named = f"got process {ended[first][0]} on {os.uname().nodename}"
    if named not in logs[1 - first]:
        return f"expected the refusal to say {named!r}, got {logs[1 - first]!r}"
    saved = [line.split() for line in (folder / "checkpoints/saved").read_text().splitlines()]
    if [step for step, _ in saved] != [str(step) for step in range(1, STEPS + 1)] or len(
        set(dict(saved).values())
    ) > 1:
        return f"expected each step saved once by one process, got {saved}"
    there = sorted(path.name for path in (folder / "checkpoints").glob("global_step*"))
    if there != [f"global_step{step}" for step in range(1, STEPS + 1)]:
        return f"checkpoints were lost: {there}"
    if (folder / "checkpoints/latest").read_text() != f"global_step{STEPS}":
        return "`latest` went back"
    events = [(event["event"], event["attempt"]) for event in RunFolder(folder / "run").events()]
    if events != [("start", 1), ("end", 1)]:
        return f"expected one attempt, got {events}"
    holder = read_record(folder / "run/launcher.json", LauncherRecord)
    if holder is None or holder.pid != ended[first][0] or not holder.ended:
        return f"expected the launcher that went on to have held the folder, got {holder}"
    return ""


if __name__ == "__main__":
    print(json.dumps([_round(Path(sys.argv[1]) / f"round-{number}") for number in range(int(sys.argv[2]))]))
