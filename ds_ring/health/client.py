"""Connect a rank to the failure detector: send heartbeats, report waits, and hear who failed.

The monitor process (`failure_detector/`) decides who failed. Ranks here are world ranks.

[Note: last resort]
No exception can reach a rank that is stuck in somebody else's collective. Under `ds_ring.initialize` such a
rank prints its stacks and ends, `hop_timeout_seconds` after the fault. After a fault a mesh is broken, and
every later call on it raises the reason. Buffers of a wait that does not complete are never freed.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import math
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from ds_ring.health.failure_detector.wire import Fault, write_ranges
from ds_ring.health.stuck_waits import clients_of_process
from ds_ring.health.whereabouts import collective_calls, describe_place, get_default_group_id, get_group_names
from ds_ring.limits import Limit

LINGER_S = 1.5
BEATS_PER_TIMEOUT = 5
log = logging.getLogger(__name__)


class LateNotice(NamedTuple):
    """Say that others have waited for a rank, longer than a tenth of the limit.

    Attributes:
        rank: the late one, of the world.
        what: for what the others wait.
        seconds: so far.
        limit: after which the rank counts as failed.
        at: where in its program it is; "" if it did not answer.
    """

    rank: int
    what: str
    seconds: float
    limit: Limit
    at: str

    def __str__(self) -> str:
        where = f", and is in {self.at}" if self.at else ""
        return (
            f"rank {self.rank} is late: others have waited {self.seconds:.1f} s for it at {self.what}{where};"
            f" it counts as failed after {round(self.limit.seconds, 1):g} s ({self.limit.key})"
        )


class DetectorClient:
    """Keep this rank's connection to the monitor process, by a thread.

    Args:
        rank: of the world.
        connection: to the monitor, authenticated.
        detector_rank: the rank on whose host the monitor is.
        heartbeat_timeout_s: the monitor's: a rank that is silent for so long has failed.
        exit_after_s: see below.

    Attributes:
        fault: who failed first, once that is known; it stays.
        noticed: an error about it was raised here.
        exit_after_s: seconds after a fault within which it must have been noticed; see `_end_process`. None
            leaves the process alone.
        on_late: called, in this client's thread, with a notice that a rank is late (this one, or another one
            if this rank reports it), and with that rank's number once it continues.
    """

    def __init__(
        self,
        rank: int,
        connection: socket.socket,
        detector_rank: int,
        heartbeat_timeout_s: float,
        exit_after_s: float | None = None,
    ) -> None:
        self.rank, self.heartbeat_timeout_s = rank, heartbeat_timeout_s
        self.fault: Fault | None = None
        self.noticed, self.exit_after_s = False, exit_after_s
        self.on_late: Callable[[LateNotice | int], object] = log_late
        self._stage: tuple[str, Limit] | None = None
        self._leaves_at = math.inf
        self._sent_calls: dict[str, int] = {}
        self._not_compared: set[str] = set()
        self._thread, self._group = threading.get_ident(), get_default_group_id()
        self._host = detector_rank
        self._since = 0.0  # when the fault was known here
        # A garbage collection may say goodbye for a mesh while this very thread is in here: reentrant.
        self._lock, self._sending = threading.RLock(), threading.RLock()
        self._waiting: set[threading.Event] = set()
        self._connection = connection
        self._connection.settimeout(heartbeat_timeout_s)
        self.is_open = True  # until this rank has left, or the monitor is lost
        threading.Thread(target=self._run, name="ds_ring detector", daemon=True).start()
        clients_of_process.add(self)

    def subscribe(self, wake: threading.Event) -> None:
        """Set this event when a fault becomes known."""
        with self._lock:
            self._waiting.add(wake)
        if self.fault is not None:
            wake.set()

    def unsubscribe(self, wake: threading.Event) -> None:
        with self._lock:
            self._waiting.discard(wake)

    def report_wait(
        self, on: Sequence[int], place: tuple[int, int], what: str, limit: Limit | None = None
    ) -> None:
        """Report that this rank waits for the world ranks `on` at (call, hop), longer than for a moment."""
        message: dict[str, Any] = {"kind": "wait", "on": write_ranges(on), "place": place, "what": what}
        if limit is not None:
            message |= {"limit": limit.seconds, "key": limit.key}
        self._send(message)

    def report_collectives(self, what: str, limit: Limit) -> None:
        """Report from now on how many collectives of torch.distributed this rank has begun, and where it is.

        So the monitor names a rank that keeps others waiting in a collective that is not ds_ring's for longer
        than its `limit`: [Note: late in a collective] in `collective_calls.py`. The calling thread is the one
        that makes the collectives. `what` and `limit` hold outside of `within`.
        """
        self._thread, self._group = threading.get_ident(), get_default_group_id()
        self._stage = what, limit

    def exclude_groups(self, groups: Iterable[object]) -> None:
        """Leave process groups out of that comparison: their ranks send and receive."""
        self._not_compared |= get_group_names(groups)

    @contextmanager
    def within(self, what: str, limit: Limit) -> Iterator[None]:
        """Report `what` this rank does inside the block, and how long others may wait for it there."""
        before = self._stage
        if before is not None:
            self._stage = what, limit
        try:
            yield
        finally:
            self._stage = before

    def wait_done(self) -> None:
        """Report that the wait is over."""
        self._send({"kind": "go"})

    def report_timeout(self, on: Sequence[int], cause: str) -> None:
        """Report that the ranks `on` are late, or a connection failed: the monitor decides who failed."""
        self._send({"kind": "timeout", "on": write_ranges(on), "cause": cause})

    def report_broken_collective(self, cause: str) -> None:
        """Report that a collective that is not ours has failed here: the monitor decides who is to blame."""
        self._send({"kind": "broken", "cause": cause[:300]})

    def report_failure(self, cause: str) -> None:
        """Report that this rank has failed in a way that leaves the others waiting."""
        self._send({"kind": "failed", "cause": cause})
        self._record_fault(Fault(self.rank, cause))

    def leave(self, ends: bool = False) -> None:
        """Send a goodbye and end the connection; `ends`: the process ends, too."""
        if self.is_open:
            # Others may be in a collective that a process which ends will never begin.
            self._send({"kind": "bye"} | (self._read_calls() if ends else {}))
            self._close()
        clients_of_process.discard(self)

    def leave_later(self) -> None:
        """Leave as a mesh that is garbage does.

        A process that ends by SystemExit drops its meshes first. If collectives are watched, the goodbye is
        sent after LINGER_S, so that it can report the end of the process: others may be in a collective.
        """
        if self._stage is None:
            self.leave()
        else:
            self._leaves_at = time.monotonic() + LINGER_S

    # [Note: the end of a process]
    # An orderly exit sends a goodbye; after an uncaught exception it has the exception. A killed process
    # sends nothing, and the monitor sees the end of its connection. After a fault a process lingers for a
    # moment before it ends, so that a launcher that ends all ranks as soon as one is gone does not hide the
    # culprit's traceback. A thread that is stuck in a wait of torch cannot be ended, and would keep the
    # interpreter from shutting down: then the process ends without shutting it down, with exit code 1.
    def end(self) -> None:
        """Name who failed, if no error here did; wait until others had time to say what they saw; leave."""
        if self.fault is not None:
            if not self.noticed and self.fault.rank != self.rank:
                text = "rank %d ends; rank %d had failed before: %s"
                log.error(text, self.rank, self.fault.rank, self.fault.cause)
            time.sleep(max(0.0, self._since + LINGER_S - time.monotonic()))
        self.leave(ends=True)

    def forget(self) -> None:
        """Close the connection without a goodbye: the process that made it uses it on."""
        self.is_open = False
        self._connection.close()

    def _record_fault(self, fault: Fault) -> None:
        with self._lock:
            if self.fault is None:
                self.fault, self._since = fault, time.monotonic()
                if self.exit_after_s is not None:
                    timer = threading.Timer(self.exit_after_s, self._end_process)
                    timer.daemon = True
                    timer.start()
            waiting = list(self._waiting)
        for wake in waiting:
            wake.set()

    def _end_process(self) -> None:
        """End a process that is stuck where no error can be raised: in a collective of somebody else."""
        if self.is_open and not self.noticed and self.fault is not None:
            faulthandler.dump_traceback(all_threads=True)
            # The last line of the output, which is read first: who failed, not where this rank stood.
            log.critical(
                "rank %d ends: rank %d has failed (%s), and this rank has not noticed for %.0f s, in a"
                " collective outside ds_ring perhaps; its stacks stand above",
                self.rank, self.fault.rank, self.fault.cause, self.exit_after_s,
            )  # fmt: skip
            logging.shutdown()
            os._exit(1)

    def _read_calls(self) -> dict[str, Any]:
        """Return the collectives' part of a heartbeat: nothing, if they are not watched."""
        stage = self._stage
        if stage is None or get_default_group_id() != self._group:
            return {}
        calls = collective_calls(self._not_compared)
        changed = {name: number for name, number in calls.items() if self._sent_calls.get(name) != number}
        self._sent_calls = calls
        what, limit = stage
        return {"in": what, "limit": limit.seconds, "key": limit.key, "calls": changed}

    def _hear(self, message: dict[str, Any]) -> None:
        """Act on a message of the monitor."""
        kind = message["kind"]
        if kind == "fault":
            self._record_fault(Fault(message["rank"], message["cause"]))
        elif kind == "where":
            self._send({"kind": "at", "text": describe_place(self._thread)})
        elif kind == "late":
            limit = Limit(message["limit_s"], message["key"])
            self.on_late(LateNotice(message["rank"], message["what"], message["since"], limit, message["at"]))
        elif kind == "on time":
            self.on_late(int(message["rank"]))

    def _send(self, message: dict[str, Any]) -> None:
        with self._sending, suppress(OSError):  # the reader notices, too, and reports it
            if self.is_open:
                self._connection.sendall(json.dumps(message).encode() + b"\n")

    def _close(self) -> None:
        self.is_open = False
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes the reader
        self._connection.close()

    def _run(self) -> None:
        """Send heartbeats and listen. The monitor answers each: silence means that its host is lost."""
        interval = self.heartbeat_timeout_s / BEATS_PER_TIMEOUT
        unread = b""
        answered = before = next_beat = time.monotonic()
        selector = selectors.DefaultSelector()
        selector.register(self._connection, selectors.EVENT_READ)
        while self.is_open:
            now = time.monotonic()
            if now - before > 2 * interval + 0.5:  # this process was not running: no fault of the monitor's
                answered += now - before
            before = now
            if now >= self._leaves_at:
                self.leave()
                return
            if now >= next_beat:
                next_beat = now + interval
                self._send({"kind": "beat"} | self._read_calls())
            if now - answered > self.heartbeat_timeout_s:
                self._lose_the_monitor(f"no answer for {now - answered:.1f} s")
                return
            if not selector.select(max(0.0, next_beat - now)):
                continue
            try:
                data = self._connection.recv(65536)
            except OSError:  # reset, or closed by this process
                data = b""
            if not data:
                self._lose_the_monitor("the connection ended")
                return
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                answered = time.monotonic()
                self._hear(json.loads(line))

    def _lose_the_monitor(self, how: str) -> None:
        if self.is_open and self.fault is None:
            what = f"the host of rank {self._host}, where the monitor process is, is lost: {how}"
            self._record_fault(Fault(self._host, what))
        self._close()


def log_late(notice: LateNotice | int) -> None:
    """Log that a rank is late, or that it continues."""
    if isinstance(notice, int):
        log.warning("rank %d goes on", notice)
    else:
        log.warning("%s", notice)
