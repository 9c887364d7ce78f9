"""Every command line of tests/cli_probes.py: typed, below a second of work, no traceback, no hang.

Most run in this process under a deadline, so that a probe costs milliseconds; what concerns the process
itself (its standard streams, its exit status) is started as one.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from ds_ring_launcher import cli
from tests.cli_probes import CLUSTER, Probe, base_of, cli_probes, parsers

WORK_SECONDS = 3.0  # of this process; a plan of 10^9 tokens takes 0.5 s on a quiet core, 1.0 s on a busy one
TRIES = 3  # what they do count can only add to a time
HANG_SECONDS = 30.0
MAX_LETTERS, MAX_LINES = 6000, 40
SAYS_SO = ("expected", "did you mean", "not JSON", "not YAML", "does not exist", "does not divide")


class Overdue(BaseException):
    """No `except Exception` stops it."""


def _overdue(number: int, frame: FrameType | None) -> None:
    raise Overdue


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, _overdue)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def faults_of(probe: Probe) -> list[str]:
    """What is wrong with the answer to a probe."""
    out, err = io.StringIO(), io.StringIO()
    began, status = time.process_time(), None
    try:
        with (
            deadline(HANG_SECONDS),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("error", RuntimeWarning)  # numpy's word for a figure that is none
            status = cli.main(probe.argv)
    except SystemExit as ended:  # argparse
        status = ended.code
    except Overdue:
        return [f"hangs: not done after {HANG_SECONDS} s"]
    except BaseException as error:
        return [f"a traceback: {type(error).__name__}: {error!s:.200}"]
    seconds, said = time.process_time() - began, err.getvalue()
    faults = [] if status in probe.statuses else [f"status {status}, expected {probe.statuses}"]
    faults += [f"took {seconds:.1f} s"] if seconds > WORK_SECONDS else []
    if status:
        faults += [] if said.startswith("ds-ring") and " error: " in said else ["no line that says error"]
        faults += [] if any(words in said for words in SAYS_SO) else [f"says nothing: {said[-200:]!r}"]
        faults += ["prints results as well"] if out.getvalue() else []
    if len(said) > MAX_LETTERS or said.count("\n") > MAX_LINES:
        faults.append(f"{len(said)} letters, {said.count(chr(10))} lines")
    faults += ["sends control characters"] if any(sign in said for sign in "\x1b\x00\r\x07") else []
    return faults


@pytest.mark.night
@pytest.mark.parametrize("third", range(3))
def test_every_probe_ends_typed_and_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, third: int) -> None:
    monkeypatch.setattr(cli, "_parser", functools.cache(cli._parser))  # of 1,600 calls, half of their time
    probes = cli_probes(tmp_path)
    assert len(probes) >= 300 and len({probe.argv[0] for probe in probes}) == len(cli.COMMANDS)
    for name in parsers():  # what a first call imports is no probe's fault
        faults_of(Probe("", [name, *base_of(name, tmp_path)]))
    probes = probes[third::3]
    assert len({probe.argv[0] for probe in probes}) == len(cli.COMMANDS)
    bad = {}
    for probe in probes:
        for _ in range(TRIES):
            found = faults_of(probe)
            if not any(fault.startswith("took ") for fault in found):
                break
        bad |= {probe.name: found} if found else {}
    assert not bad, f"{len(bad)} of {len(probes)}:\n" + "\n".join(
        f"{name:.90}: {found}" for name, found in bad.items()
    )


# Command lines that a shell runs; $0 is ds-ring.
PROCESSES = {
    "a reader that goes away": ("$0 plan --hf-config config.json --tokens 512 --devices 2 --hardware cpu"
                                " --dtype float32 | true; exit ${PIPESTATUS[0]}", (0, 1, 74), ""),
    "a full disk": ("$0 launch --dry-run cluster.yaml > /dev/full", (74,), "No space left on device"),
    "no stdout": ("$0 launch --dry-run cluster.yaml >&-", (0, 74), ""),
    "a FIFO, and bytes that are no text": ("mkfifo $'pipe\\xff' && $0 launch $'pipe\\xff'", (2,),
                                           "expected a regular file, got a pipe"),
    "no command": ("$0 --version && $0", (2,), "expected COMMAND, got none"),
}  # fmt: skip


@pytest.mark.day("a full disk", "no stdout")
@pytest.mark.parametrize("name", PROCESSES)
def test_a_process_ends_typed(tmp_path: Path, name: str) -> None:
    command, statuses, words = PROCESSES[name]
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    (tmp_path / "train.py").touch()
    section = {"sequence_parallel_size": 2, "ring_attention": {}}
    (tmp_path / "ds.json").write_text(json.dumps(section))
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    (tmp_path / "config.json").write_text(json.dumps(dict.fromkeys(sizes, 8)))
    own = tmp_path / "ds-ring"
    own.write_text(f'#!/bin/sh\nexec {sys.executable} -m ds_ring_launcher.cli "$@"\n')
    own.chmod(0o755)
    done = subprocess.run(["bash", "-c", command, str(own)], cwd=tmp_path, capture_output=True, timeout=120)
    said = done.stderr.decode(errors="replace")
    assert done.returncode in statuses and words in said, said
    assert "Traceback" not in said and "Exception ignored" not in said, said


# Words of a line, the last of which TAB completes, and what it becomes.
COMPLETED = {
    "ds-ring resize": "resize-checkpoint",
    "ds-ring plan --hardw": "--hardware",
    "ds-ring launch clus": "cluster.yaml",
    "ds-ring plan --tokens 64 --config ds": "ds.json",
    "ds-ring simulate --tokens 64 --layout x": "",
}


def test_bash_completes_what_the_printed_script_says(tmp_path: Path) -> None:
    for name in ("cluster.yaml", "ds.json"):
        (tmp_path / name).touch()
    complete = """
        eval "$("$0" -m ds_ring_launcher.cli --print-completion bash)"
        function=$(complete -p ds-ring | sed "s/.* -F \\([^ ]*\\) .*/\\1/")
        for line in "$@"; do
            COMP_WORDS=($line) COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
            $function ds-ring "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}" 2>/dev/null
            echo "${COMPREPLY[*]}"
        done"""
    done = subprocess.run(
        ["bash", "-c", complete, sys.executable, *COMPLETED],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.splitlines() == list(COMPLETED.values()), done.stderr
