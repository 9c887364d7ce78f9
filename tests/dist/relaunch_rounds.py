"""Rounds of the relaunch campaign: a job on two hosts, one fault, and what became of it.

Owns the hosts, the stand-in for ssh and the faults; `relaunch_train.py` is what the ranks run.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from ds_ring_launcher.run_folder import RunFolder, faults_of
from tests.dist.namespaces import ROOT, Hosts, two_hosts
from tests.machine import small_disk

STEPS, SAVE_EVERY, FAULT_STEP = 14, 2, 7
DEADLINE_SECONDS = 400.0
ADDRESSES = ("10.231.0.1", "10.231.0.2")
_MARK = "DS_RING_TEST_MARK"
_DISK_BYTES = 6 << 20
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "steps_per_print": 1000000,
    "sequence_parallel_size": 4,
    "ring_attention": {"layout": "zigzag", "heartbeat_timeout_seconds": 5},
}
_SSH = """#!/bin/bash
while [[ $1 == -* ]]; do [[ $1 == -[po] ]] && shift; shift; done
host=$1; shift
[[ -e {folder}/gone-$host ]] && {{ echo "ssh: connect to host $host: No route to host" >&2; exit 255; }}
[[ -e {folder}/stopped-$host ]] && exec sleep 60
declare -A names=([{first}]={first_name} [{second}]={second_name})
kept=(PATH="$PATH" HOME="$HOME" PYTHONPATH={root} {mark}="${mark}")
exec ip netns exec "${{names[$host]}}" env -i "${{kept[@]}}" bash -c "$*"
"""


# Starts a task for each line of SLURM_HOSTFILE on that host, with the variables that srun gives it.
_SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
mapfile -t hosts < "$SLURM_HOSTFILE"
for task in "${{!hosts[@]}}"; do
  variables=$(env -0 | grep -zE '^(DS_|MASTER_|OMP_)' | xargs -0 printf '%q ')
  variables+=" SLURM_PROCID=$task SLURM_LOCALID=$((task % 2)) SLURM_NODEID=$((task / 2))"
  variables+=" SLURM_NTASKS=${{#hosts[@]}} SLURM_STEP_TASKS_PER_NODE='2(x2)'"
  {folder}/bin/ssh "${{hosts[$task]}}" "cd $PWD; env $variables $(printf '%q ' "$@")" &
done
for job in $(jobs -p); do wait "$job" || status=$?; done
exit "${{status:-0}}"
"""
ENGINES = ("deepspeed", "torchrun", "mpirun", "slurm", "deepspeed, ssh: false")


@dataclass
class Round:
    """What became of one job.

    Attributes:
        status: of the launcher.
        losses: by step; a step that was run again has its last one.
        seconds: from the fault to the launcher's verdict, to the next attempt, to the next step.
        resumed_from, saved: the checkpoint that was taken, and the newest one that was there.
        culprit: the launcher's verdict; said: what the ranks wrote down.
        left: processes that were there after the end.
    """

    status: int
    output: str
    losses: dict[int, float]
    world_sizes: list[int]
    seconds: dict[str, float] = field(default_factory=dict)
    resumed_from: str | None = None
    saved: str | None = None
    culprit: str = ""
    said: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def wrong(self, expected: dict[int, float], tolerance: float) -> str:
        """Why this round is bad; "" if it is good."""
        if self.status:
            return f"status {self.status}: {self.output[-3000:]}"
        if set(self.losses) != set(expected):
            return f"steps {sorted(set(expected) - set(self.losses))} are missing"
        worst = max(abs(self.losses[step] - loss) for step, loss in expected.items())
        if worst > tolerance:
            return f"a loss differs by {worst:.1e}"
        if self.left:
            return f"left behind: {self.left}"
        if (self.resumed_from or "").removesuffix("-universal") != (self.saved or ""):
            return f"went on from {self.resumed_from}, and {self.saved} was there"
        return ""


def _kill_node(hosts: Hosts, folder: Path, node: int) -> None:
    (folder / f"gone-{ADDRESSES[node]}").touch()
    _signal_node(hosts, node, signal.SIGKILL)


