"""Record who waits for whom, and find where that ends. Pure: no clock, no sockets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

CallAndHop = tuple[int, int]  # number of the call, hop
Ranges = tuple[tuple[int, int], ...]  # ranks from the first to the last, both included


# [Note: who is to blame]
# A rank that waits too long accuses the rank it waits for; but that one may be waiting itself. The monitor
# knows every wait that lasts longer than a moment, follows them to their end and names the rank that waits
# for nobody. Where ranks wait for each other in a circle, the one that is at another place than most is
# named.
def ranges_of(ranks: Iterable[int]) -> Ranges:
    """Write ranks as ranges: a thousand that wait for a thousand would send megabytes otherwise."""
    return merged([rank, rank] for rank in ranks)


def merged(ranges: Iterable[Sequence[int]]) -> Ranges:
    """Put ranges in order, in the one form that equal sets have."""
    result: list[tuple[int, int]] = []
    for first, last in sorted((one[0], one[1]) for one in ranges):
        if result and result[-1][1] >= first - 1:
            result[-1] = (result[-1][0], max(last, result[-1][1]))
        else:
            result.append((first, last))
    return tuple(result)


def line_bytes(world_size: int) -> int:
    """Return the longest line of a rank: one that waits for every second rank names them all."""
    return 16384 + 16 * world_size


@lru_cache(maxsize=4096)
def ranks_of(ranges: Ranges) -> frozenset[int]:
    """Return the ranks of some ranges; ranks of one group share one set."""
    return frozenset(rank for first, last in ranges for rank in range(first, last + 1))


@dataclass(frozen=True)
class ReportedWait:
    """Describe a wait under way."""

    group: frozenset[int]  # the world ranks it is for (a collective has many), and the one that waits
    place: CallAndHop  # at which (call, hop)
    what: str  # that place, for messages
    since: float  # seconds


class End(NamedTuple):
    """Say where the waits from a rank end: at one that waits for nobody, or in a circle that `rank` is in."""

    rank: int
    circle: tuple[int, ...]


class Waits:
    """Keep all waits under way, by the rank that waits."""

    def __init__(self) -> None:
        self.of: dict[int, ReportedWait] = {}
        self._at: defaultdict[CallAndHop, set[int]] = defaultdict(set)
        self._ends: dict[int, End] = {}  # of those that were asked for since the last change

    def begin(self, rank: int, wait: ReportedWait) -> None:
        """Replace what a rank waits for."""
        self.end(rank)
        self.of[rank] = wait
        self._at[wait.place].add(rank)

    def end(self, rank: int) -> None:
        """Remove a rank's wait."""
        self._ends.clear()
        wait = self.of.pop(rank, None)
        if wait is not None:
            self._at[wait.place].discard(rank)
            if not self._at[wait.place]:
                del self._at[wait.place]

    def end_of(self, rank: int) -> End:
        """Follow the waits from a rank."""
        # Every rank on the way ends where this one does, so a ring of n ranks is followed once, not n times.
        path: list[int] = []
        seen: dict[int, int] = {}
        here = rank
        while here not in self._ends:
            wait = self.of.get(here)
            if wait is None:
                self._ends[here] = End(here, ())
                break
            seen[here] = len(path)
            path.append(here)
            here = self._slowest(here, wait)
            if here in seen:
                self._ends[here] = End(here, tuple(path[seen[here] :]))
                break
        for one in path:
            self._ends[one] = self._ends[here]
        return self._ends[rank]

    def _slowest(self, rank: int, wait: ReportedWait) -> int:
        """Choose of those that a rank waits for: one that does not wait, or is elsewhere, or the first."""
        elsewhere = wait.group - self._at[wait.place]  # the rank itself is not
        return min(elsewhere - self.of.keys() or elsewhere or wait.group - {rank})
