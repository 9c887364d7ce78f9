"""Decide who failed first, from what the ranks say and from their silence.

Pure: every event comes with its time, in seconds; the sockets are `server.py`'s. There is one detector for a
job, so the first fault wins and every survivor names the same culprit. [Note: who is to blame] in `waits.py`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .waits import CallAndHop, ReportedWait, Waits, merged, ranks_of

GRACE_S = 0.5  # a late or broken wait is judged after this: the deaths behind it are heard first
LEFT_S = 1.0  # somebody still waits so long after a rank said goodbye: it left too early
JOIN_S = 2.0  # all ranks join within this or the heartbeat timeout of the first one: they wait to be let in
TEXT_CHARACTERS = 1000  # of a cause, or of the name of a place


class Fault(NamedTuple):
    """Name who failed, by world rank, and what was seen."""

    rank: int
    cause: str


@dataclass
class RankState:
    """Hold what is known of a rank."""

    heard: float
    left: float | None = None


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
    ranks: dict[int, RankState] = field(default_factory=dict)
    fault: Fault | None = None
    _first_join: float = 0.0
    _waits: Waits = field(default_factory=Waits)
    _accusations: dict[int, Accusation] = field(default_factory=dict)  # the first one of each rank
    _leavers: set[int] = field(default_factory=set)
    _broken: tuple[float, str] | None = None  # when to judge the first report of a broken collective

    def join(self, rank: int, now: float) -> None:
        """Note that a rank is here from now on."""
        self._first_join = self._first_join if self.ranks else now
        self.ranks[rank] = RankState(now)

    def hear(self, rank: int, message: Any, now: float) -> None:
        """Take one message of a rank that has joined."""
        self.ranks[rank].heard = now
        kind = message.get("kind") if isinstance(message, dict) else None
        if kind == "wait":
            wait = ReportedWait(
                self._group(rank, message), _place_in(message), _text_in(message, "what"), now
            )
            self._waits.begin(rank, wait)
        elif kind == "go":
            self._waits.end(rank)
        elif kind == "accuse":
            accusation = Accusation(now + GRACE_S, self._group(rank, message), _text_in(message, "cause"))
            # A rank's later accusations follow from its first.
            self._accusations.setdefault(rank, accusation)
        elif kind == "broken":
            self._broken = self._broken or (now + GRACE_S, _text_in(message, "cause"))
        elif kind == "failed":
            self.blame(rank, _text_in(message, "cause"))
        elif kind == "bye":
            self.ranks[rank].left = now
            self._leavers.add(rank)
            self._waits.end(rank)
        elif kind != "beat":
            raise ValueError(f"expected a message of a rank, got the kind {kind!r:.40}")

    def close(self, rank: int) -> None:
        """Blame a rank whose connection ended without a goodbye."""
        if self.ranks[rank].left is None:
            self.blame(rank, "its process ended without a goodbye (killed, aborted or crashed)")

    def forgive(self, seconds: float) -> None:
        """Excuse all ranks for a time in which the monitor itself was not running."""
        self._first_join += seconds
        for state in self.ranks.values():
            state.heard += seconds

    def look(self, now: float) -> Fault | None:
        """Return the first fault, if there is one by now."""
        if self.fault is None:
            self._look_for_silence(now)
            self._look_for_early_leavers(now)
            self._look_at_broken(now)
            for rank, accusation in list(self._accusations.items()):
                if accusation.due <= now and self.fault is None:
                    del self._accusations[rank]
                    self._settle(rank, accusation)
        return self.fault

    def blame(self, rank: int, cause: str) -> None:
        """Record that a rank has failed, if it is the first one."""
        if self.fault is None:
            self.fault = Fault(rank, cause)

    def _group(self, rank: int, message: dict[str, Any]) -> frozenset[int]:
        """Return the ranks of a message, and its sender, as one set that all ranks of a group share."""
        on = message.get("on")
        if not isinstance(on, list) or not all(_is_range(one, self.world_size) for one in on):
            raise ValueError(f"on: expected ranges of ranks below {self.world_size}, got {on!r:.40}")
        group = ranks_of(merged([*on, [rank, rank]]))
        if len(group) < 2:
            raise ValueError(f"on: expected other ranks than the own one, got {on!r:.40}")
        return group

    def _look_for_silence(self, now: float) -> None:
        for rank, state in self.ranks.items():
            silent = now - state.heard
            if silent > self.heartbeat_timeout_s and state.left is None:
                self.blame(rank, f"no heartbeat for {silent:.1f} s: it is stopped, or cut off")
        # Ranks join together, once all are known to be there: a late one has failed.
        limit = max(JOIN_S, self.heartbeat_timeout_s)
        if self.ranks and len(self.ranks) < self.world_size and now - self._first_join > limit:
            missing = next(rank for rank in range(self.world_size) if rank not in self.ranks)
            self.blame(missing, f"it did not join the monitor within {limit:g} s: it is stopped, or cut off")

    def _look_for_early_leavers(self, now: float) -> None:
        if not self._leavers:
            return
        for rank, wait in self._waits.of.items():
            last = self._waits.end_of(rank).rank
            left = self.ranks[last].left if last in self.ranks else None
            if left is not None and now > LEFT_S + max(left, wait.since):
                self.blame(last, f"it left (its process exited) while others were waiting at {wait.what}")
                return

    def _look_at_broken(self, now: float) -> None:
        """Blame whoever left first, if any has, where a collective that is not ours has failed."""
        if self._broken is not None and self._broken[0] <= now:
            cause, self._broken = self._broken[1], None
            if self._leavers:
                first = min(self._leavers, key=lambda rank: self.ranks[rank].left or 0.0)
                self.blame(first, f"it left (its process exited) while others were at work: {cause}")

    def _settle(self, by: int, accusation: Accusation) -> None:
        """Decide whom an accusation is true of."""
        # A rank that waits for one that waits itself is no witness: the end of the chain counts.
        end, accused, cause = self._waits.end_of(by), min(accusation.group - {by}), accusation.cause
        if not end.circle:
            self.blame(accused if end.rank == by else end.rank, cause)
            return
        waits = {rank: self._waits.of[rank] for rank in end.circle}
        usual = Counter(wait.place for wait in waits.values()).most_common(1)[0][0]
        # In a circle nobody waits for nobody: the rank at another place than most took a wrong turn.
        odd = [rank for rank, wait in waits.items() if wait.place != usual]
        first = sorted(end.circle)[:8]  # a message is for people
        where = ", ".join(f"rank {rank} at {waits[rank].what}" for rank in first)
        more = f" and {len(waits) - len(first)} more" if len(waits) > len(first) else ""
        self.blame(odd[0] if odd else accused, f"{cause}; ranks wait for each other: {where}{more}")


def _is_range(value: object, world_size: int) -> bool:
    if not isinstance(value, list) or len(value) != 2 or not all(type(rank) is int for rank in value):
        return False
    return 0 <= value[0] <= value[1] < world_size


def _place_in(message: dict[str, Any]) -> CallAndHop:
    place = message.get("place")
    if not isinstance(place, list) or len(place) != 2 or not all(type(number) is int for number in place):
        raise ValueError(f"place: expected two whole numbers, got {place!r:.40}")
    return place[0], place[1]


def _text_in(message: dict[str, Any], key: str) -> str:
    text = message.get(key)
    if not isinstance(text, str):
        raise ValueError(f"{key}: expected a text, got {text!r:.40}")
    return text[:TEXT_CHARACTERS]
