"""Agents of hosts: what each is sent, what ends the others, what an agent refuses. `ssh` is a script."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest

from ds_ring_launcher.run import agent
from ds_ring_launcher.run.job import FOLDER, Invocation
from ds_ring_launcher.run.start import run_agents

REAL = 'for word; do command="$word"; done; exec sh -c "$command"'
FAKE = 'case "$*" in *node-1*) exit {status};; esac; read request; echo "$request" > request; {then}'


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the launch, with a script, and an `ssh` that `with_ssh` writes."""
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def with_ssh(place: Path, text: str) -> None:
    (place / "ssh").write_text(f"#!/bin/sh\n{text}\n")
    (place / "ssh").chmod(0o755)


def launch(place: Path, signals: list[int], **argv: list[str]) -> int:
    hosts = {
        name.replace("_", "-"): Invocation(words, {"A": "b"}, {FOLDER / "hosts": "node-0"})
        for name, words in argv.items()
    }
    return run_agents(hosts, None, str(place / "train.py"), signals, grace_seconds=5.0)


def test_a_host_whose_part_fails_ends_the_others(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with_ssh(place, REAL)
    started, script = place / "started", "test $A = b && test $(cat {folder}/hosts) = node-0 && exit 7"
    wait = f"while ! test -e {started}; do sleep 0.02; done; "
    status = launch(
        place, [],
        node_0=["sh", "-c", f"touch {started}; exec sleep 60"],
        node_1=["sh", "-c", wait + script.format(folder=FOLDER)],
    )  # fmt: skip
    assert status == 7
    assert "ds-ring: error: node-1: ssh ended with status 7: its part failed" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("status", "signals", "expected", "says"),
    [
        (0, [], 0, ""),
        (
            255,
            [],
            255,
            "node-1: ssh ended with status 255: could not reach it, or lost it; ending the others",
        ),
        (0, [15], 143, "got signal 15; ending all processes of this run on all hosts"),
    ],
    ids=["done", "lost", "a signal"],
)
def test_agents_end_together(
    place: Path, capfd: pytest.CaptureFixture[str], status: int, signals: list[int], expected: int, says: str
) -> None:
    then = "cat > end" if expected else "exit 0"
    with_ssh(place, FAKE.format(status=status, then=then))
    assert launch(place, signals, node_0=["python", "x"], node_1=["python", "y"]) == expected
    assert says in capfd.readouterr().err
    request = json.loads((place / "request").read_text())
    assert (request["argv"], request["environment"]) == (["python", "x"], {"A": "b"})
    assert request["files"] == {str(FOLDER / "hosts"): "node-0"}
    assert (request["directory"], request["script"]) == (str(place), str(place / "train.py"))
    assert (request["grace_seconds"], request["end_signal"], request["unset"]) == (5.0, None, [])
    if expected:
        assert (place / "end").read_text().split("\n")[0] == ("end" if signals else "end after a fault")


@pytest.mark.parametrize(
    ("request_line", "says"),
    [
        ("hello", "expected a request from ds-ring, got none; `ds-ring launch` starts this by itself"),
        ('{"directory": "/no/such"}', "expected the launcher's folder on this host, too: "),
        ('{"directory": ".", "script": "no.py"}', "script: expected a Python file, got no no.py; copy it"),
    ],
    ids=["a person", "no folder", "no script"],
)
def test_an_agent_refuses(
    place: Path, capsys: pytest.CaptureFixture[str], request_line: str, says: str
) -> None:
    assert agent.main(io.StringIO(request_line)) == 2
    assert f"ds-ring: error: {os.uname().nodename}: {says}" in capsys.readouterr().err
