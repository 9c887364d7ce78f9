"""Wait for torch's works without hanging: with a deadline, a failure detector and a helper thread.

Owns the wait and the error that it raises. The exchange owns the works.
"""

from __future__ import annotations

import atexit
import datetime
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from ds_ring.comm.mesh import RingMesh
from ds_ring.compat.torch import DEVICE_ERROR
from ds_ring.errors import RingPeerError
from ds_ring.health.failure_detector.wire import Fault
from ds_ring.health.stuck_waits import PATIENCE_S, keep_for_ever, make_peer_error, verdict
from ds_ring.limits import MAX_SECONDS, Limit

if TYPE_CHECKING:
    from ds_ring.health.client import DetectorClient

_HOP_KEYS = "hop_timeout_seconds; first_pass_timeout_seconds in a GPU's first pass of a shape"
FOR_EVER = datetime.timedelta(seconds=MAX_SECONDS)
POLL_S, POLL_SELDOM_S = 1e-3, 0.02  # between two queries of an event: at first, and later on


class CallSite(NamedTuple):
    """The place in the program at which a wait happens: the number of the call, and the hop.

    `operation`: its name and the JSON key of its time limit; None for a pass.
    """

    call: int
    hop: int | None
    operation: tuple[str, str] | None = None

    def __str__(self) -> str:
        if self.operation is not None:
            return self.operation[0]
        return f"call {self.call}, " + ("before its first hop" if self.hop is None else f"hop {self.hop}")

    @property
    def key(self) -> tuple[int, int]:
        return self.call, -1 if self.hop is None else self.hop

    @property
    def limit_key(self) -> str:
        return _HOP_KEYS if self.operation is None else self.operation[1]


class Task:
    """A function that runs in one of the waiting threads.

    Attributes:
        wake: set at the end.
        error: what the function raised.
    """

    def __init__(self, act: Callable[[], None]) -> None:
        self._act, self.wake = act, threading.Event()
        self.error: BaseException | None = None

    def start(self) -> Task:
        """Start the function and return at once."""
        _waiters.start(self)
        return self

    def run(self) -> None:
        """Run the function; called by the thread."""
        try:
            self._act()
        except BaseException as error:
            self.error = error
        self.wake.set()

    def result(self) -> None:
        """Wait for the end and raise what the function raised. The function needs a deadline of its own."""
        self.wake.wait()
        if self.error is not None:
            raise self.error


class _WaitTask(Task):
    """Works that a thread waits for, one after the other.

    Attributes:
        arrived: for a device's works, returns whether the device has passed them; None if the host waits.
        poll_fast: set while a caller waits for the result, so that the thread queries more often.
        done: number of the works that are complete.
        over: all works are complete, or one has failed. (`wake` is set by the monitor, too.)
    """

    def __init__(
        self,
        works: Sequence[dist.Work],
        arrived: Callable[[], bool] | None = None,
        poll_fast: threading.Event | None = None,
    ) -> None:
        self.works, self.arrived, self.poll_fast = works, arrived, poll_fast or threading.Event()
        self.wake, self.done, self.over, self.error = threading.Event(), 0, False, None

    def run(self) -> None:
        """Wait for all works, or until the first error."""
        try:
            for work in self.works:
                # The caller has the deadline; torch's own timeout must not fire first.
                work.wait(FOR_EVER)
                self.done += 1
        except RuntimeError as error:
            self.error = error
        self.over = True
        self.wake.set()

    def ask(self) -> bool:
        """Query a device once, without blocking; return whether there is nothing more to wait for."""
        assert self.arrived is not None
        try:
            # Query `is_completed` after the event: [Note: queries from another thread] in cuda/streams.py.
            while not self.over and self.arrived() and self.works[self.done].is_completed():
                self.works[self.done].wait()  # raises the error that NCCL found; does not block
                self.done += 1
                self.over = self.done == len(self.works)
        except RuntimeError as error:
            self.error, self.over = error, True
        return self.over

    def pause(self, seconds: float) -> None:
        """Wait until the job is over, its event is set, or the time is over."""
        if self.arrived is None:
            self.wake.wait(max(0.0, seconds))
        else:
            poll(lambda: self.wake.is_set() or self.ask(), seconds, self.poll_fast)

    def select_awaited(self, peers: Sequence[Sequence[int]]) -> Sequence[int]:
        """Return those of each work's ranks on which the first unfinished work depends."""
        return peers[min(self.done, len(peers) - 1)]


