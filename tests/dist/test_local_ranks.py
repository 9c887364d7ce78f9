"""Ranks of this machine that a command starts: none outlives a failure, or the command itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from ds_ring.errors import RingError, RingShapeError
from ds_ring_launcher.run.local_ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]


def own_processes() -> set[int]:
    """What this process has started, or its children have."""
    return {
        child.pid
        for child in psutil.Process().children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE
    }


def wait_until_gone(before: set[int], seconds: float = 10.0) -> None:
    """The ranks' watch ends by itself when they have; torch's resource tracker belongs to this process."""
    deadline = time.monotonic() + seconds
    while (left := _ranks(own_processes() - before)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def _ranks(pids: set[int]) -> list[str]:
    result = []
    for pid in pids:
        try:
            line = " ".join(psutil.Process(pid).cmdline())
        except psutil.Error:
            continue
        if "resource_tracker" not in line:
            result.append(line)
    return result


def failing() -> None:
    if dist.get_rank() == 1:
        raise RingShapeError("expected this, got that; do something")
    time.sleep(600)


ORPHANS = """
from pathlib import Path
from ds_ring_launcher.run.local_ranks import run_ranks
from tests.dist.test_local_ranks import noting
if __name__ == "__main__":
    run_ranks(noting, 2, ({folder!r},), threads=1, deadline_s=600)
"""


def noting(folder: str) -> None:
    Path(folder, str(os.getpid())).touch()
    time.sleep(600)


@pytest.mark.night
def test_no_rank_outlives_a_killed_command(tmp_path: Path) -> None:
    """Not even where SIGINT is ignored, as in a background job of a shell."""
    script = tmp_path / "command.py"
    script.write_text(ORPHANS.format(folder=str(tmp_path / "ranks")))
    (tmp_path / "ranks").mkdir()
    command = subprocess.Popen(
        [sys.executable, str(script)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    try:
        deadline = time.monotonic() + 90
        while len(ranks := list((tmp_path / "ranks").iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.2)
        assert len(ranks) == 2
    finally:
        command.kill()
        command.wait()
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(int(path.name)) for path in ranks) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(psutil.pid_exists(int(path.name)) for path in ranks)


@pytest.mark.night  # by day tests/unit/launcher/test_local_ranks.py starts such ranks
def test_no_rank_outlives_a_failure() -> None:
    before, ticks = own_processes(), []
    began = time.monotonic()
    with pytest.raises(RingError) as caught:
        run_ranks(failing, 2, (), threads=1, deadline_s=60, waiting=lambda: ticks.append(1))
    assert "rank 1: expected this, got that" in str(caught.value) and ticks
    assert time.monotonic() - began < 55
    wait_until_gone(before)
    assert os.getpid() not in before
