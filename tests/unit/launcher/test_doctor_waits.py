"""What doctor does where nobody answers, and where it is interrupted."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from dataclasses import replace
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_ring_launcher.cluster.checks import choose_free_port
from ds_ring_launcher.cluster.cluster_file import read_cluster
from ds_ring_launcher.doctor import findings, hosts, probe
from ds_ring_launcher.run.job import Job


def test_a_stranger_at_the_port_that_says_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_IMPORT_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        job = SimpleNamespace(master_address="127.0.0.1", port=silent.getsockname()[1], node_rank=1)
        with pytest.raises(RuntimeError, match="something else is there, which says nothing"):
            hosts._store(job, 0.1)


ON_EACH_HOST = """\
hosts: [{{name: node-0, slots: 1}}, {{name: node-1, slots: 2}}]
ssh: false
master_address: 127.0.0.1
master_port: {port}
environment: {{TOKEN: secret}}
script: train.py
deepspeed_config: ds.json
run_folder: run
"""


@pytest.fixture
def jobs(tmp_path: Path) -> list[Job]:
    """The calls of two hosts that share a folder, at a port of this machine."""
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    path = tmp_path / "cluster.yaml"
    path.write_text(ON_EACH_HOST.format(port=choose_free_port()))
    cluster = read_cluster(path)
    assert cluster.master_port is not None
    return [Job(cluster, rank, cluster.master_port, tmp_path, {}) for rank in (0, 1)]


def test_hosts_that_meet_see_each_others_answers_and_marks(jobs: list[Job], tmp_path: Path) -> None:
    with ThreadPool(2) as pool:
        answers = pool.map(partial(hosts.ask, seconds=20), jobs)
    for answer in answers:
        assert answer.missing == {} and sorted(answer.answers) == ["node-0", "node-1"]
        assert answer.seen == {name: {str(tmp_path / "run"): [0, 1]} for name in ("node-0", "node-1")}
        assert answer.answers["node-0"]["port_holder"] is None
        assert answer.answers["node-1"]["way"]["address"] == "127.0.0.1"
        for host in answer.answers.values():
            assert host["config"] == {"zero_optimization.stage": "1"} and host["files"] == {"script": None}
            assert "secret" not in str(host["cluster"]) and len(host["cluster"]["environment.TOKEN"]) == 12
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize(
    ("rank", "missing"),
    [
        (0, {"node-1": "did not come to 127.0.0.1, port {port}"}),
        (1, {"node-0": "the meeting with it at 127.0.0.1, port {port} failed: "}),
    ],
)
def test_a_host_that_does_not_come_is_missing(jobs: list[Job], rank: int, missing: dict[str, str]) -> None:
    answer = hosts.ask(jobs[rank], 0.3)
    (name, words), *more = missing.items()
    assert not more and answer.missing.keys() == {name}
    assert answer.missing[name].startswith(words.format(port=jobs[0].port))
    assert list(answer.answers) == [f"node-{rank}"]


def test_hosts_that_ssh_reaches_are_asked(
    jobs: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ssh` is a script: it runs the real probes, and of node-2 says that there is no such host."""
    command = 'for word; do last="$word"; done; exec sh -c "$last"'
    lost = 'case "$*" in *node-2*) echo "ssh: no such host" >&2; exit 255;; esac; '
    (tmp_path / "ssh").write_text(f"#!/bin/sh\n{lost}{command}\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    text = ON_EACH_HOST.format(port=jobs[0].port).replace("ssh: false", "ssh: true")
    path = tmp_path / "cluster.yaml"
    path.write_text(text.replace("slots: 2}", "slots: 2}, {name: node-2, slots: 1}"))
    answer = hosts.ask(replace(jobs[0], cluster=read_cluster(path)), 40)
    assert sorted(answer.answers) == ["node-0", "node-1"]
    assert answer.missing.keys() == {"node-2"} and "ssh: no such host" in answer.missing["node-2"]
    assert answer.ways == dict.fromkeys(("node-0", "node-1"), ("127.0.0.1", "lo"))
    assert answer.seen == {name: {str(tmp_path / "run"): [0, 1]} for name in ("node-0", "node-1")}
    assert list((tmp_path / "run").iterdir()) == []


def test_files_that_cannot_be_read_have_no_values(tmp_path: Path) -> None:
    assert probe._flat(str(tmp_path / "none.json")) is None and probe._digest(tmp_path) is None
    (tmp_path / "bad.json").write_text("{")
    assert probe._flat(str(tmp_path / "bad.json")) is None


def test_what_the_doctor_runs_is_waited_for_and_ended_at_the_deadline() -> None:
    both = ["sh", "-c", "echo 1; echo 2 >&2; exit 3"]
    assert findings._run(both, dict(os.environ), 20) == (3, ["1"], ["2"])
    assert findings._run(["sh", "-c", "echo 1; exec sleep 60"], dict(os.environ), 0.3) == (None, ["1"], [])


@pytest.mark.parametrize(
    ("result", "says"),
    [
        ((1, [], ["a line", "ds-ring: error: why", "ds-ring: error: why", "the end"]),
            "the ring test failed, it ended with status 1: ds-ring: error: why"),
        ((None, [], ["1", "2", " 3", "", "4"]),
            "the ring test failed, it did not end within 5 s and was ended: 2 / 3 / 4"),
        ((2, [], [""]), "the ring test failed, it ended with status 2: it said nothing"),
        ((0, [], []), "rank 0's host has the findings"),
    ],
    ids=["an error", "a deadline", "silence", "of another host"],
)  # fmt: skip
def test_a_ring_test_that_fails_says_why(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch, result: Any, says: str
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(findings, "_run", lambda command, *_: commands.append(command) or result)
    (finding,) = findings.ring_findings(jobs[1], [], 5)
    assert finding.says == says and commands[0][-2:] == ["--node-rank", "1"]
    told = read_cluster(Path(commands[0][-3]))
    assert told.script == findings.SELF_TEST and told.hosts == jobs[1].cluster.hosts
    assert told.environment == {"KINETO_LOG_LEVEL": "99", "TOKEN": "secret"}
    assert told.run_folder == jobs[1].cluster.run_folder / "doctor"
    assert (told.ssh, told.master_address, told.master_port) == (False, "127.0.0.1", jobs[1].port)


def test_this_machine_has_a_ring_of_two(tmp_path: Path) -> None:
    cluster = read_cluster(findings.own_machine(tmp_path))
    assert cluster.is_local and cluster.world_size == 2 and cluster.device == "cpu"
    settings = findings._describe_self_test(Job(cluster, 0, 20001, tmp_path, {}))
    assert (settings["hosts"], settings["slots"]) == ("local", 2)


def test_an_interrupt_ends_the_command_that_doctor_runs(tmp_path: Path) -> None:
    started = tmp_path / "started"

    def interrupt() -> None:
        for _ in range(3000):
            if started.exists() and started.read_text().endswith("\n"):
                os.kill(os.getpid(), signal.SIGINT)
                return
            time.sleep(0.01)

    sender = threading.Thread(target=interrupt)
    command = ["sh", "-c", f"echo $$ > '{started}'; exec sleep 60"]
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # workers of xdist ignore it
    try:
        sender.start()
        with pytest.raises(KeyboardInterrupt) as raised:
            findings._run(command, {"PATH": "/usr/bin:/bin"}, 50)
    finally:
        signal.signal(signal.SIGINT, usual)
        sender.join()
    _, status = os.waitpid(int(started.read_text()), 0)
    assert os.WTERMSIG(status) == signal.SIGTERM, raised  # its traceback keeps the process for waitpid