class _Waiters:
    """A pool of threads that wait: a free thread is reused, a blocked one is replaced."""

    def __init__(self) -> None:
        self._free: list[SimpleQueue[Task | None]] = []
        self.threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def start(self, job: Task) -> None:
        with self._lock:
            queue = self._free.pop() if self._free else None
            if queue is None:
                queue = SimpleQueue()
                # A daemon thread, because a blocked one must not delay the end of the process.
                name = "ds_ring waiter"
                thread = threading.Thread(target=self._serve, args=(queue,), name=name, daemon=True)
                self.threads.append(thread)
                thread.start()
        queue.put(job)

    def _serve(self, queue: SimpleQueue[Task | None]) -> None:
        while (job := queue.get()) is not None:
            job.run()
            del job  # else its works and buffers stay alive until the next job
            with self._lock:
                self._free.append(queue)

    def end(self) -> None:
        """End the threads that are free or will be soon; see [Note: threads at exit]."""
        deadline = time.monotonic() + PATIENCE_S
        while any(thread.is_alive() for thread in self.threads) and time.monotonic() < deadline:
            with self._lock:
                free, self._free = self._free, []
            for queue in free:
                queue.put(None)
            time.sleep(0.001)


_waiters = _Waiters()
# [Note: threads at exit] If a daemon thread needs the interpreter during its shutdown, Python ends the thread
# by pthread_exit. If the thread is inside torch then (deleting a Work or a tensor), this ends the process
# with "terminate called without an active exception" (CPython issue 87135, torch 2.13). So end all threads
# before.
atexit.register(_waiters.end)


# [Note: a wait that can be left] Nothing interrupts a wait in gloo: it does not tell a waiting rank that its
# peer was killed in the middle of a large message, or was stopped. So a helper thread waits for the works,
# and the caller waits for that thread, for the deadline or for the detector, whichever comes first. A thread
# that is blocked is abandoned, together with the buffers to which torch may still write. If the works
# complete, the wait never raises: the data that arrived are used, and a fault is raised by the next wait that
# does not complete.
def wait_for(
    works: Sequence[dist.Work],
    peers: Sequence[Sequence[int]],
    mesh: RingMesh,
    site: CallSite,
    deadline: float,
    arrived: Callable[[], bool] | None = None,
    poll_fast: threading.Event | None = None,
) -> None:
    """Wait for works until the deadline; see [Note: a wait that can be left].

    Args:
        works: one or more, in approximately the order in which they complete.
        peers: for each work the world ranks that it depends on.
        mesh, site: the ranks and process groups, and the call and the hop of the wait.
        deadline: on the monotonic clock, seconds.
        arrived, poll_fast: see `_WaitTask`: NCCL's works, whose wait does not block.

    Raises:
        RingPeerError: a rank failed, or the deadline passed; names the rank at fault.
    """
    job, detector = _WaitTask(works, arrived, poll_fast), mesh.detector
    limit_s = max(deadline - time.monotonic(), PATIENCE_S)
    # Tell the monitor only about waits longer than PATIENCE_S.
    if arrived is None:
        _waiters.start(job)
        job.wake.wait(PATIENCE_S)
    else:
        job.pause(min(PATIENCE_S, deadline - time.monotonic()))
    if not job.over and detector is None:
        job.pause(deadline - time.monotonic())
    elif (not job.over or job.error is not None) and detector is not None:
        # The monitor's verdict sets the same event as the end of the works, so it ends the wait, too.
        detector.subscribe(job.wake)
        try:
            _wait_watched(job, detector, peers, site, Limit(limit_s, site.limit_key), deadline)
        finally:
            detector.unsubscribe(job.wake)
    if job.over and job.error is None:
        return
    if not job.over:
        # torch may still write to the buffers, so they must never be freed.
        keep_for_ever(job)
        mesh.state.abandoned = True
    if isinstance(job.error, DEVICE_ERROR):
        raise get_own_fault(mesh, site, job.error) from job.error
    raise blame(mesh, site.hop, job.select_awaited(peers), describe_cause(job.error, site)) from job.error


