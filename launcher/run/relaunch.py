"""Run a job until it is done, starting it again after faults on the hosts that are left.

Each attempt is a launch of its own: a process group with a new store, a new secret, a folder for its logs.
presence.py finds which hosts answer. An engine's own restarts (torchrun's) are not used: they know neither
checkpoints nor rings, and do not exist under the other engines.

[Note: a rank that was taken for lost]
A rank that was stopped or cut off may wake up while a newer attempt trains. It cannot join: the store and the
secret are new. It cannot save: the newer attempt has put its own lock into the folder ([Note: fencing] in
checkpoint/manifest.py). Attempts of two launchers cannot be at work at once: a launcher holds the folder of
its run ([Note: one launcher] in run_lock.py).
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_ring.config.json_text import read_object
from ds_ring.config.section import RingConfig
from ds_ring.errors import RingCheckpointError, RingConfigError, RingError
from ds_ring.written_files import replace_text

from ..cluster.checks import choose_free_port, secret_for
from ..cluster.cluster import Cluster, Host, Relaunch
from .culprit import Culprit, find_culprit
from .job import Job, module_command
from .presence import HOSTS_MISSING, HostPresence, HostsMissing, ask_hosts, get_master_address
from .process import NO_RING, POLL_SECONDS, counted, say, signals_noted
from .run_folder import CONFIG, PREEMPTED, RunFolder, has_ring
from .run_lock import run_held
from .run_records import newest_checkpoint, read_exits
from .start import start

# Whether another attempt follows is decided from the ranks' files (run_folder.py), from all
# attempts so far and from the `relaunch` keys of the cluster YAML.

SIGNAL_STATUS = 128  # shells add the number of a signal to it


@dataclass(frozen=True)
class Outcome:
    """Hold how an attempt ended.

    Attributes:
        attempt: its number in the run's folder.
        status: of the engine.
        got_signal: the signal that the launcher got during the run; None where it got none.
        preempted: the ranks got a request to leave, and saved a checkpoint first.
        progressed: it left a checkpoint newer than the one it began with.
        culprit: None where nothing failed.
        has_ring: whether a rank has made a ring.
    """

    attempt: int
    status: int
    got_signal: int | None
    preempted: bool
    progressed: bool
    culprit: Culprit | None
    has_ring: bool = True

    @property
    def verdict(self) -> str:
        """Return the word of attempts.jsonl."""
        if self.preempted:
            return "preempted"
        if self.got_signal is not None:
            return "interrupted"
        return "failed" if self.status else "done"


@dataclass(frozen=True)
class Decision:
    """Say what happens next: another attempt after `wait_seconds`, or the end with `status`."""

    again: bool
    status: int
    why: str
    wait_seconds: float = 0.0


def read_outcome(
    attempt: int, folder: Path, hosts: Sequence[Host], status: int, got_signal: int | None, progressed: bool
) -> Outcome:
    """Return how an attempt ended, from the files that its ranks left in `folder`."""
    exits = read_exits(folder)
    preempted = PREEMPTED in exits.values()
    failed = status != 0 and not preempted and got_signal is None
    culprit = find_culprit(folder, hosts, status) if failed else None
    return Outcome(attempt, status, got_signal, preempted, progressed, culprit, has_ring(folder))


def decide(history: Sequence[Outcome], policy: Relaunch | None) -> Decision:
    """Return the step after the last attempt of `history`, whose first one is the oldest."""
    last = history[-1]
    if last.got_signal is not None:
        if last.preempted:
            return Decision(False, PREEMPTED, "it was told to leave, and saved first")
        return Decision(False, SIGNAL_STATUS + last.got_signal, "it was told to end")
    if last.status == 0:
        return Decision(False, 0, "done")
    if policy is None:
        return Decision(False, PREEMPTED if last.preempted else last.status, "the YAML has no relaunch")
    if last.preempted and last.progressed:
        why = "its ranks were told to leave, and saved first"
        return Decision(True, PREEMPTED, why, policy.backoff_seconds)
    bug = last.culprit and last.culprit.signature
    before = [
        outcome.attempt for outcome in history[:-1] if outcome.culprit and outcome.culprit.signature == bug
    ]
    if bug is not None and before:
        why = f"the same error in the same step as attempt {before[0]}: a bug does not pass"
        return Decision(False, last.status, why)
    # this one included, since the last newer checkpoint
    failures = next((n for n, outcome in enumerate(reversed(history), 1) if outcome.progressed), len(history))
    if failures >= policy.max_attempts:
        why = f"{failures} attempts in a row without a newer checkpoint (relaunch.max_attempts)"
        return Decision(False, last.status, why)
    wait = min(policy.backoff_seconds * 2 ** min(failures - 1, 30), policy.backoff_most_seconds)
    return Decision(True, last.status, last.culprit.what if last.culprit else "it saved nothing new", wait)


# The ring for the ranks that are left keeps the samples of a step. A smaller ring needs more memory in each
# rank, so the number of data replicas shrinks first; `relaunch.smallest_ring_size` is the bound.

_SIZE, _MICRO, _STEPS = (
    "sequence_parallel_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
)  # fmt: skip


@dataclass(frozen=True)
class RemainingRing:
    """Hold the number of ranks that continue, of those that share a sequence, and their JSON."""

    world_size: int
    sequence_size: int
    config: dict[str, Any]


def ring_for(config: dict[str, Any], planned_ranks: int, ranks: int, smallest: int) -> RemainingRing | None:
    """Return the ring for at most `ranks` ranks; None where no allowed size fits.

    Args:
        config: the DeepSpeed JSON for `planned_ranks`.
        ranks: slots of the hosts that are there.
        smallest: ranks that share a sequence, at least.
    """
    planned = int(config.get(_SIZE, 1))
    for sequence in (size for size in range(planned, smallest - 1, -1) if planned % size == 0):
        for world in range(ranks - ranks % sequence, 0, -sequence):
            smaller = _config_for(config, planned_ranks // planned, sequence, world // sequence)
            if smaller is not None:
                with contextlib.suppress(RingConfigError):
                    RingConfig.from_deepspeed(smaller).validate_world(world)
                    return RemainingRing(world, sequence, smaller)
    return None


def hosts_for(hosts: Sequence[Host], ranks: int) -> tuple[Host, ...]:
    """Return the hosts with as many slots as there are ranks: the last ones lose theirs."""
    chosen = []
    for host in hosts:
        if ranks > 0:
            chosen.append(host.model_copy(update={"slots": min(host.slots, ranks)}))
            ranks -= host.slots
    return tuple(chosen)


def _config_for(
    config: dict[str, Any], replicas_before: int, sequence: int, replicas: int
) -> dict[str, Any] | None:
    """Return the JSON of another ring; None where the samples of a step cannot be divided among replicas."""
    changed = copy.deepcopy(config)
    if sequence != int(config.get(_SIZE, 1)):
        changed[_SIZE] = sequence
        section = changed.setdefault("ring_attention", {})
        if isinstance(section.get("ring_size", "auto"), int):
            section["ring_size"] = max(sequence // int(section.get("ulysses_size", 1)), 1)
    if replicas == replicas_before:
        return changed
    micro, steps = config.get(_MICRO), config.get(_STEPS, 1)
    if not isinstance(micro, int) or not isinstance(steps, int) or micro * steps * replicas_before % replicas:
        return None
    samples = micro * steps * replicas_before // replicas
    changed[_MICRO] = (
        micro if samples % micro == 0 else next(n for n in range(micro, 0, -1) if samples % n == 0)
    )
    changed[_STEPS] = samples // changed[_MICRO]
    return changed


_OPTIMIZER = re.compile(r"zero_pp_rank_(\d+)_mp_rank_\d+_optim_states\.pt$")
_CONVERT_SECONDS = 3600
_HOST_SECONDS = 10.0  # without relaunch, too


def run(job: Job) -> int:
    """Run the attempts of a job whose YAML names a run_folder; return the last one's exit status.

    Raises:
        HostsMissing: at the first attempt a host is not there.
        RunInUseError: another launcher holds the folder.
        RingConfigError: the folder cannot be written to.
    """
    run_folder = job.cluster.run_folder
    assert run_folder is not None
    with signals_noted() as signals, run_held(run_folder, job.node_rank) as token:
        return _RelaunchedRun(job, signals, token).until_done()


class _RelaunchedRun:
    def __init__(self, job: Job, signals: list[int], token: str) -> None:
        assert job.cluster.run_folder is not None
        self.token = token
        self.job, self.signals, self.policy = job, signals, job.cluster.relaunch
        self.folder = RunFolder(job.cluster.run_folder)
        self.history: list[Outcome] = []
        self.number = 0
        self.checkpoints = None if self.policy is None else self.policy.checkpoints

    def until_done(self) -> int:
        while True:
            self.number = self.folder.start_attempt(self.token)
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
        before = newest_checkpoint(self.checkpoints)
        try:
            job = self._job_for(presence)
        except RingError as error:
            if not self.history:
                raise
            say(f"error: {error}")
            return Outcome(self.number, HOSTS_MISSING, next(iter(self.signals), None), False, False, None)
        if before is not None and self.checkpoints is not None:
            before = self._converted(job.cluster.world_size) or before
        self.folder.record(
            "start", self.number, engine=job.cluster.engine, world_size=job.cluster.world_size,
            hosts={host.name: host.slots for host in job.cluster.hosts}, missing=presence.missing,
            sequence_parallel_size=read_object(job.cluster.deepspeed_config).get("sequence_parallel_size", 1),
            checkpoint=None if before is None else before[0], interfaces=presence.interfaces,
            checkpoints=None if self.checkpoints is None else str(self.checkpoints),
        )  # fmt: skip
        status = self._start(job)
        progressed = newest_checkpoint(self.checkpoints) != before
        attempt_folder = self.folder.attempt(self.number)
        return read_outcome(
            self.number, attempt_folder, job.cluster.hosts, status, next(iter(self.signals), None), progressed
        )

    def _start(self, job: Job) -> int:
        if self.signals:
            return 128 + self.signals[0]
        try:
            return start(job, self.signals)
        except HostsMissing as error:  # one that answered a moment ago
            if not self.history:
                raise
            say(f"error: {error}")
            return HOSTS_MISSING

    def _presence(self) -> HostPresence:
        """Return who is there; wait for the others for the time of the YAML."""
        cluster, policy = self.job.cluster, self.policy
        seconds = _HOST_SECONDS if policy is None else policy.host_seconds
        deadline = time.monotonic() + (0.0 if policy is None else policy.wait_for_hosts_seconds)
        while True:
            presence = ask_hosts(cluster, seconds) if cluster.asks_by_ssh else HostPresence(cluster.hosts)
            if not presence.missing or time.monotonic() >= deadline or self.signals:
                return presence
            self._pause(1.0)

    def _job_for(self, presence: HostPresence) -> Job:
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
        port = self.job.port if not self.history else cluster.master_port or choose_free_port()
        # A new secret, so that a rank of an older attempt that wakes up again is a stranger.
        told = secret_for(cluster) if self.history else self.job.secret
        return replace(self.job, cluster=cluster, port=port, secret=told, attempt_folder=attempt)

    def _smaller(self, cluster: Cluster, presence: HostPresence, attempt: Path) -> Cluster:
        slots = sum(host.slots for host in presence.hosts)
        smallest = 1 if self.policy is None else self.policy.smallest_ring_size
        config = read_object(cluster.deepspeed_config)
        ring = ring_for(config, cluster.world_size, slots, smallest)
        if ring is None:
            raise RingConfigError.wrong(
                "relaunch", f"a ring of {smallest} ranks or more on {slots} slots", "none", "bring hosts back"
            )
        hosts = hosts_for(presence.hosts, ring.world_size)
        left = counted(ring.world_size, "rank is", "ranks are")
        say(f"{left} left; {ring.sequence_size} of them to a sequence")
        path = attempt / CONFIG
        replace_text(path, json.dumps(ring.config, indent=2) + "\n")
        changed = {
            "hosts": hosts,
            "deepspeed_config": path,
            "master_address": get_master_address(cluster, hosts[0].name),
        }
        return cluster.model_copy(update=changed)

    def _converted(self, world_size: int) -> tuple[str, int] | None:
        """Convert the newest whole checkpoint where it is one of another number of ranks."""
        folder = self.checkpoints
        newest = newest_checkpoint(folder)
        if folder is None or newest is None or count_saved_ranks(folder / newest[0]) in (0, world_size):
            return newest
        say(f"converting {newest[0]} for {counted(world_size, 'rank', 'ranks')}")
        command = module_command("ds_ring_launcher.run.relaunch")
        command += [str(folder), str(world_size), str(self.folder.attempt(self.number))]
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
            self.folder.record("fault", self.number, **outcome.culprit.event)
        self.folder.record(
            "end", self.number, status=outcome.status, verdict=outcome.verdict, why=decision.why,
            next="again" if decision.again else "stop", wait_seconds=decision.wait_seconds,
            ring=outcome.has_ring,
        )  # fmt: skip
        if outcome.verdict == "done":
            if not outcome.has_ring:
                say(NO_RING)
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


def count_saved_ranks(folder: Path) -> int:
    """Return how many ranks saved the optimizer states in `folder`; 0 where any number can load it."""
    # As resize.py does it, which imports DeepSpeed.
    names: Sequence[str] = [path.name for path in folder.glob("*_optim_states.pt")]
    matches = (_OPTIMIZER.search(name) for name in names)
    return (
        0 if (folder / "zero").is_dir() else max((int(match[1]) + 1 for match in matches if match), default=0)
    )


def convert(folder: Path, world_size: int, attempt_folder: Path) -> str | None:
    """Return the tag that `world_size` ranks can load, converted if need be; None where none is whole."""
    from ds_ring.checkpoint.manifest import (
        attempt_in,
        earlier_tags,
        read_latest,
        verify_checkpoint,
    )
    from ds_ring.checkpoint.resize import resize_checkpoint

    newest = read_latest(folder)
    for tag in () if newest is None else (newest, *earlier_tags(folder, newest)):
        try:
            verify_checkpoint(folder, tag)
        except RingCheckpointError as error:
            print(f"{tag}: not whole, trying the one before: {error}", file=sys.stderr)
            continue
        if count_saved_ranks(folder / tag) in (0, world_size):
            return tag
        return resize_checkpoint(folder, tag, attempt=attempt_in(attempt_folder))
    return None


def main(folder: str, world_size: str, attempt_folder: str) -> None:
    """Convert a folder's newest whole checkpoint. In a process of its own: it imports torch and DeepSpeed."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed logs to stdout
            convert(Path(folder), int(world_size), Path(attempt_folder))
    except RingError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
