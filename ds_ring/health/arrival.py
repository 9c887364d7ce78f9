"""Wait for all ranks to reach the monitor process, and for none that is dead.

Owns what ranks tell each other through the store of the process group until everybody is connected to the
monitor. What is published there, and the connection, are `rendezvous.py`'s.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import psutil

from ds_ring.health.host_addresses import Presence, presence
from ds_ring.health.monitor.failure_detector import Fault
from ds_ring.health.store import Store

if TYPE_CHECKING:
    from ds_ring.health.first_collective import FirstCollective  # which imports torch

START_S = 60.0  # of the monitor process
FIRST_LOOK_S, LOOK_S = 0.002, 0.05  # between two looks at the store
NEWCOMERS = 32  # asked for in one look
LOOK_S_PER_RANK = 1e-3  # so that one store answers 2,000 questions a second, however many ranks ask
ENDED = "its process ended while the ranks were starting (killed, or crashed)"
log = logging.getLogger(__name__)

T = TypeVar("T")


# [Note: joining]
# Every rank announces itself in the store of the process group: its host and process. When all have come,
# rank 0 starts the monitor and publishes the address; all connect. A rank that is late is waited for (it may
# load a model for minutes), one that is dead is not:
#   - who has announced itself and is on this host is asked for by its process id;
#   - where the default group is gloo, a collective of one number is under way meanwhile, which breaks in a
#     neighbour of a rank that dies: then whoever has not announced itself is that rank;
#   - once the monitor runs everybody is known to be there, so who does not join in time has failed.
# Whoever sees a death writes it down for the others.
class PeerLost(Exception):
    """Report a rank that failed before everybody had joined.

    Attributes:
        fault: which, and what was seen.
    """

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.cause)
        self.fault = fault


class Arrival:
    """Follow the ranks of a job on their way to the monitor.

    Args:
        store: of the process group.
        name: of this arrival; a process may join several times.
        rank, world_size: of the world.
        deadline: on the monotonic clock, until which all ranks must have come.
        collective: of the same ranks; None where their default group has none that breaks with a rank.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        world_size: int,
        deadline: float,
        collective: FirstCollective | None,
    ) -> None:
        self.store, self.name, self.rank, self.world_size = store, name, rank, world_size
        self.deadline, self._collective = deadline, collective
        self._mine = presence()
        self._complete_at: float | None = None  # since when all are known to have come
        self._known: dict[int, Presence] = {}
        # Rank 0 watches all, the others it and their neighbours: every death is seen by two.
        near = range(1, world_size) if rank == 0 else (0, (rank + 1) % world_size, rank - 1)
        self._unknown = deque(frozenset(near) - {rank})  # those of them that were not there yet

    def announce(self) -> None:
        """Write this rank's host and process to the store."""
        self.store.set(f"{self.name}/{self.rank}", json.dumps(self._mine))
        if self._collective is not None:
            self._collective.begin()

    def end(self) -> None:
        """Wait until the collective ends, which it does now that everybody is here."""
        if self._collective is not None:
            self._collective.end()

    def wait_for_all(self) -> None:
        """Wait until every rank has announced itself."""
        keys = [f"{self.name}/{rank}" for rank in range(self.world_size)]
        self._wait(lambda: self.store.check(keys))

    def check(self) -> None:
        """Raise PeerLost where a rank that has come has died since."""
        fault = self._or_lost(self._look)
        if fault is not None:
            raise self._tell(fault)

    def wait_for(self, key: str) -> bytes:
        """Wait until the key is there, and return its value."""
        self._wait(lambda: self.store.check([f"{self.name}/{key}"]))
        return self.store.get(f"{self.name}/{key}")

    def presences(self) -> list[Presence]:
        """Return where all ranks are, once they have come."""
        keys = [f"{self.name}/{rank}" for rank in range(self.world_size)]
        found = [Presence(*json.loads(text)) for text in self.store.multi_get(keys)]
        self._known |= {rank: found[rank] for rank in self._unknown}
        self._unknown.clear()
        return found

    def _wait(self, ready: Callable[[], bool]) -> None:
        pause_s = FIRST_LOOK_S
        while not self._or_lost(ready):
            fault = self._or_lost(self._look)
            if fault is not None:
                raise self._tell(fault)
            if time.monotonic() > self.deadline:
                missing = self._missing() or [0]
                late = "it did not come to where ds_ring starts before the deadline"
                raise self._tell(Fault(missing[0], late))
            time.sleep(pause_s)
            # The pause grows with the ranks, which all ask one store.
            pause_s = min(2 * pause_s, LOOK_S + self.world_size * LOOK_S_PER_RANK)

    def _or_lost(self, ask: Callable[[], T]) -> T:
        """Return what the store says; it is lost with the process that hosts it."""
        try:
            return ask()
        except RuntimeError as error:
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            cause = f"the process group's store is lost, and so, it seems, is the rank that hosts it: {text}"
            raise PeerLost(Fault(0, cause)) from error

    def _look(self) -> Fault | None:
        """Return who is known to be dead. Rank 0 decides as long as it lives; once all have come, the
        monitor.
        """
        # One question, not one for each key: a thousand ranks ask one store.
        fault = self._judge() if self.store.check([f"{self.name}/alarm"]) else None
        return fault or self._look_around()

    def _look_around(self) -> Fault | None:
        """Write down which deaths are seen from here; return one that needs no judge."""
        for _ in range(min(len(self._unknown), NEWCOMERS)):
            rank = self._unknown.popleft()
            if self.store.check([f"{self.name}/{rank}"]):
                self._known[rank] = Presence(*json.loads(self.store.get(f"{self.name}/{rank}")))
            else:
                self._unknown.append(rank)
        for rank, other in self._known.items():
            if not self._lives(other):
                if 0 in (rank, self.rank):
                    return Fault(rank, ENDED)
                self._write("dead", str(rank))
        if self._collective is not None and self._collective.is_broken():
            self._write("broken", "")
        return None

    def _judge(self) -> Fault | None:
        """Return whose fault it is that some rank has seen a death, if that can be told."""
        if self.store.check([f"{self.name}/fault"]):
            return Fault(*json.loads(self.store.get(f"{self.name}/fault")))
        if self.rank == 0 and self.store.check([f"{self.name}/dead"]):
            return Fault(int(self.store.get(f"{self.name}/dead")), ENDED)
        if self.store.check([f"{self.name}/broken"]):
            missing = self._missing()
            if len(missing) == 1 and 0 in (missing[0], self.rank):
                return Fault(missing[0], "its process ended before it came to where ds_ring starts")
            self._complete_at = None if missing else self._complete_at or time.monotonic()
            if self._complete_at is not None and time.monotonic() > self._complete_at + START_S:
                return Fault(0, f"it did not start the monitor process within {START_S:g} s")
        return None

    def _write(self, key: str, value: str) -> None:
        """Write down what is seen, and that there is something to read."""
        self.store.set(f"{self.name}/{key}", value)
        self.store.set(f"{self.name}/alarm", "")

    def _lives(self, other: Presence) -> bool:
        """Return False where the rank is known to be dead."""
        # A process id means something within one host and namespace only.
        if other[:2] != self._mine[:2]:
            return True
        try:
            return psutil.Process(other.pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        except psutil.NoSuchProcess:
            return False

    def _missing(self) -> list[int]:
        return [rank for rank in range(self.world_size) if not self.store.check([f"{self.name}/{rank}"])]

    def _tell(self, fault: Fault) -> PeerLost:
        try:
            self._write("fault", json.dumps(fault))
        except RuntimeError:
            log.warning("the store is lost: other ranks cannot be told that rank %d has failed", fault.rank)
        if self._collective is not None:
            self._collective.leave()
        return PeerLost(fault)
