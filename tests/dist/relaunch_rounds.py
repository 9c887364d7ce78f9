"""Rounds of the relaunch campaign: a job on two hosts, one fault, and what became of it.

Owns the job and the faults; `relaunch_train.py` is what the ranks run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from ds_ring_launcher.run.run_folder import RunFolder
from ds_ring_launcher.run.run_records import read_faults
from tests.dist.namespaces import ROOT, Hosts
from tests.dist.slurm_cluster import slurm_on
from tests.dist.ssh_hosts import ADDRESSES, SshHosts, ssh_hosts
from tests.machine import small_disk

STEPS, SAVE_EVERY, FAULT_STEP = 14, 2, 7
DEADLINE_SECONDS = 400.0
MARK = "DS_RING_TEST_MARK"
_DISK_BYTES = 6 << 20
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "steps_per_print": 1000000,
    "sequence_parallel_size": 4,
    "ring_attention": {"layout": "zigzag", "heartbeat_timeout_seconds": 5},
}
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
    hosts.signal(node, signal.SIGKILL)


def _stop_node(hosts: Hosts, folder: Path, node: int) -> None:
    hosts.signal(node, signal.SIGSTOP)


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
    "kill a rank": "kill", "stop a rank": "stop", "kill a node": _kill_node, "stop a node": _stop_node,
    "cut the link": _cut, "fill the disk": _fill_disk,
}  # fmt: skip


def uninterrupted(folder: Path, engine: str) -> dict[int, float]:
    """The losses of a run without a fault."""
    result = play_round(folder, None, 0, engine)
    assert result.status == 0, result.output
    return result.losses


def same_losses_by(engine: str, folder: Path) -> dict[int, float]:
    """The losses of a job that the launcher starts with this engine."""
    (folder / "out").mkdir(parents=True)
    # Where every host has its own call: a line more, and the port that all calls must know.
    apart = {"ssh": False, "master_port": 29411, "relaunch": None} if engine.endswith("ssh: false") else {}
    with ssh_hosts(f"{MARK}=engines") as hosts:
        write_job(folder, engine.split(",")[0], **apart)
        calls = [["--node-rank", "0"], ["--node-rank", "1"]] if apart else [[]]
        with launcher_place(hosts, engine.split(",")[0], "engines") as place:
            places = [replace(place, prefix=on_host(name)) for name in hosts.names] if apart else [place]
            started = [launch(folder, *both) for both in zip(places, calls, strict=True)]
            status = [process.wait(timeout=DEADLINE_SECONDS) for process in started]
    assert not any(status), (folder / "log").read_text()[-3000:]
    return {row["step"]: row["loss"] for row in losses_of(folder)}


@dataclass(frozen=True)
class Place:
    """Where the launcher is called: before its command line, and in which environment."""

    prefix: list[str]
    environment: dict[str, str]


@contextmanager
def launcher_place(hosts: SshHosts, engine: str, mark: str) -> Iterator[Place]:
    """On the login node; on the first host for mpirun, and for Slurm, in an allocation."""
    environment = {**os.environ, MARK: mark, "PATH": f"{hosts.programs}:{os.environ['PATH']}"}
    if engine == "slurm":
        with slurm_on(hosts) as slurm:
            environment |= slurm.environment | {"SLURM_JOB_ID": slurm.allocate()}
            yield Place(slurm.command(), environment)
    else:
        yield Place(on_host(hosts.names[0] if engine == "mpirun" else hosts.login), environment)


def on_host(name: str) -> list[str]:
    """What stands before a command line that is to run on a host."""
    return ["ip", "netns", "exec", name]


def launch(folder: Path, place: Place, arguments: list[str]) -> subprocess.Popen[bytes]:
    """Start the launcher on the job in `folder`; its output goes to `log` there."""
    command = [*place.prefix, sys.executable, "-m", "ds_ring_launcher.cli", "launch", "cluster.yaml"]
    with open(folder / "log", "a") as log:
        return subprocess.Popen(
            [*command, *arguments], env=place.environment, cwd=folder, stdout=log, stderr=subprocess.STDOUT
        )


def play_round(folder: Path, fault: str | None, number: int, engine: str) -> Round:
    """Run one job with one fault."""
    (folder / "out/checkpoints").mkdir(parents=True)
    mark = uuid.uuid4().hex
    with (
        small_disk(folder / "out/checkpoints", _DISK_BYTES),  # first: hosts see what is mounted before them
        ssh_hosts(f"{MARK}={mark}") as hosts,
        launcher_place(hosts, engine, mark) as place,
    ):
        write_job(folder, engine, FAULTS.get(fault or ""))
        started = launch(folder, place, [])
        try:
            node = 1 if number % 2 == 0 else 0  # that of rank 0, too
            at, saved = _strike(folder, hosts, fault, node, started)
            status = started.wait(timeout=DEADLINE_SECONDS)
            if fault == "stop a node":
                hosts.signal(node, signal.SIGCONT)  # it comes back after all
            left = left_behind(mark)
        finally:
            for process in [started, *marked(mark)]:
                process.kill()
        return _round(folder, status, at, saved, left)


def write_job(folder: Path, engine: str, act: object = None, ring: int = 4, **changed: Any) -> None:
    """Write the cluster YAML, with some lines changed, and the DeepSpeed JSON."""
    (folder / "ds.json").write_text(json.dumps(CONFIG | {"sequence_parallel_size": ring}))
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
    (folder / "cluster.yaml").write_text(json.dumps(lines | changed))  # JSON is YAML


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
    _wait(started, lambda: len(losses_of(folder)) >= FAULT_STEP)
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


def losses_of(folder: Path) -> list[dict[str, Any]]:
    """The lines that rank 0 has written, a step each."""
    path = folder / "out/losses.jsonl"
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""  # the last line may be half there
    return [json.loads(line) for line in whole.splitlines()]


def _round(folder: Path, status: int, at: float, saved: str, left: list[str]) -> Round:
    rows, events = losses_of(folder), RunFolder(folder / "run").events()
    result = Round(
        status, (folder / "log").read_text(), {row["step"]: row["loss"] for row in rows}, [], left=left
    )
    result.world_sizes = [event["world_size"] for event in events if event["event"] == "start"]
    ends = [event for event in events if event["event"] == "end"]
    starts = [event for event in events if event["event"] == "start"]
    result.culprit = next((event["what"] for event in events if event["event"] == "fault"), "")
    result.said = [
        f"{fault.rank}: {fault.type}: {fault.message[:150]}"
        for fault in read_faults(folder / "run/attempt-1")
    ]
    if len(starts) > 1:
        after = [row["at"] for row in rows if row["at"] > starts[1]["at"]]
        result.seconds = {"ended": ends[0]["at"] - at, "started again": starts[1]["at"] - at}
        result.seconds |= {"next step": after[0] - at} if after else {}
        result.saved = saved
        result.resumed_from = starts[1]["checkpoint"]
    return result


def marked(mark: str) -> list[psutil.Process]:
    """The live processes of a job, on all hosts."""
    result = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                result.append(process)
        except (psutil.Error, OSError):
            continue
    return result


def left_behind(mark: str) -> list[str]:
    """The processes of a job that are there ten seconds later."""
    deadline = time.monotonic() + 10
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return [" ".join(process.cmdline())[:200] for process in left]
