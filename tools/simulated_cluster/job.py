"""Run one job on pretended hosts: start it, let one fault happen, see what becomes of it, leave nothing.

Owns the processes and the moments; what they must be is the tool's.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from ds_ring_launcher.run.parent import end_with_parent
from ds_ring_launcher.run.process import marked
from ds_ring_launcher.run.run_folder import RunFolder
from simulated_cluster.figures import Figures, Of
from simulated_cluster.hosts import write_ssh

TOOLS = Path(__file__).resolve().parents[1]
FAULTS = ("kill", "stop", "bug", "host")
MARK = "DS_RING_SIMULATION"
_LOOK_SECONDS = 0.02
_SETTLE_SECONDS = 0.5  # of work before the fault


class SimulationError(Exception):
    """Report that a job did not get as far as it should have; the message has its last state and output."""


class FalseAlarmError(SimulationError):
    """Report that the monitor found a fault before there was one."""


@dataclass(frozen=True)
class ClusterSetting:
    """Describe the simulation: `slots` ranks on each host, a heartbeat timeout and a deadline in seconds."""

    ranks: int
    hosts: int
    heartbeat_s: float
    deadline_s: float
    quiet_s: float = _SETTLE_SECONDS  # of work before the fault, and after the ranks have started again
    busy: int = 0  # processes that do nothing but compute, beside the job

    @property
    def slots(self) -> int:
        return self.ranks // self.hosts

    @property
    def names(self) -> list[str]:
        return [f"127.{host // 250}.{host % 250}.2" for host in range(self.hosts)]


@dataclass
class Story:
    """Hold what became of a job. Times are seconds since 1970."""

    started: float  # when the launcher was
    struck: float = 0.0  # when the fault happened in the first attempt
    culprits: tuple[int, ...] = ()
    attempts: list[Figures] = field(default_factory=list)  # the numbers of the ranks of each
    events: list[dict[str, Any]] = field(default_factory=list)  # lines of attempts.jsonl
    quiet_s: float = 0.0  # all ranks worked and nothing was wrong
    status: int | None = None  # of the launcher
    # command lines of processes that were there ten seconds after its end
    left: list[str] = field(default_factory=list)

    def event(self, kind: str, attempt: int) -> dict[str, Any]:
        """Return a line of attempts.jsonl; empty where there is none."""
        found = (one for one in self.events if (one["event"], one["attempt"]) == (kind, attempt))
        return next(found, {})


class _Job:
    """Drive one job from outside: its launcher is a process of its own."""

    def __init__(self, folder: Path, setting: ClusterSetting, launcher: subprocess.Popen[bytes]) -> None:
        self.folder, self.setting, self.launcher = folder, setting, launcher
        self.run = RunFolder(folder / "run")
        self.deadline = time.monotonic() + setting.deadline_s

    def await_(self, what: str, ready: Callable[[], bool]) -> None:
        """Wait until that is so.

        Raises:
            SimulationError: the launcher has ended, or the deadline is over.
        """
        while not ready():
            ended = self.launcher.poll()
            if (ended is not None and not ready()) or time.monotonic() > self.deadline:
                how = "at the deadline" if ended is None else f"when the launcher had ended with {ended}"
                raise SimulationError(f"expected {what}, got none {how}: {self.said()}")
            time.sleep(_LOOK_SECONDS)

    def joined(self, attempt: int) -> Figures:
        """Wait until all ranks of an attempt have joined."""
        path = self.folder / f"attempt-{attempt}.figures"
        self.await_(f"ranks of attempt {attempt}", path.exists)
        figures = Figures(path)

        def all_joined() -> bool:
            if figures.known(Of.TOLD) or self.ended(attempt):
                raise FalseAlarmError(f"while the ranks of attempt {attempt} join: {self.run.events()[-2:]}")
            return len(figures.known(Of.JOINED)) == figures.ranks

        self.await_(f"all {figures.ranks} ranks of attempt {attempt} to join", all_joined)
        return figures

    def ended(self, attempt: int) -> bool:
        """Return whether an attempt has failed or ended."""
        return any(one["attempt"] == attempt and one["event"] != "start" for one in self.run.events())

    def quiet(self, attempt: int, figures: Figures) -> float:
        """Let the ranks work; return for how long.

        Raises:
            FalseAlarmError: a rank was told of a fault, or the attempt has ended.
        """
        since = time.monotonic()
        while (lasted := time.monotonic() - since) < self.setting.quiet_s:
            if self.ended(attempt) or figures.known(Of.TOLD):
                blamed = figures.known(Of.BLAMED)
                raise FalseAlarmError(
                    f"attempt {attempt}: {blamed or self.run.events()[-1]} after {lasted:.1f} s"
                )
            time.sleep(min(10 * _LOOK_SECONDS, self.setting.quiet_s))
        return lasted

    def said(self) -> str:
        """Return the end of what the launcher and the ranks printed, and the end of rank 0."""
        ends = []
        for path in sorted(self.folder.glob("attempt-*.figures")):
            figures = Figures(path)
            status, joined = figures.known(Of.STATUS).get(0), len(figures.known(Of.JOINED))
            ends.append(f"{path.stem}: {joined} of {figures.ranks} joined, rank 0's status {status}")
        return f"{'; '.join(ends)}\n{(self.folder / 'log').read_text(errors='replace')[-3000:]}"


def play(folder: Path, setting: ClusterSetting, fault: str, store_port: int) -> Story:
    """Start a job, let the fault happen once all have joined, follow it until all have joined again.

    Args:
        folder: empty, for everything that is written.
        setting: of the cluster.
        fault: one of FAULTS; "bug" happens in each attempt.
        store_port: of a store on this machine, as `store.serve` makes it.

    Raises:
        SimulationError: the job stood still, or ended too early.
    """
    mark = uuid.uuid4().hex
    environment = {**os.environ, MARK: mark, "PYTHONPATH": str(TOOLS)}
    environment["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
    try:
        with helper("hosts", str(folder), environment=environment), _busy(setting.busy):
            ranks = tuple(range(setting.ranks))
            culprits = ranks[-setting.slots :] if fault == "host" else ranks[-setting.ranks // 3 :][:1]
            _write(folder, setting, store_port, culprits[0])
            story = Story(time.time(), culprits=culprits)
            with open(folder / "log", "wb") as log:
                launcher = subprocess.Popen(
                    [sys.executable, "-m", "simulated_cluster.launcher", str(folder / "cluster.yaml")],
                    env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True, preexec_fn=end_with_parent,
                )  # fmt: skip
            job = _Job(folder, setting, launcher)
            try:
                _follow(job, story, fault)
            finally:
                _end(launcher)
            story.events, story.status = job.run.events(), launcher.returncode
    finally:
        left = _end_marked(mark)
    story.left = left
    return story


def _follow(job: _Job, story: Story, fault: str) -> None:
    """Go through the attempts of a job."""
    for attempt in (1, 2):
        figures = job.joined(attempt)
        story.attempts.append(figures)
        story.quiet_s += job.quiet(attempt, figures)
        if attempt == 2 and fault != "bug":
            figures.order = "finish"
            break
        _strike(job, story, fault, figures)
        job.await_(
            f"the end of attempt {attempt}",
            lambda: any((one["event"], one["attempt"]) == ("end", attempt) for one in job.run.events()),  # noqa: B023
        )
    job.await_("the launcher's end", lambda: job.launcher.poll() is not None)


def _strike(job: _Job, story: Story, fault: str, figures: Figures) -> None:
    if fault == "bug":
        figures.order = "raise"
        culprit = story.culprits[0]
        job.await_("the bug", lambda: culprit in figures.known(Of.RAISED))
        story.struck = story.struck or figures.known(Of.RAISED)[culprit]
        return
    if fault == "host":
        (job.folder / f"gone-{job.setting.names[-1]}").touch()
    pids = figures.known(Of.PID)
    story.struck = time.time()
    for culprit in story.culprits:
        os.kill(int(pids[culprit]), signal.SIGSTOP if fault == "stop" else signal.SIGKILL)


def _write(folder: Path, setting: ClusterSetting, store_port: int, culprit: int) -> None:
    write_ssh(folder / "ssh", folder)
    config = {"train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": setting.ranks}
    (folder / "ds.json").write_text(json.dumps({**config, "ring_attention": {}}))
    arguments = ["--figures", str(folder), "--store-port", store_port, "--culprit", culprit]
    lines = {
        "engine": "mpirun",
        "device": "cpu",
        "hosts": [{"name": name, "slots": setting.slots} for name in setting.names],
        "script": str(Path(__file__).with_name("rank_script.py")),
        "deepspeed_config": "ds.json",
        "script_args": [*arguments, "--heartbeat-seconds", setting.heartbeat_s],
        "environment": {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"},
        "run_folder": "run",
        "relaunch": {"checkpoints": "checkpoints", "backoff_seconds": 0},
    }
    (folder / "cluster.yaml").write_text(json.dumps(lines))  # JSON is YAML


@contextmanager
def helper(module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """Run a module of this folder; give the line that it prints when it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", f"simulated_cluster.{module}", *arguments], env=environment, cwd=TOOLS,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=end_with_parent,
    )  # fmt: skip
    assert process.stdout is not None and process.stdin is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stdin.close()


@contextmanager
def _busy(count: int) -> Iterator[None]:
    """Keep so many processes computing."""
    command = [sys.executable, "-IS", "-c", "while True: pass"]
    processes = [subprocess.Popen(command, preexec_fn=end_with_parent) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """End a launcher that is still there as a user would; it ends its run."""
    if launcher.poll() is None:
        launcher.terminate()
        try:
            launcher.wait(timeout=30)
        except subprocess.TimeoutExpired:
            launcher.kill()
            launcher.wait()


def _end_marked(mark: str) -> list[str]:
    """Kill all processes of a run after ten seconds; return its command lines."""
    deadline = time.monotonic() + 10
    while (left := marked(mark, variable=MARK)) and time.monotonic() < deadline:
        time.sleep(0.2)
    said = []
    for process in left:
        try:
            said.append(" ".join(process.cmdline())[:200])
            process.kill()
        except psutil.Error:
            continue
    return said