def _wait_watched(
    job: _WaitTask,
    detector: DetectorClient,
    peers: Sequence[Sequence[int]],
    site: CallSite,
    limit: Limit,
    deadline: float,
) -> None:
    """Tell the monitor, and wait until the works are done, a fault is known or the deadline passes."""
    told: Sequence[int] | None = None
    while not job.over and detector.fault is None and (left_s := deadline - time.monotonic()) > 0:
        # Compare by identity: each work has its own entry in `peers`, even if two entries are equal.
        if told is not job.select_awaited(peers):
            told = job.select_awaited(peers)
            detector.report_wait(told, site.key, str(site), limit)
        # Wait at most one second at a time: no event is set when one of several works is done.
        job.pause(min(left_s, 1.0))
    if detector.fault is not None:
        # Use data that arrive within this time; a later wait raises the fault.
        poll(lambda: job.over, PATIENCE_S if job.arrived is None else 0.0, job.poll_fast)
    # If the device failed, the fault is this rank's own, so do not blame the others.
    elif (not job.over or job.error is not None) and not isinstance(job.error, DEVICE_ERROR):
        detector.report_wait(job.select_awaited(peers), site.key, str(site))
        detector.report_timeout(job.select_awaited(peers), describe_cause(job.error, site))
    if told is not None and job.over and job.error is None:
        detector.wait_done()


def poll(true: Callable[[], bool], seconds: float, poll_fast: threading.Event) -> bool:
    """Poll until something is true or the time is over, at growing intervals unless `poll_fast` is set."""
    end, pause_s = time.monotonic() + seconds, POLL_S
    while not true():
        left_s = end - time.monotonic()
        if left_s <= 0:
            return False
        if poll_fast.is_set():
            time.sleep(min(POLL_S, left_s))
        else:
            poll_fast.wait(min(pause_s, left_s))
            pause_s = min(2 * pause_s, POLL_SELDOM_S)
    return True


def describe_cause(error: BaseException | None, site: CallSite) -> str:
    """Return why a wait failed, for messages: the error of torch, or the deadline."""
    if error is not None:
        return f"the connection to it failed at {site}: {first_line(error)}"
    return f"it did not come to {site} before the deadline ({site.limit_key})"


def blame(mesh: RingMesh, hop: int | None, peers: Sequence[int], cause: str) -> RingPeerError:
    """Return the error for a failed wait: the monitor's verdict, or else this rank's own view."""
    fault = None if mesh.detector is None else verdict(mesh.detector)
    if fault is not None:
        return make_fault_error(mesh, hop, fault)
    peer = mesh.ring_rank_of(peers[0]) if len(peers) == 1 else None
    return RingPeerError(mesh.ring_rank, hop, peer, cause)


def check_alive(mesh: RingMesh, hop: int | None) -> None:
    """Raise RingPeerError if a rank, or a message between GPUs, has failed: the mesh cannot be used again."""
    if mesh.detector is not None and mesh.detector.fault is not None:
        raise make_fault_error(mesh, hop, mesh.detector.fault)
    # The same error object is raised by all calls: without this each raise would lengthen its traceback.
    if mesh.state.broken is not None:
        raise mesh.state.broken.with_traceback(None)


def get_own_fault(mesh: RingMesh, site: CallSite, cause: str | BaseException) -> RingPeerError:
    """Tell the other ranks that this rank has failed; return the error for it, or for an earlier fault.

    A cause that is an exception is one of its device.
    """
    if isinstance(cause, BaseException):
        cause = f"its device failed: {first_line(cause)}"
    if mesh.detector is None:
        return RingPeerError(mesh.ring_rank, site.hop, mesh.ring_rank, cause)
    if mesh.detector.fault is None:
        mesh.detector.report_failure(f"{cause} ({site})")
    return make_fault_error(mesh, site.hop, mesh.detector.fault or Fault(mesh.global_rank, cause))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; its type if the message is empty."""
    return (str(error) or type(error).__name__).splitlines()[0]


def make_fault_error(mesh: RingMesh, hop: int | None, fault: Fault) -> RingPeerError:
    """Return the monitor's verdict as an error of this rank."""
    # The caller never sees an error that is raised in a waiting thread.
    if mesh.detector is not None and threading.current_thread() not in _waiters.threads:
        mesh.detector.noticed = True
    return make_peer_error(mesh.grid, mesh.global_rank, hop, fault)
