"""Decide after an attempt of a run whether there is another one. Arithmetic on what is known: starts nothing.

Who failed is read from what the ranks left behind (run_folder.py); what happens next follows from all
attempts so far and the `relaunch` keys of the cluster YAML.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..cluster.cluster import Host, Relaunch
from .run_folder import PREEMPTED, TOLD_TO_END, RankFault, exits_of, faults_of, silent_ranks

SIGNAL_STATUS = 128  # shells add the number of a signal to it
_NAMED = 8  # ranks or hosts in a line


@dataclass(frozen=True)
class Culprit:
    """Name what ended an attempt; `kind` is that of `RankFault`, or "unknown" where no rank says why."""

    kind: str
    rank: int | None
    host: str | None
    what: str
    fault: RankFault | None = None

    @property
    def signature(self) -> tuple[object, ...] | None:
        """Return what is equal where the same bug struck in the same step; None for faults that may pass."""
        if self.kind != "error" or self.fault is None:
            return None
        return self.fault.type, self.fault.frames, self.fault.step


@dataclass(frozen=True)
class Outcome:
    """Hold how an attempt ended.

    Attributes:
        attempt: its number in the run's folder.
        status: of the engine.
        got_signal: the signal that the launcher got meanwhile; None where it got none.
        preempted: the ranks were told to leave, and saved a checkpoint first.
        progressed: it left a checkpoint newer than the one it began with.
        culprit: None where nothing failed.
    """

    attempt: int
    status: int
    got_signal: int | None
    preempted: bool
    progressed: bool
    culprit: Culprit | None

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


def outcome_of(
    attempt: int, folder: Path, hosts: Sequence[Host], status: int, got_signal: int | None, progressed: bool
) -> Outcome:
    """Return how an attempt ended, from the files that its ranks left in `folder`."""
    exits = exits_of(folder)
    preempted = PREEMPTED in exits.values()
    failed = status != 0 and not preempted and got_signal is None
    culprit = culprit_of(folder, hosts, status) if failed else None
    return Outcome(attempt, status, got_signal, preempted, progressed, culprit)


def culprit_of(folder: Path, hosts: Sequence[Host], status: int) -> Culprit:
    """Return who failed first: a rank's own error, else the rank that the others name, else nobody."""
    faults, exits = faults_of(folder), exits_of(folder)
    own = [fault for fault in faults if fault.kind != "lost"]
    if own:
        first = own[0]
        where = "before its first step" if first.step is None else f"in step {first.step}"
        said = f": {first.message.splitlines()[0]}" if first.message else ""
        host = host_of(first.rank, hosts)
        what = f"rank {first.rank} on {host} raised {first.type} {where}{said}"
        return Culprit(first.kind, first.rank, host, what, first)
    named = Counter(fault.blames for fault in faults if fault.blames is not None)
    if named:
        rank = named.most_common(1)[0][0]
        host, step = host_of(rank, hosts), next((f.step for f in faults if f.step is not None), None)
        when = "" if step is None else f" in step {step}"
        sayers = sorted({fault.rank for fault in faults if fault.blames == rank})
        what = f"rank {rank} on {host} was lost{when} (killed, stopped or cut off), say ranks {few(sayers)}"
        return Culprit("lost", rank, host, what, next(f for f in faults if f.blames == rank))
    left = [(rank, code) for rank, code in exits.items() if code not in (0, TOLD_TO_END)]
    if left:
        rank, code = left[0]
        host = host_of(rank, hosts)
        return Culprit("unknown", rank, host, f"rank {rank} on {host} left with status {code}")
    silent = silent_ranks(folder)
    if silent and len(silent) < sum(host.slots for host in hosts):
        host = host_of(silent[0], hosts)
        what = f"rank {silent[0]} on {host} was lost (killed, stopped or cut off): it said nothing"
        return Culprit("lost", silent[0], host, what)
    if faults:
        return Culprit("lost", None, None, f"ranks lost each other: {faults[0].message}", faults[0])
    return Culprit("unknown", None, None, f"no rank says why; the engine ended with status {status}")


def few(items: Sequence[object]) -> str:
    """Name the first of many, for a line that a person reads."""
    more = len(items) - _NAMED
    return ", ".join(map(str, items[:_NAMED])) + (f" and {more} more" if more > 0 else "")


def host_of(rank: int, hosts: Sequence[Host]) -> str:
    """Return the name of the host that a rank runs on."""
    for host in hosts:
        if rank < host.slots:
            return host.name
        rank -= host.slots
    return "no host"


def decide(history: Sequence[Outcome], policy: Relaunch | None) -> Decision:
    """Return what follows the last attempt of `history`, in which the oldest stands first."""
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
    before = _same_bug(history)
    if before is not None:
        why = f"the same error in the same step as attempt {before}: a bug does not pass"
        return Decision(False, last.status, why)
    failures = failures_in_a_row(history)
    if failures >= policy.max_attempts:
        why = f"{failures} attempts in a row without a newer checkpoint (relaunch.max_attempts)"
        return Decision(False, last.status, why)
    wait = min(policy.backoff_seconds * 2 ** min(failures - 1, 30), policy.backoff_most_seconds)
    return Decision(True, last.status, last.culprit.what if last.culprit else "it saved nothing new", wait)


def failures_in_a_row(history: Sequence[Outcome]) -> int:
    """Count the attempts at the end of `history`, this one included, since the last newer checkpoint."""
    count = 0
    for outcome in reversed(history):
        count += 1
        if outcome.progressed:
            break
    return count


def _same_bug(history: Sequence[Outcome]) -> int | None:
    culprit = history[-1].culprit
    signature = None if culprit is None else culprit.signature
    if signature is None:
        return None
    for outcome in history[:-1]:
        if outcome.culprit is not None and outcome.culprit.signature == signature:
            return outcome.attempt
    return None


def culprit_event(culprit: Culprit) -> Mapping[str, object]:
    """Return the "fault" line of attempts.jsonl."""
    fault = culprit.fault
    return {
        "kind": culprit.kind,
        "rank": culprit.rank,
        "host": culprit.host,
        "step": None if fault is None else fault.step,
        "what": culprit.what,
        "frames": [] if fault is None or fault.kind == "lost" else list(fault.frames),
    }
