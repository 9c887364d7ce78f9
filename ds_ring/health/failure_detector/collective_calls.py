"""Count the collectives of torch.distributed that each rank has begun, and find ranks that are late.

[Note: late in a collective]
A rank that is alive and slow outside of ds_ring's own waits (in its data set, in an evaluation on one rank,
in `save_checkpoint`) keeps the others in a collective of DeepSpeed or of the script, which ds_ring has not
started and cannot abort. torch numbers the collectives of each process group, on every rank alike. Under
`ds_ring.initialize` each heartbeat carries these numbers, where they have changed: the others wait for the
rank with the smaller number. The making of groups, which all ranks of the world do together, is counted as a
group of its own. A number may be old by two heartbeats, so a difference counts after that. How long a rank
may be late depends on its stage, which the heartbeat carries, too.

gloo counts sends and receives as well, of which ranks have different numbers. So the groups of ds_ring's
rings are not compared (each of their waits is reported), and a difference counts only while neither rank
begins anything in any group: a script that sends in the default group leaves a difference that stays, while
the job trains.
"""

from __future__ import annotations

import zlib
from collections import defaultdict, deque
from itertools import pairwise
from typing import NamedTuple

from .wire import NOT_COMPARED

MAX_STAGES = 32  # that are remembered of a rank


class RankStage(NamedTuple):
    """What a rank is in, and how long it may be there while others wait, by a key of the JSON."""

    what: str
    limit_s: float
    key: str


class CallWait(NamedTuple):
    """A rank that has begun a collective which others have not."""

    rank: int
    behind: frozenset[int]
    place: tuple[int, int]
    what: str
    since: float  # seconds; none of these ranks has begun a collective since


class CollectiveCalls:
    """Hold the numbers of all ranks, by process group, and where each rank is."""

    def __init__(self) -> None:
        self._numbers: defaultdict[str, dict[int, int]] = defaultdict(dict)
        self._moved: dict[int, float] = {}  # when a rank has begun a collective of any group
        self._stages: defaultdict[int, deque[tuple[float, RankStage]]] = defaultdict(
            lambda: deque(maxlen=MAX_STAGES)
        )

    def hear(self, rank: int, stage: RankStage, numbers: dict[str, int], now: float) -> None:
        """Take a heartbeat: where the rank is, and the numbers that have changed since its last one."""
        stages = self._stages[rank]
        if not stages or stages[-1][1] != stage:
            stages.append((now, stage))
        for group, number in numbers.items():
            if self._numbers[group].get(rank) != number:
                self._numbers[group][rank], self._moved[rank] = number, now

    def forget(self, rank: int) -> None:
        """Count the collectives of a rank no longer."""
        for ranks in self._numbers.values():
            ranks.pop(rank, None)

    def forgive(self, seconds: float) -> None:
        """Move all times by a pause of the monitor."""
        for rank in self._moved:
            self._moved[rank] += seconds
        for rank, stages in self._stages.items():
            moved = [(at + seconds, stage) for at, stage in stages]
            self._stages[rank] = deque(moved, MAX_STAGES)

    def waits(self) -> dict[int, CallWait]:
        """Return the ranks that have begun a collective which others of its group have not."""
        waits: dict[int, CallWait] = {}
        for group, numbers in self._numbers.items():
            if group.startswith(NOT_COMPARED):
                continue
            behind: frozenset[int] = frozenset()
            moved = 0.0  # when a rank with a smaller number began a collective
            for number in sorted(set(numbers.values())):  # mostly one
                ranks = [rank for rank, theirs in numbers.items() if theirs == number]
                if behind:
                    what = (
                        f"collective {number} of process group {group}" if group else "the making of a group"
                    )
                    place = (-2 - zlib.crc32(group.encode()), number)
                    for rank in ranks:
                        since = max(moved, self._moved[rank])
                        waits.setdefault(rank, CallWait(rank, behind, place, what, since))
                behind |= frozenset(ranks)
                moved = max(moved, *(self._moved[rank] for rank in ranks))
        return waits

    def stage(self, rank: int, since: float) -> RankStage | None:
        """Return the stage with the longest limit in which a rank has been since some time."""
        stages = self._stages.get(rank)
        if not stages:
            return None
        latest_first = list(reversed(stages))
        stage = [latest_first[0][1]]
        for (began, _), (_, before) in pairwise(latest_first):
            if began <= since:
                break
            stage.append(before)
        return max(stage, key=lambda call: call.limit_s)
