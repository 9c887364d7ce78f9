"""Wait until all ranks are connected to the monitor process, but not for a rank that is dead.

Owns what ranks tell each other through the process group's store until all are connected to the monitor.
`rendezvous.py` owns the monitor's address, which is published there, and the connection.
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

START_S = 60.0  # time for the monitor process to start
FIRST_LOOK_S, LOOK_S = 0.002, 0.05  # between two queries of the store
NEWCOMERS = 32  # ranks whose announcement one query asks for
LOOK_S_PER_RANK = 1e-3  # so that one store answers 2,000 queries a second, however many ranks ask
ENDED = "its process ended while the ranks were starting (killed, or crashed)"
log = logging.getLogger(__name__)

T = TypeVar("T")


# [Note: joining] Every rank announces its host and process in the store of the process group. When all have
# done so, rank 0 starts the monitor and publishes its address; all ranks connect. We wait for a rank that is
# late (it may load a model for minutes), but not for one that is dead. A dead rank is found in three ways: -
# A rank that has announced itself and is on this host is checked by its process id. - If the default group is
# gloo, a collective of one number runs in the background. It breaks in a neighbour of a rank that dies. The
# rank that has not announced itself is then the dead one. - Once the monitor runs, all ranks are known to be
# there. A rank that does not join in time has failed. A rank that sees a death writes it to the store for the
# others.
class PeerLost(Exception):
    """A rank failed before all ranks had joined.

    Attributes:
        fault: the rank, and what was observed.
    """

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.cause)
        self.fault = fault


class Arrival:
    """Track the ranks of a job until they are connected to the monitor.

    Args:
        store: of the process group.
        name: of this arrival; a process may join several times.
        rank, world_size: of the world.
        deadline: time on the monotonic clock by which all ranks must have come.
        collective: a running collective of the same ranks; None if their default group has no collective that
            breaks when a rank dies.
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
        self._complete_at: float | None = None  # time at which all ranks were known to have come
        self._known: dict[int, Presence] = {}
        # Rank 0 watches all ranks; each other rank watches rank 0 and its two neighbours. So two ranks see
        # every death.
        near = range(1, world_size) if rank == 0 else (0, (rank + 1) % world_size, rank - 1)
        self._unknown = deque(frozenset(near) - {rank})  # watched ranks that have not announced themselves

    def announce(self) -> None:
        """Write this rank's host and process to the store."""
        self.store.set(f"{self.name}/{self.rank}", json.dumps(self._mine))
        if self._collective is not None:
            self._collective.begin()

    def end(self) -> None:
        """Wait for the collective, which ends now that all ranks are here."""
        if self._collective is not None:
            self._collective.end()

    def wait_for_all(self) -> None:
        """Wait until every rank has announced itself."""
        keys = [f"{self.name}/{rank}" for rank in range(self.world_size)]
        self._wait(lambda: self.store.check(keys))

    def check(self) -> None:
        """Raise PeerLost if a rank that had come has died since."""
        fault = self._or_lost(self._look)
        if fault is not None:
            raise self._tell(fault)

    def wait_for(self, key: str) -> bytes:
        """Wait until the key is in the store, and return its value."""
        self._wait(lambda: self.store.check([f"{self.name}/{key}"]))
        return self.store.get(f"{self.name}/{key}")

    def presences(self) -> list[Presence]:
        """Return host and process of all ranks, once they have come."""
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
            # The pause grows with the number of ranks, because all of them query one store.
            pause_s = min(2 * pause_s, LOOK_S + self.world_size * LOOK_S_PER_RANK)

    def _or_lost(self, ask: Callable[[], T]) -> T:
        """Return the result of a query.

        Raise PeerLost if the store is lost with the process that hosts it.
        """
        try:
            return ask()
        except RuntimeError as error:
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            cause = f"the process group's store is lost, and so, it seems, is the rank that hosts it: {text}"
            raise PeerLost(Fault(0, cause)) from error

    def _look(self) -> Fault | None:
        """Return the rank that is known to be dead, if any.

        Rank 0 decides which rank that is, as long as it lives; after all ranks have come, the monitor
        decides.
        """
        # One query for all keys, because a thousand ranks query one store.
        fault = self._judge() if self.store.check([f"{self.name}/alarm"]) else None
        return fault or self._look_around()

    def _look_around(self) -> Fault | None:
        """Write the deaths that this rank sees to the store; return one that rank 0 need not decide on."""
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
        """Return the rank that failed first, if the deaths written to the store tell."""
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
        """Write what this rank saw, and set the alarm key so that others read it."""
        self.store.set(f"{self.name}/{key}", value)
        self.store.set(f"{self.name}/alarm", "")

    def _lives(self, other: Presence) -> bool:
        """Return False if the rank is known to be dead."""
        # A process id is valid within one host and namespace only.
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
