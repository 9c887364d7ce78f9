"""Jobs that are told to leave, or whose launcher is killed, at random moments: is a step lost, is anybody left?

Two ranks, on this machine or on two hosts; the moment is drawn from the whole of a job, its start included.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.dist.relaunch_rounds import (
    DEADLINE_SECONDS,
    MARK,
    Place,
    launch,
    launcher_place,
    left_behind,
    losses_of,
    marked,
    write_job,
)
from tests.dist.ssh_hosts import ADDRESSES, ssh_hosts

# Engine, and whether the ranks are on two hosts. Slurm has no other way.
PLACES = [(engine, far) for engine in ("deepspeed", "torchrun", "mpirun") for far in (False, True)]
PLACES.append(("slurm", True))
_STARTED_SECONDS = 120.0
_STEPS = ["--steps", "1000", "--save-every", "1000", "--step-seconds", "0.1"]


def leave_when_told(folder: Path, engine: str, far: bool, seed: int) -> dict[str, Any]:
    """SIGTERM to the launcher while steps are made: status 75, and the last completed step is saved."""
    draw = random.Random(f"{seed} {engine} {far}")
    with _job(folder, engine, far) as (started, mark):
        _wait_for_steps(folder, started, draw.randint(1, 12))
        time.sleep(draw.random() * 0.4)
        at = time.monotonic()
        started.send_signal(signal.SIGTERM)
        status = started.wait(timeout=DEADLINE_SECONDS)
        seconds, left = time.monotonic() - at, left_behind(mark)
    last = max((row["step"] for row in losses_of(folder)), default=0)
    latest = folder / "out/checkpoints/latest"
    saved = int(latest.read_text().strip().removeprefix("global_step")) if latest.exists() else 0
    wrong = f"status {status}: {(folder / 'log').read_text()[-2000:]}" if status != 75 else ""
    wrong = wrong or (f"step {last} was done, step {saved} is saved" if saved != last else "")
    return {"seconds": round(seconds, 1), "step": last, "wrong": wrong or (f"left: {left}" if left else "")}


def kill_the_launcher(folder: Path, engine: str, far: bool, seed: int) -> dict[str, Any]:
    """SIGKILL to the launcher at any moment: nobody is left ten seconds later."""
    with _job(folder, engine, far) as (started, mark):
        time.sleep(random.Random(f"{seed} {engine} {far}").random() * 20)
        started.kill()
        started.wait()
        at = time.monotonic()
        left = left_behind(mark)
        seconds = time.monotonic() - at
    done = len(losses_of(folder))
    return {"seconds": round(seconds, 1), "step": done, "wrong": f"left behind: {left}" if left else ""}


@contextmanager
def _job(folder: Path, engine: str, far: bool) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A job of two ranks that would make 1000 steps, and its mark; ended at the end."""
    (folder / "out").mkdir(parents=True)
    mark = uuid.uuid4().hex
    ranks = (
        {"hosts": [{"name": name, "slots": 1} for name in ADDRESSES]}
        if far
        else {"hosts": "local", "slots": 2}
    )
    script_args = ["--output", str(folder / "out"), *_STEPS]
    write_job(folder, engine, ring=2, script_args=script_args, relaunch=None, **ranks)
    with _place(engine, far, mark) as place:
        started = launch(folder, place, [])
        try:
            yield started, mark
        finally:
            for process in [started, *marked(mark)]:
                process.kill()


@contextmanager
def _place(engine: str, far: bool, mark: str) -> Iterator[Place]:
    if not far:
        yield Place([], {**os.environ, MARK: mark})
    else:
        with ssh_hosts(f"{MARK}={mark}") as hosts, launcher_place(hosts, engine, mark) as place:
            yield place


def _wait_for_steps(folder: Path, started: subprocess.Popen[bytes], steps: int) -> None:
    deadline = time.monotonic() + _STARTED_SECONDS
    while len(losses_of(folder)) < steps and started.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