def _stop_node(hosts: Hosts, folder: Path, node: int) -> None:
    (folder / f"stopped-{ADDRESSES[node]}").touch()
    _signal_node(hosts, node, signal.SIGSTOP)


def _signal_node(hosts: Hosts, node: int, number: signal.Signals) -> None:
    listed = subprocess.run(["ip", "netns", "pids", hosts.names[node]], capture_output=True, text=True)
    for pid in listed.stdout.split():
        try:
            os.kill(int(pid), number)
        except ProcessLookupError:
            continue


def _cut(hosts: Hosts, folder: Path, node: int) -> None:
    hosts.cut()


def _fill_disk(hosts: Hosts, folder: Path, node: int) -> None:
    with open(folder / "out/checkpoints/ballast", "wb", buffering=0) as file:
        try:
            while file.write(bytes(1 << 12)):
                pass
        except OSError:
            pass


# What the script does to itself, or what happens to a host once step FAULT_STEP is done.
FAULTS: dict[str, str | Callable[[Hosts, Path, int], None]] = {
    "kill a rank": "kill",
    "stop a rank": "stop",
    "kill a node": _kill_node,
    "stop a node": _stop_node,
    "cut the link": _cut,
    "fill the disk": _fill_disk,
}


def uninterrupted(folder: Path, engine: str) -> dict[int, float]:
    """The losses of a run without a fault."""
    found = play_round(folder, None, 0, engine)
    assert found.status == 0, found.output
    return found.losses


def same_losses_by(engine: str, folder: Path) -> dict[int, float]:
    """The losses of a job that the launcher, on the first host, starts with this engine."""
    folder.mkdir(parents=True)
    with two_hosts() as hosts:
        (folder / "out").mkdir()
        _write(folder, hosts, engine.split(",")[0], None)
        apart = engine.endswith("ssh: false")
        text = json.loads((folder / "cluster.yaml").read_text())
        if apart:  # its line of the YAML, and the port that all calls must know
            text |= {"ssh": False, "master_port": 29411, "relaunch": None}
        (folder / "cluster.yaml").write_text(json.dumps(text))
        calls = [["--node-rank", "0"], ["--node-rank", "1"]] if apart else [[]]
        started = [_on_host(hosts, number, folder, call) for number, call in enumerate(calls)]
        status = [process.wait(timeout=DEADLINE_SECONDS) for process in started]
    logs = "".join((folder / f"log{number}").read_text() for number in range(len(calls)))
    assert not any(status), logs[-3000:]
    return {row["step"]: row["loss"] for row in _losses(folder)}


