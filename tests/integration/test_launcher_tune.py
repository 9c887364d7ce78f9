"""`ds-ring tune` up to the first rank: wrong input is one sentence and exit status 2; nothing is started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from ds_ring_launcher import cli

SHAPES = ["--tokens", "4k", "--heads", "4", "--head-dim", "64"]
# Its ranks import this file first: nothing heavy stands at its head.
PARENT = """
import time

if __name__ == "__main__":
    from ds_ring_launcher.run.local_ranks import run_ranks

    run_ranks(time.sleep, 2, (600.0,), threads=1, deadline_s=600)
"""
TUNE = ["tune", *SHAPES, "--processes", "2"]


def test_a_json_whose_sequences_do_not_fit_the_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"sequence_parallel_size": 3, "ring_attention": {}}))
    assert cli.main([*TUNE, "--config", str(path)]) == 2
    assert "sequence_parallel_size 3 does not divide world size 2" in capsys.readouterr().err


@pytest.mark.parametrize("left_out", ["--tokens", "--heads", "--head-dim", "--processes"])
def test_what_is_missing_is_named(capsys: pytest.CaptureFixture[str], left_out: str) -> None:
    where = TUNE.index(left_out)
    with pytest.raises(SystemExit) as caught:
        cli.main(TUNE[:where] + TUNE[where + 2 :])
    assert caught.value.code == 2 and left_out in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
@pytest.mark.day("15")  # by SIGKILL a job's ranks do, too: test_launch.py
def test_ranks_end_with_their_parent(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    # Not even where SIGINT is ignored, as in a background job of a shell, does a rank go on.
    handler = signal.default_int_handler if number == signal.SIGINT else signal.SIG_IGN
    parent = subprocess.Popen(
        [sys.executable, str(script)], preexec_fn=lambda: signal.signal(signal.SIGINT, handler)
    )
    try:
        ranks = _ranks_of(parent)
        parent.send_signal(number)
        parent.wait(20)
    finally:
        parent.kill()
    assert not psutil.wait_procs(ranks, timeout=20)[1]


@pytest.mark.slow
@pytest.mark.night
def test_ctrl_c_while_ranks_import() -> None:
    """The terminal sends it to every process: one line, no rank's traceback, nobody left."""
    command = subprocess.Popen(
        [sys.executable, "-m", "ds_ring_launcher.cli", *TUNE],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_hears_ctrl_c,
    )
    try:
        ranks = _ranks_of(command)
        time.sleep(1)  # they import torch then, which takes longer
        os.killpg(command.pid, signal.SIGINT)
        printed, said = command.communicate(timeout=60)
    finally:
        command.kill()
    assert (command.returncode, printed, said) == (130, "", "ds-ring: interrupted\n")
    assert not psutil.wait_procs(ranks, timeout=20)[1]


def test_ctrl_c_while_the_command_imports() -> None:
    code = """
import os, signal, sys
from ds_ring_launcher import cli
class Interrupt:  # in the middle of `import torch`
    def find_spec(self, name, path=None, target=None):
        if name.startswith("torch."):
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
sys.exit(cli.main(sys.argv[1:]))
"""
    ended = subprocess.run(
        [sys.executable, "-c", code, *TUNE],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=_hears_ctrl_c,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "ds-ring: interrupted\n")


def _hears_ctrl_c() -> None:
    """In the background of a shell it is ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _ranks_of(parent: subprocess.Popen[Any]) -> list[psutil.Process]:
    """Two, and a resource tracker, as soon as they have been started."""
    deadline = time.monotonic() + 120
    while len(ranks := psutil.Process(parent.pid).children(recursive=True)) < 3:
        assert time.monotonic() < deadline and parent.poll() is None
        time.sleep(0.05)
    return ranks
