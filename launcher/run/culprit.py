"""Say which rank ended an attempt, from what its ranks left in their folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..cluster.cluster import Host
from .process import few
from .run_folder import TOLD_TO_END, RankFault
from .run_records import RankStop, read_stops


@dataclass(frozen=True)
class Culprit:
    """Name what ended an attempt; `kind` is that of `RankFault`, "left" where a rank left by itself, or
    "unknown" where no rank has a reason.
    """

    kind: str
    rank: int | None
    host: str | None
    what: str
    fault: RankFault | None = None
    status: int | None = None

    @property
    def signature(self) -> tuple[object, ...] | None:
        """Return a key that is equal for the same bug in the same step; None for faults that may pass."""
        if self.kind == "left" and self.status == 0:  # a script that ends on some ranks only
            return self.kind, self.rank
        if self.kind != "error" or self.fault is None:
            return None
        return self.fault.type, self.fault.frames, self.fault.step

    @property
    def event(self) -> dict[str, object]:
        """Return the "fault" line of attempts.jsonl."""
        fault = self.fault
        frames = [] if fault is None or fault.kind == "lost" else list(fault.frames)
        figures = {"kind": self.kind, "rank": self.rank, "host": self.host, "what": self.what}
        return {**figures, "step": fault and fault.step, "frames": frames}


# [Note: who stopped first]
# The text of an error is never used: a script's own error may name NCCL. Each rank writes down when it
# raised, left or was gone, by one clock (`read_stops`). A rank that raised because another one was gone has
# raised after it. So the first rank that ended on its own account is the culprit. An error that compiled
# code raised (`RankFault.raised`) may be a collective's, in which this rank noticed that another one was
# gone: it counts as such where another rank ended before by a status or a signal, or is named by others.
def find_culprit(folder: Path, hosts: Sequence[Host], status: int) -> Culprit:
    """Return who failed first: a rank by itself, else the rank that the others name, else None."""
    stops = read_stops(folder)
    lost = [stop.fault for stop in stops if stop.fault is not None and stop.fault.kind == "lost"]
    named = Counter(fault.blames for fault in lost if fault.blames is not None)
    first = next((stop for stop in stops if _is_own(stop, stops, named)), None)
    gone = next((stop for stop in stops if stop.is_silent and stop.when_ns is not None), None)
    if first is not None and first.fault is not None and (gone is None or _is_before(first, gone)):
        return _raised(first.fault, hosts)
    if first is not None and (gone is None or _is_before(first, gone)):
        return _left(first, hosts)
    if named:
        return _named(named.most_common(1)[0][0], lost, stops, hosts)
    silent = [stop for stop in stops if stop.is_silent]
    if silent and len(silent) < sum(host.slots for host in hosts):
        host = find_host(silent[0].rank, hosts)
        what = f"rank {silent[0].rank} on {host} was lost (killed, stopped or cut off): it said nothing"
        return Culprit("lost", silent[0].rank, host, what)
    if lost and stops[0].status == 0:
        return _left(stops[0], hosts)
    if lost:
        return Culprit("lost", None, None, f"ranks lost each other: {lost[0].message}", lost[0])
    return Culprit("unknown", None, None, f"no rank says why; the engine ended with status {status}")


def _is_before(stop: RankStop, later_stop: RankStop) -> bool:
    return stop.when_ns is not None and (later_stop.when_ns is None or stop.when_ns <= later_stop.when_ns)


def _is_own(stop: RankStop, stops: Sequence[RankStop], named: Mapping[int, int]) -> bool:
    """Return whether a rank ended on its own account, and not since another one did."""
    if stop.fault is None:
        return stop.status not in (None, 0, TOLD_TO_END)
    if stop.fault.kind != "error":
        return stop.fault.kind != "lost"
    if stop.fault.raised is not False:
        return True
    others = [peer for peer in stops if peer.rank != stop.rank and _is_before(peer, stop)]
    gone = any(peer.is_silent or peer.status not in (None, 0, TOLD_TO_END) for peer in others)
    return not gone and not set(named) - {stop.rank}


def _raised(fault: RankFault, hosts: Sequence[Host]) -> Culprit:
    where = "before its first step" if fault.step is None else f"in step {fault.step}"
    text = f": {fault.message.splitlines()[0]}" if fault.message.strip() else ""
    host = find_host(fault.rank, hosts)
    what = f"rank {fault.rank} on {host} raised {fault.type} {where}{text}"
    return Culprit(fault.kind, fault.rank, host, what, fault)


def _left(stop: RankStop, hosts: Sequence[Host]) -> Culprit:
    host = find_host(stop.rank, hosts)
    what = f"rank {stop.rank} on {host} left with status {stop.status} while others were at work"
    return Culprit("left", stop.rank, host, what, status=stop.status)


def _named(rank: int, lost: Sequence[RankFault], stops: Sequence[RankStop], hosts: Sequence[Host]) -> Culprit:
    left = next(
        (stop for stop in stops if stop.rank == rank and stop.status not in (None, TOLD_TO_END)), None
    )
    if left is not None:
        return _left(left, hosts)
    host, step = find_host(rank, hosts), next((fault.step for fault in lost if fault.step is not None), None)
    when = "" if step is None else f" in step {step}"
    sayers = sorted({fault.rank for fault in lost if fault.blames == rank})
    says = "say ranks" if len(sayers) > 1 else "says rank"
    what = f"rank {rank} on {host} was lost{when} (killed, stopped or cut off), {says} {few(sayers)}"
    return Culprit("lost", rank, host, what, next(fault for fault in lost if fault.blames == rank))


def find_host(rank: int, hosts: Sequence[Host]) -> str:
    """Return the name of the host that a rank runs on."""
    for host in hosts:
        if rank < host.slots:
            return host.name
        rank -= host.slots
    return "no host"
