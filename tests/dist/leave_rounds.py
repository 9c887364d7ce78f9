"""Jobs that are told to leave, or whose launcher is killed, at random moments: is a step lost, is anybody left?

Two ranks on this machine; the moment is drawn from the whole of a job, its start included.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from tests.dist.relaunch_rounds import CONFIG, DEADLINE_SECONDS, _left, _losses, _marked
from tests.dist.relaunch_rounds import ROOT as REPOSITORY

LOCAL_ENGINES = ("deepspeed", "torchrun", "mpirun")
_MARK = "DS_RING_TEST_MARK"
_STARTED_SECONDS = 120.0


def leave_when_told(folder: Path, engine: str, seed: int) -> dict[str, Any]:
    """SIGTERM to the launcher while steps are made: status 75, and the last completed step is saved."""
    mark, draw = uuid.uuid4().hex, random.Random(seed)
    started = _start(folder, engine, mark)
    try:
        _wait_for_steps(folder, started, draw.randint(1, 12))
        time.sleep(draw.random() * 0.4)
        at = time.monotonic()
        started.send_signal(signal.SIGTERM)
        status = started.wait(timeout=DEADLINE_SECONDS)
        seconds, left = time.monotonic() - at, _left(mark)
    finally:
        _end(started, mark)
    last = max((row["step"] for row in _losses(folder)), default=0)
    latest = folder / "out/checkpoints/latest"
    saved = int(latest.read_text().strip().removeprefix("global_step")) if latest.exists() else 0
    wrong = f"status {status}: {(folder / 'log').read_text()[-2000:]}" if status != 75 else ""
    wrong = wrong or (f"step {last} was done, step {saved} is saved" if saved != last else "")
    return {"seconds": round(seconds, 1), "step": last, "wrong": wrong or (f"left: {left}" if left else "")}


def kill_the_launcher(folder: Path, engine: str, seed: int) -> dict[str, Any]:
    """SIGKILL to the launcher at any moment: nobody is left ten seconds later."""
    mark, draw = uuid.uuid4().hex, random.Random(seed)
    started = _start(folder, engine, mark)
    try:
        time.sleep(draw.random() * 40)
        started.kill()
        started.wait()
        at = time.monotonic()
        left = _left(mark)
        seconds = time.monotonic() - at
    finally:
        _end(started, mark)
    done = len(_losses(folder))
    return {"seconds": round(seconds, 1), "step": done, "wrong": f"left behind: {left}" if left else ""}


def _start(folder: Path, engine: str, mark: str) -> subprocess.Popen[bytes]:
    (folder / "out").mkdir(parents=True)
    (folder / "ds.json").write_text(json.dumps(CONFIG | {"sequence_parallel_size": 2}))
    lines = {
        "engine": engine,
        "device": "cpu",
        "hosts": "local",
        "slots": 2,
        "script": str(REPOSITORY / "tests/dist/relaunch_train.py"),
        "deepspeed_config": "ds.json",
        "script_args": ["--output", str(folder / "out"), "--steps", "1000", "--save-every", "1000"],
        "run_folder": "run",
    }
    (folder / "cluster.yaml").write_text(json.dumps(lines))
    with open(folder / "log", "w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "ds_ring_launcher.cli", "launch", "cluster.yaml"],
            env={**os.environ, _MARK: mark}, cwd=folder, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip


def _wait_for_steps(folder: Path, started: subprocess.Popen[bytes], steps: int) -> None:
    deadline = time.monotonic() + _STARTED_SECONDS
    while len(_losses(folder)) < steps and started.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)


def _end(started: subprocess.Popen[bytes], mark: str) -> None:
    for process in [started, *_marked(mark)]:
        process.kill()
