"""Decide which rank failed first, from the reports of ranks, their waits, and their silence.

Pure: every event comes with its time, in seconds; the sockets are `server.py`'s. There is one detector for a
job, so the first fault wins and every survivor names the same culprit.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from .collective_calls import CollectiveCalls, RankStage
from .wire import GRACE_S, WARNED_PART, Fault, merged, read_ranks

CallAndHop = tuple[int, int]  # number of the call, hop


# [Note: who is to blame]
# A rank that waits too long accuses the rank it waits for; but that one may be waiting itself. The monitor
# knows every wait that lasts longer than a moment, follows them to their end and names the rank that does not
# wait. If ranks wait for each other in a circle, it names the one at another call or hop than most.
@dataclass(frozen=True)
class ReportedWait:
    """Describe a wait under way."""

    group: frozenset[int]  # the world ranks it is for (a collective has many), and the one that waits
    place: CallAndHop  # at which (call, hop)
    what: str  # that place, for messages
    since: float  # seconds
    limit_s: float = math.inf  # the waiting rank accuses after this time
    key: str = ""  # of the JSON, which sets the limit
    is_own: bool = True  # reported by the rank; else derived from the numbers of collectives


class End(NamedTuple):
    """The end of the chain of waits from a rank: a rank that does not wait, or a circle with `rank` in it."""

    rank: int
    circle: tuple[int, ...]


class Waits:
    """Keep all waits under way, by the rank that waits."""

    def __init__(self) -> None:
        self.of: dict[int, ReportedWait] = {}
        self._at: defaultdict[CallAndHop, set[int]] = defaultdict(set)
        self._ends: dict[int, End] = {}  # looked up since the last change

    def begin(self, rank: int, wait: ReportedWait) -> None:
        """Replace the wait of a rank."""
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

    def forgive(self, seconds: float) -> None:
        """Move the beginning of all waits by a pause of the monitor."""
        self.of = {rank: replace(wait, since=wait.since + seconds) for rank, wait in self.of.items()}

    def find_end(self, rank: int) -> End:
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
            # Of those that it waits for: one that does not wait, or is elsewhere, or the first.
            elsewhere = wait.group - self._at[wait.place]  # the rank itself is not
            here = min(elsewhere - self.of.keys() or elsewhere or wait.group - {here})
            if here in seen:
                self._ends[here] = End(here, tuple(path[seen[here] :]))
                break
        for waiting_rank in path:
            self._ends[waiting_rank] = self._ends[here]
        return self._ends[rank]


CALLS_LOOK_S = 0.2  # between two looks at the numbers of collectives
LEFT_S = 1.0  # a rank has left too early if another one still waits for it this long after its goodbye
JOIN_S = 2.0  # a rank joins within this or the heartbeat timeout of the one before: they wait to be let in
TEXT_CHARACTERS = 1000  # of a cause, or of the name of a place


class LateRank(NamedTuple):
    """A rank that others wait for, longer than a tenth of the time that it may take."""

    rank: int
    waiting: int  # one of those that wait for it
    what: str  # for what they wait
    since: float  # seconds
    limit_s: float
    key: str  # of the JSON, which sets the limit


class Accusation(NamedTuple):
    """Hold a rank's word against others, judged when it is due."""

    due: float
    group: frozenset[int]  # with the rank itself
    cause: str