def _on_host(hosts: Hosts, number: int, folder: Path, call: list[str]) -> subprocess.Popen[bytes]:
    command = ["ip", "netns", "exec", hosts.names[number]]
    command += [sys.executable, "-m", "ds_ring_launcher.cli", "launch", "cluster.yaml", *call]
    with open(folder / f"log{number}", "w") as log:
        return subprocess.Popen(
            command, env={**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}", _MARK: "engines"},
            cwd=folder, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip


def play_round(folder: Path, fault: str | None, number: int, engine: str) -> Round:
    """Run one job with one fault."""
    (folder / "out/checkpoints").mkdir(parents=True)
    mark = uuid.uuid4().hex
    with two_hosts() as hosts, small_disk(folder / "out/checkpoints", _DISK_BYTES):
        _write(folder, hosts, engine, fault)
        started = subprocess.Popen(
            [sys.executable, "-m", "ds_ring_launcher.cli", "launch", "cluster.yaml"],
            env={**os.environ, _MARK: mark, "PATH": f"{folder}/bin:{os.environ['PATH']}"},
            cwd=folder, stdout=open(folder / "log", "w"), stderr=subprocess.STDOUT,  # noqa: SIM115
        )  # fmt: skip
        try:
            node = 1 if number % 2 == 0 else 0  # that of rank 0, too
            at, saved = _strike(folder, hosts, fault, node, started)
            status = started.wait(timeout=DEADLINE_SECONDS)
            if fault == "stop a node":
                _signal_node(hosts, node, signal.SIGCONT)  # it comes back after all
            left = _left(mark)
        finally:
            for process in [started, *_marked(mark)]:
                process.kill()
        return _round(folder, status, at, saved, left)


def _write(folder: Path, hosts: Hosts, engine: str, fault: str | None) -> None:
    (folder / "bin").mkdir()
    names = {"first": ADDRESSES[0], "second": ADDRESSES[1]}
    names |= {"first_name": hosts.names[0], "second_name": hosts.names[1]}
    (folder / "bin/ssh").write_text(_SSH.format(folder=folder, root=ROOT, mark=_MARK, **names))
    (folder / "bin/srun").write_text(_SRUN.format(folder=folder))
    for name in ("ssh", "srun"):
        (folder / "bin" / name).chmod(stat.S_IRWXU)
    (folder / "ds.json").write_text(json.dumps(CONFIG))
    act = FAULTS.get(fault or "")
    arguments = ["--output", str(folder / "out"), "--steps", str(STEPS), "--save-every", str(SAVE_EVERY)]
    arguments += ["--fault-step", str(FAULT_STEP), "--step-seconds", "0.3"]
    arguments += ["--fault", act] if isinstance(act, str) else []
    if isinstance(act, str):
        (folder / "out/armed").touch()
    lines = {
        "engine": engine,
        "device": "cpu",
        "hosts": [{"name": address, "slots": 2} for address in ADDRESSES],
        "script": str(ROOT / "tests/dist/relaunch_train.py"),
        "deepspeed_config": "ds.json",
        "script_args": arguments,
        "run_folder": "run",
        "relaunch": {"checkpoints": "out/checkpoints", "host_seconds": 8},
    }
    (folder / "cluster.yaml").write_text(json.dumps(lines))  # JSON is YAML


def _strike(
    folder: Path, hosts: Hosts, fault: str | None, node: int, started: subprocess.Popen[bytes]
) -> tuple[float, str]:
    """Wait for the step, let the fault happen; return when, and the newest checkpoint then.

    A full disk is freed once it was noticed.
    """
    act, struck = FAULTS.get(fault or ""), folder / "out/struck"
    if act is None:
        return 0.0, ""
    if isinstance(act, str):
        _wait(started, struck.exists)
        return float(struck.read_text()), _latest(folder)
    _wait(started, lambda: len(_losses(folder)) >= FAULT_STEP)
    at, saved = time.time(), _latest(folder)
    act(hosts, folder, node)
    if fault == "fill the disk":
        _wait(started, lambda: any(event["event"] == "fault" for event in RunFolder(folder / "run").events()))
        (folder / "out/checkpoints/ballast").unlink()
    return at, saved


def _wait(started: subprocess.Popen[bytes], until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not until() and started.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)


def _latest(folder: Path) -> str:
    return (folder / "out/checkpoints/latest").read_text().strip()


def _losses(folder: Path) -> list[dict[str, Any]]:
    path = folder / "out/losses.jsonl"
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""  # the last line may be half there
    return [json.loads(line) for line in whole.splitlines()]


def _round(folder: Path, status: int, at: float, saved: str, left: list[str]) -> Round:
    rows, events = _losses(folder), RunFolder(folder / "run").events()
    found = Round(status, (folder / "log").read_text(), {row["step"]: row["loss"] for row in rows}, [], left=left)
    found.world_sizes = [event["world_size"] for event in events if event["event"] == "start"]
    ends = [event for event in events if event["event"] == "end"]
    starts = [event for event in events if event["event"] == "start"]
    found.culprit = next((event["what"] for event in events if event["event"] == "fault"), "")
    found.said = [f"{fault.rank}: {fault.type}: {fault.message[:150]}" for fault in faults_of(folder / "run/attempt-1")]
    if len(starts) > 1:
        after = [row["at"] for row in rows if row["at"] > starts[1]["at"]]
        found.seconds = {"ended": ends[0]["at"] - at, "started again": starts[1]["at"] - at}
        found.seconds |= {"next step": after[0] - at} if after else {}
        found.saved = saved
        found.resumed_from = starts[1]["checkpoint"]
    return found


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def _left(mark: str) -> list[str]:
    deadline = time.monotonic() + 10
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return [" ".join(process.cmdline())[:200] for process in left]
