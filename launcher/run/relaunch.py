"""Run a job until it is done, starting it again after faults on the hosts that are left.

Each attempt is a launch of its own: a process group with a new store, a new secret, a folder for its logs.
attempts.py decides whether there is another one, presence.py finds who is there, ring_sizes.py chooses the
ring. An engine's own restarts (torchrun's) are not used: they know neither checkpoints nor rings, and do not
exist under the other engines.

[Note: a rank that was taken for lost]
A rank that was stopped or cut off may wake up while a newer attempt trains. It cannot join: the store and the
secret are new. It cannot save: the newer attempt has put its own lock into the folder ([Note: fencing] in
lock.py).
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ds_ring.errors import RingConfigError, RingError

from ..cluster import ports, secret
from ..cluster.cluster import Cluster
from ..status.keeper import page_kept
from .attempts import Decision, Outcome, culprit_event, decide, outcome_of
from .job import Job
from .marked import POLL_SECONDS
from .presence import Presence, address_of_master, find_hosts
from .process import say, signals_noted
from .ring_sizes import hosts_for, read_config, ring_for, write_config
from .run_folder import CONFIG, PREEMPTED, RunFolder
from .start import start

HOSTS_MISSING = 69  # sysexits.h's EX_UNAVAILABLE
_OPTIMIZER = re.compile(r"zero_pp_rank_(\d+)_mp_rank_\d+_optim_states\.pt$")
_CONVERT_SECONDS = 3600
_HOST_SECONDS = 10.0  # without relaunch, too


class HostsMissing(RingError, RuntimeError):
    """Hosts of the YAML do not answer, or do not reach the master; the message names each, and why."""

    exit_status = HOSTS_MISSING


def run(job: Job) -> int:
    """Run the attempts of a job whose YAML names a run_folder; return the last one's exit status.

    Raises:
        HostsMissing: at the first attempt a host is not there.
    """
    assert job.cluster.run_folder is not None
    with signals_noted() as signals, page_kept(job.cluster.run_folder):
        return _Run(job, signals).until_done()


class _Run:
    def __init__(self, job: Job, signals: list[int]) -> None:
        assert job.cluster.run_folder is not None
        self.job, self.signals, self.policy = job, signals, job.cluster.relaunch
        self.folder = RunFolder(job.cluster.run_folder)
        self.history: list[Outcome] = []
        self.number = 0

    def until_done(self) -> int:
        while True:
            self.number = self.folder.start_attempt()
            outcome = self._attempt()
            self.history.append(outcome)
            decision = decide(self.history, self.policy)
            self._report(outcome, decision)
            if not decision.again:
                return decision.status
            self._pause(decision.wait_seconds)
            if self.signals:
                return 128 + self.signals[0]

    def _attempt(self) -> Outcome:
        """Make one attempt with the hosts that are there."""
        presence = self._presence()
        before = newest_checkpoint(self._checkpoints)
        try:
            job = self._job_for(presence)
        except RingError as error:
            if not self.history:
                raise
            say(f"error: {error}")
            return Outcome(self.number, HOSTS_MISSING, self._signal, False, False, None)
        if before is not None and self._checkpoints is not None:
            before = self._converted(job.cluster.world_size) or before
        self.folder.record(
            "start", self.number, engine=job.cluster.engine, world_size=job.cluster.world_size,
            hosts={host.name: host.slots for host in job.cluster.hosts}, missing=presence.missing,
            sequence_parallel_size=read_config(job.cluster.deepspeed_config).get("sequence_parallel_size", 1),
            checkpoint=None if before is None else before[0], interfaces=presence.interfaces,
            checkpoints=None if self._checkpoints is None else str(self._checkpoints),
        )  # fmt: skip
        status = start(job, self.signals) if not self.signals else 128 + self.signals[0]
        progressed = newest_checkpoint(self._checkpoints) != before
        attempt_folder = self.folder.attempt(self.number)
        return outcome_of(self.number, attempt_folder, job.cluster.hosts, status, self._signal, progressed)

    def _presence(self) -> Presence:
        """Return who is there; wait for the others as long as the YAML says."""
        cluster, policy = self.job.cluster, self.policy
        seconds = _HOST_SECONDS if policy is None else policy.host_seconds
        deadline = time.monotonic() + (0.0 if policy is None else policy.wait_for_hosts_seconds)
        while True:
            presence = find_hosts(cluster, seconds)
            if not presence.missing or time.monotonic() >= deadline or self.signals:
                return presence
            self._pause(1.0)

    def _job_for(self, presence: Presence) -> Job:
        """Return the job for the hosts that are there, with a smaller ring if they are fewer."""
        cluster, attempt = self.job.cluster, self.folder.attempt(self.number)
        if presence.missing:
            names = "; ".join(f"{name}: {why}" for name, why in presence.missing.items())
            if not self.history or not presence.hosts:
                raise HostsMissing(
                    f"hosts: expected all {len(cluster.hosts)} to answer and to reach the first one, got"
                    f" {len(presence.missing)} that did not: {names}; start them, or leave them out"
                )
            say(f"going on without {names}")
            cluster = self._smaller(cluster, presence, attempt)
        port = self.job.port if not self.history else cluster.master_port or ports.choose_free_port()
        # A new secret, so that a rank of an older attempt that wakes up again is a stranger.
        told = secret.secret_for(cluster) if self.history else self.job.secret
        return replace(self.job, cluster=cluster, port=port, secret=told, attempt_folder=attempt)

    def _smaller(self, cluster: Cluster, presence: Presence, attempt: Path) -> Cluster:
        slots = sum(host.slots for host in presence.hosts)
        smallest = 1 if self.policy is None else self.policy.smallest_ring_size
        config = read_config(cluster.deepspeed_config)
        ring = ring_for(config, cluster.world_size, slots, smallest)
        if ring is None:
            raise RingConfigError(
                f"relaunch: expected a ring of at least {smallest} ranks (smallest_ring_size) on {slots}"
                " slots that keeps the samples of a step, got none; bring hosts back, or allow a smaller one"
            )
        hosts = hosts_for(presence.hosts, ring.world_size)
        say(f"{ring.world_size} ranks are left, {ring.sequence_size} of which share a sequence")
        path = attempt / CONFIG
        write_config(path, ring.config)
        changed = {
            "hosts": hosts,
            "deepspeed_config": path,
            "master_address": address_of_master(cluster, hosts[0].name),
        }
        return cluster.model_copy(update=changed)

    def _converted(self, world_size: int) -> tuple[str, int] | None:
        """Convert the newest whole checkpoint where it is one of another number of ranks."""
        folder = self._checkpoints
        newest = newest_checkpoint(folder)
        if folder is None or newest is None or ranks_of(folder / newest[0]) in (0, world_size):
            return newest
        say(f"converting {newest[0]} for {world_size} ranks")
        command = [
            sys.executable,
            "-m",
            "ds_ring_launcher.run.convert_checkpoint",
            str(folder),
            str(world_size),
        ]
        command.append(str(self.folder.attempt(self.number)))
        environment = {**self.job.caller_environment, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_CONVERT_SECONDS
        )
        if done.returncode:
            say(f"error: {newest[0]} could not be converted: {done.stderr.strip()[-800:]}")
        return newest_checkpoint(folder)

    def _report(self, outcome: Outcome, decision: Decision) -> None:
        """Write the attempt's end down, and say it; at the last end the culprit's traceback comes first."""
        if outcome.culprit is not None:
            self.folder.record("fault", self.number, **culprit_event(outcome.culprit))
        self.folder.record(
            "end", self.number, status=outcome.status, verdict=outcome.verdict, why=decision.why,
            next="again" if decision.again else "stop", wait_seconds=decision.wait_seconds,
        )  # fmt: skip
        if outcome.verdict == "done":
            return
        culprit, logs = outcome.culprit, self.folder.attempt(self.number)
        fault = None if culprit is None or culprit.kind == "lost" else culprit.fault
        if fault is not None and not decision.again:
            print(fault.traceback, end="", file=sys.stderr, flush=True)
        what = culprit.what if culprit is not None else decision.why
        say(f"attempt {self.number} {outcome.verdict}: {what}; logs are in {logs}")
        if decision.again:
            say(f"starting again in {decision.wait_seconds:g} s")
        elif outcome.verdict == "failed":
            say(f"error: no other attempt: {decision.why}")

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.signals:
            time.sleep(min(POLL_SECONDS, max(end - time.monotonic(), 0.0)))

    @property
    def _checkpoints(self) -> Path | None:
        return None if self.policy is None else self.policy.checkpoints

    @property
    def _signal(self) -> int | None:
        return self.signals[0] if self.signals else None


def newest_checkpoint(folder: Path | None) -> tuple[str, int] | None:
    """Return the tag that `latest` names, and when it was written; None where there is none."""
    if folder is None:
        return None
    try:
        path = folder / "latest"
        return path.read_text(encoding="utf-8").strip(), path.stat().st_mtime_ns
    except (OSError, ValueError):
        return None


def ranks_of(folder: Path) -> int:
    """Return how many ranks saved the optimizer states in `folder`; 0 where any number can load it."""
    # As resize.py does it, which imports DeepSpeed.
    names: Sequence[str] = [path.name for path in folder.glob("*_optim_states.pt")]
    found = (_OPTIMIZER.search(name) for name in names)
    return 0 if (folder / "zero").is_dir() else max((int(one[1]) + 1 for one in found if one), default=0)


__all__ = ["HOSTS_MISSING", "PREEMPTED", "HostsMissing", "newest_checkpoint", "ranks_of", "run"]