@dataclass
class FailureDetector:
    """Decide who failed first."""

    world_size: int
    heartbeat_timeout_s: float
    heard: dict[int, float] = field(default_factory=dict)  # when, of every rank that has joined
    fault: Fault | None = None
    _last_join: float = 0.0
    _waits: Waits = field(default_factory=Waits)
    _accusations: dict[int, Accusation] = field(default_factory=dict)  # the first one of each rank
    _left: dict[int, float] = field(default_factory=dict)  # when a rank sent its goodbye, in that order
    _broken: tuple[float, str] | None = None  # when to judge the first report of a broken collective
    _calls: CollectiveCalls = field(default_factory=CollectiveCalls)
    _calls_due: float = 0.0
    _whereabouts: dict[int, str] = field(default_factory=dict)  # of queried ranks

    def join(self, rank: int, now: float) -> None:
        """Note that a rank is here from now on."""
        self.heard[rank] = self._last_join = now

    def hear(self, rank: int, message: Any, now: float) -> None:
        """Take one message of a rank that has joined."""
        self.heard[rank] = now
        kind = message.get("kind") if isinstance(message, dict) else None
        if kind == "wait":
            place = message.get("place")
            if not isinstance(place, list) or [type(number) for number in place] != [int, int]:
                raise ValueError(f"place: expected two whole numbers, got {place!r:.40}")
            at, what = (place[0], place[1]), _read_text(message, "what")
            limit_s, key = math.inf, ""
            if "limit" in message:
                limit_s, key = _read_seconds(message, "limit"), _read_text(message, "key")
            self._waits.begin(rank, ReportedWait(self._group(rank, message), at, what, now, limit_s, key))
        elif kind == "go":
            self._waits.end(rank)
        elif kind == "timeout":
            accusation = Accusation(now + GRACE_S, self._group(rank, message), _read_text(message, "cause"))
            # A rank's later accusations follow from its first.
            self._accusations.setdefault(rank, accusation)
        elif kind == "broken":
            self._broken = self._broken or (now + GRACE_S, _read_text(message, "cause"))
        elif kind == "failed":
            self.blame(rank, _read_text(message, "cause"))
        elif kind == "bye":
            if not self._take_calls(rank, message, now):  # if its process continues without this connection
                self._calls.forget(rank)
            self._left.setdefault(rank, now)
            self._waits.end(rank)
        elif kind == "beat":
            self._take_calls(rank, message, now)
        elif kind == "at":
            self._whereabouts[rank] = _read_text(message, "text")
        else:
            raise ValueError(f"expected a message of a rank, got the kind {kind!r:.40}")

    def close(self, rank: int) -> None:
        """Blame a rank whose connection ended without a goodbye."""
        if rank not in self._left:
            self.blame(rank, "its process ended without a goodbye (killed, aborted or crashed)")

    def forgive(self, seconds: float) -> None:
        """Excuse all ranks for a time in which the monitor itself was not running."""
        self._last_join += seconds
        for rank in self.heard:
            self.heard[rank] += seconds
        self._left = {rank: at + seconds for rank, at in self._left.items()}
        if self._broken is not None:
            self._broken = (self._broken[0] + seconds, self._broken[1])
        self._waits.forgive(seconds)
        self._calls.forgive(seconds)
        self._accusations = {
            rank: accusation._replace(due=accusation.due + seconds)
            for rank, accusation in self._accusations.items()
        }

    def look(self, now: float) -> Fault | None:
        """Return the first fault, if there is one by now."""
        if self.fault is None:
            self._look_for_silence(now)
            self._look_at_calls(now)
            self._look_for_early_leavers(now)
            self._look_at_broken(now)
            for rank, accusation in list(self._accusations.items()):
                if accusation.due <= now and self.fault is None:
                    del self._accusations[rank]
                    self._settle(rank, accusation)
        return self.fault

    def late_ranks(self, now: float) -> dict[int, LateRank]:
        """Return the ranks for which others have waited for a tenth of the limit and longer."""
        late_ranks: dict[int, LateRank] = {}
        in_circles: dict[tuple[int, ...], int | None] = {}
        for waiting, wait in self._waits.of.items():
            end = self._waits.find_end(waiting)
            if end.circle and end.circle not in in_circles:
                in_circles[end.circle] = self._find_rank_behind(end.circle, wait.group)
            late = in_circles[end.circle] if end.circle else end.rank
            if late is None or late in self._left:
                continue
            limit_s, key = self._get_limit(wait, late)
            before = late_ranks.get(late)
            if now - wait.since >= WARNED_PART * limit_s and (before is None or wait.since < before.since):
                late_ranks[late] = LateRank(late, waiting, wait.what, wait.since, limit_s, key)
        return late_ranks

    def whereabouts(self, rank: int) -> str | None:
        """Return the rank's answer to the query for its place in the program; None without an answer."""
        return self._whereabouts.get(rank)

    def ask_again(self, rank: int) -> None:
        """Forget where a rank was."""
        self._whereabouts.pop(rank, None)

    def blame(self, rank: int, cause: str) -> None:
        """Record that a rank has failed, if it is the first one."""
        if self.fault is None:
            self.fault = Fault(rank, cause)

    def _group(self, rank: int, message: dict[str, Any]) -> frozenset[int]:
        """Return the ranks of a message, and its sender, as one set that all ranks of a group share."""

        def is_range(value: Any) -> bool:
            is_pair = isinstance(value, list) and [type(rank) for rank in value] == [int, int]
            return is_pair and 0 <= value[0] <= value[1] < self.world_size

        on = message.get("on")
        if not isinstance(on, list) or not all(map(is_range, on)):
            raise ValueError(f"on: expected ranges of ranks below {self.world_size}, got {on!r:.40}")
        group = read_ranks(merged([*on, [rank, rank]]))
        if len(group) < 2:
            raise ValueError(f"on: expected other ranks than the own one, got {on!r:.40}")
        return group

    def _take_calls(self, rank: int, message: dict[str, Any], now: float) -> bool:
        """Read the numbers of the rank's collectives in a message; return whether it has any."""
        if "in" not in message:
            return False
        stage = RankStage(
            _read_text(message, "in"), _read_seconds(message, "limit"), _read_text(message, "key")
        )
        numbers = message.get("calls")
        if not isinstance(numbers, dict) or any(type(number) is not int for number in numbers.values()):
            raise ValueError(f"calls: expected whole numbers by process group, got {numbers!r:.40}")
        self._calls.hear(rank, stage, numbers, now)
        return True

    def _look_at_calls(self, now: float) -> None:
        """Blame a rank that is late in a collective for too long: [Note: late in a collective]."""
        if now < self._calls_due:
            return
        self._calls_due = now + CALLS_LOOK_S
        derived = self._calls.waits()
        for rank in [
            rank for rank, wait in self._waits.of.items() if not wait.is_own and rank not in derived
        ]:
            self._waits.end(rank)
        for rank, derived_wait in derived.items():
            known = self._waits.of.get(rank)
            if now - derived_wait.since < self.heartbeat_timeout_s / 2 or (
                known is not None and known.is_own
            ):
                continue
            group = derived_wait.behind | {rank}
            if known is None or (known.place, known.since, known.group) != (
                derived_wait.place,
                derived_wait.since,
                group,
            ):
                self._waits.begin(
                    rank,
                    ReportedWait(
                        group, derived_wait.place, derived_wait.what, derived_wait.since, is_own=False
                    ),
                )
        for rank, wait in list(self._waits.of.items()):
            if wait.is_own or self.fault is not None:
                continue
            end = self._waits.find_end(rank)
            limit_s, key = self._get_limit(wait, end.rank)
            if end.rank not in self._left and now - wait.since > limit_s:
                cause = f"it did not come to {wait.what} within {limit_s:g} s ({key})"
                self._settle(rank, Accusation(now, wait.group, cause))

    def _get_limit(self, wait: ReportedWait, late: int) -> tuple[float, str]:
        """Return the time limit of a wait that ends at the rank `late`, and the JSON key that sets it."""
        if wait.is_own:
            return wait.limit_s, wait.key
        stage = self._calls.stage(late, wait.since)
        return (math.inf, "") if stage is None else (stage.limit_s, stage.key)

    def _find_rank_behind(self, circle: tuple[int, ...], group: frozenset[int]) -> int | None:
        """Return the first rank of `group` that has begun fewer collectives than ranks of a circle of waits.

        All ranks may wait in one call that is watched as a whole; the late one is in it, too.
        """
        ahead = self._calls.waits()
        behind = frozenset[int]().union(*(ahead[rank].behind for rank in circle if rank in ahead))
        return min((behind & group) - ahead.keys(), default=None)

    def _look_for_silence(self, now: float) -> None:
        for rank, heard in self.heard.items():
            silent = now - heard
            if silent > self.heartbeat_timeout_s and rank not in self._left:
                self.blame(rank, f"no heartbeat for {silent:.1f} s: it is stopped, or cut off")
        # Ranks join together, once all are known to be there: one that others do not follow is late.
        limit = max(JOIN_S, self.heartbeat_timeout_s)
        if self.heard and now - self._last_join > limit and (missing := self._find_missing()) is not None:
            self.blame(missing, f"it did not join the monitor within {limit:g} s: it is stopped, or cut off")

    def _look_for_early_leavers(self, now: float) -> None:
        if not self._left:
            return
        for rank, wait in self._waits.of.items():
            last = self._waits.find_end(rank).rank
            if last in self._left and now > LEFT_S + max(self._left[last], wait.since):
                self.blame(last, f"it left (its process exited) while others were waiting at {wait.what}")
                return

    def _look_at_broken(self, now: float) -> None:
        """Where a collective that is not ours has failed, blame who left first, else who never joined.

        A rank that has not joined is blamed `GRACE_S` after the last one did: ranks join at about one time.
        """
        if self._broken is None or now < max(self._broken[0], self._last_join + GRACE_S):
            return
        cause, self._broken = self._broken[1], None
        if self._left:
            first = next(iter(self._left))
            self.blame(first, f"it left (its process exited) while others were at work: {cause}")
        elif (missing := self._find_missing()) is not None:
            self.blame(
                missing, f"it did not join the monitor, and a collective of the others failed: {cause}"
            )

    def _find_missing(self) -> int | None:
        return next((rank for rank in range(self.world_size) if rank not in self.heard), None)

    def _settle(self, by: int, accusation: Accusation) -> None:
        """Decide whom an accusation is true of."""
        # A rank that waits for one that waits itself is no witness: the end of the chain counts.
        end, accused, cause = self._waits.find_end(by), min(accusation.group - {by}), accusation.cause
        if not end.circle:
            culprit = accused if end.rank == by else end.rank
            at = self._whereabouts.get(culprit)
            self.blame(culprit, f"{cause}; it was in {at}" if at else cause)
            return
        hung = self._find_rank_behind(end.circle, accusation.group)
        if hung is not None:
            self.blame(hung, cause)
            return
        waits = {rank: self._waits.of[rank] for rank in end.circle}
        usual = Counter(wait.place for wait in waits.values()).most_common(1)[0][0]
        # In a circle every rank waits: blame the one at another call or hop than most.
        odd = [rank for rank, wait in waits.items() if wait.place != usual]
        first = sorted(end.circle)[:8]  # a message is for people
        where = ", ".join(f"rank {rank} at {waits[rank].what}" for rank in first)
        remainder = f" and {len(waits) - len(first)} more" if len(waits) > len(first) else ""
        self.blame(odd[0] if odd else accused, f"{cause}; ranks wait for each other: {where}{remainder}")


def _read_text(message: dict[str, Any], key: str) -> str:
    text = message.get(key)
    if not isinstance(text, str):
        raise ValueError(f"{key}: expected a text, got {text!r:.40}")
    return text[:TEXT_CHARACTERS]


def _read_seconds(message: dict[str, Any], key: str) -> float:
    seconds = message.get(key)
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise ValueError(f"{key}: expected seconds above 0, got {seconds!r:.40}")
    return float(seconds)
