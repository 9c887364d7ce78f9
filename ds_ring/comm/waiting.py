"""Wait for torch's works without hanging: with a deadline, a failure detector and a helper thread.

Owns the wait and the error that it raises. The exchange owns the works.
"""

from __future__ import annotations

import atexit
import datetime
import logging
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ds_ring.comm.mesh import RingMesh
from ds_ring.comm.streams import Streams
from ds_ring.errors import RingBufferError, RingPeerError
from ds_ring.health.client import PATIENCE_S, DetectorClient, keep_for_ever, peer_error, verdict
from ds_ring.health.failure_detector.verdicts import Fault
from ds_ring.limits import MOST_SECONDS, Limit

_HOP_KEYS = "hop_timeout_seconds; first_pass_timeout_seconds in a GPU's first pass of a shape"
FOR_EVER = datetime.timedelta(seconds=MOST_SECONDS)
POLL_S, POLL_SELDOM_S = 1e-3, 0.02  # between two queries of an event: at first, and later on
# What torch raises if a device has failed; releases without this class raise a plain RuntimeError.
DEVICE_ERROR: tuple[type[BaseException], ...] = tuple(
    kind for kind in [getattr(torch, "AcceleratorError", None)] if kind is not None
)


class CallSite(NamedTuple):
    """The site in the program at which a wait happens: the number of the call, and the hop.

    `outside` is what it is outside of a pass, and the key of the JSON that sets its time.
    """

    call: int
    hop: int | None
    outside: tuple[str, str] | None = None

    def __str__(self) -> str:
        if self.outside is not None:
            return self.outside[0]
        return f"call {self.call}, " + ("before its first hop" if self.hop is None else f"hop {self.hop}")

    @property
    def key(self) -> tuple[int, int]:
        return self.call, -1 if self.hop is None else self.hop

    @property
    def limit_key(self) -> str:
        return _HOP_KEYS if self.outside is None else self.outside[1]


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
        self.wake, self.done, self.over, self.error = threading.Event(), 0, not works, None

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
            # Query `is_completed` only after the event: [Note: queries from another thread] in streams.py.
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

    def waits_for(self, peers: Sequence[Sequence[int]]) -> Sequence[int]:
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
        works: works, in approximately the order in which they complete.
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
        raise own_fault(mesh, site, job.error) from job.error
    raise blame(mesh, site.hop, job.waits_for(peers), _cause(job.error, site)) from job.error


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
        if told is not job.waits_for(peers):
            told = job.waits_for(peers)
            detector.report_wait(told, site.key, str(site), limit)
        # Wait at most one second at a time: no event is set when one of several works is done.
        job.pause(min(left_s, 1.0))
    if detector.fault is not None:
        # Use data that arrive within this time; a later wait raises the fault.
        poll(lambda: job.over, PATIENCE_S if job.arrived is None else 0.0, job.poll_fast)
    # If the device failed, the fault is this rank's own, so do not blame the others.
    elif (not job.over or job.error is not None) and not isinstance(job.error, DEVICE_ERROR):
        detector.report_wait(job.waits_for(peers), site.key, str(site))
        detector.report_timeout(job.waits_for(peers), _cause(job.error, site))
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


def _cause(error: BaseException | None, site: CallSite) -> str:
    if error is not None:
        return f"the connection to it failed at {site}: {first_line(error)}"
    return f"it did not come to {site} before the deadline ({site.limit_key})"


def blame(mesh: RingMesh, hop: int | None, peers: Sequence[int], cause: str) -> RingPeerError:
    """Return the error for a failed wait: the monitor's verdict, or else this rank's own view."""
    fault = None if mesh.detector is None else verdict(mesh.detector)
    if fault is not None:
        return error_of(mesh, hop, fault)
    peer = mesh.ring_rank_of(peers[0]) if len(peers) == 1 else None
    return RingPeerError(mesh.ring_rank, hop, peer, cause)


def check_alive(mesh: RingMesh, hop: int | None) -> None:
    """Raise RingPeerError if a rank, or a message between GPUs, has failed: the mesh cannot be used again."""
    if mesh.detector is not None and mesh.detector.fault is not None:
        raise error_of(mesh, hop, mesh.detector.fault)
    # The same error object is raised by all calls: without this each raise would lengthen its traceback.
    if mesh.state.broken is not None:
        raise mesh.state.broken.with_traceback(None)


def own_fault(mesh: RingMesh, site: CallSite, cause: str | BaseException) -> RingPeerError:
    """Tell the other ranks that this rank has failed; return the error for it, or for an earlier fault.

    A cause that is an exception is one of its device.
    """
    if isinstance(cause, BaseException):
        cause = f"its device failed: {first_line(cause)}"
    if mesh.detector is None:
        return RingPeerError(mesh.ring_rank, site.hop, mesh.ring_rank, cause)
    if mesh.detector.fault is None:
        mesh.detector.report_failure(f"{cause} ({site})")
    return error_of(mesh, site.hop, mesh.detector.fault or Fault(mesh.global_rank, cause))


def first_line(error: BaseException) -> str:
    """Return what an error says first; its type if it says nothing."""
    return (str(error) or type(error).__name__).splitlines()[0]


def error_of(mesh: RingMesh, hop: int | None, fault: Fault) -> RingPeerError:
    """Return the monitor's verdict as an error of this rank."""
    # The caller never sees what is raised in a waiting thread.
    if mesh.detector is not None and threading.current_thread() not in _waiters.threads:
        mesh.detector.noticed = True
    return peer_error(mesh.grid, mesh.global_rank, hop, fault)


# [Note: which groups are aborted]
# Of what was posted and does not end, the groups that the mesh has made: never the world's group, which is
# DeepSpeed's, nor a group of somebody else. A healthy group of the mesh stays. Each is aborted once. An abort
# can wait until another communicator is aborted, too (pytorch issue 119797). torch aborts in a thread of its
# own, so ncclGroupStart and ncclGroupEnd around several calls of `abort` do not join them. Here each group is
# aborted in a thread of its own, all of them are started before the first is waited for, and the wait has a
# deadline. A group that cannot be aborted is logged.

_log = logging.getLogger(__name__)
ABORT_S = 30.0  # for all aborts together


def abort_groups(stuck: Iterable[tuple[RingMesh, Any]]) -> None:
    """Abort those of the groups that their mesh has made, once; [Note: which groups are aborted]."""
    tasks: list[Task] = []
    for mesh, group in stuck:
        made = [mesh.sequence_group, mesh.ring_group, mesh.ulysses_group, mesh.data_group]
        made += [buffers.shared for buffers in mesh.shared_buffers.values()]
        if group is not None and any(group is one for one in made) and id(group) not in mesh.state.aborted:
            mesh.state.aborted.add(id(group))
            tasks.append(Task(group.abort).start())
    deadline = time.monotonic() + ABORT_S
    late = [task for task in tasks if not task.wake.wait(max(0.0, deadline - time.monotonic()))]
    if late:
        keep_for_ever(late)
        _log.error(
            "ds_ring: %d of %d process groups were not aborted in %g s", len(late), len(tasks), ABORT_S
        )
    for task in tasks:
        if isinstance(task.error, RuntimeError):
            _log.error("ds_ring: a process group could not be aborted: %s", task.error)


# [Note: no host in the loop]
# Waiting for a Work of NCCL makes the current stream wait and returns at once, so the host runs ahead of the
# GPU. A thread then has the deadline and decides who failed. Two events (marks) surround the wait in the
# stream. The deadline counts from the first mark: before it the GPU is busy with earlier work. After the
# second mark, the thread asks the works whether they have failed. If they have, or do not end in time, the
# thread asks the monitor which rank is at fault, marks the mesh as broken, and aborts the groups that are
# blocked, so that NCCL's kernels do not spin for ever ([Note: which groups are aborted]). The next call on a
# broken mesh raises the error, and so does `RingMesh.synchronize`, which waits for the thread ([Note: results
# that stay] in `failure_attribution.py`). If a device fails or never reaches the first mark, this rank is at
# fault.
#
# [Note: what the host still does]
# The host compares headers: gloo sends them as CPU tensors. `engine.step` at the end of an accumulation, and
# everything that saves, begin with `synchronize`; so no optimizer adds the results of a failed hop, and no
# checkpoint has them. `tests/unit/ring/test_no_host_sync.py` records every operator of a pass over fake
# CUDA tensors. test_happens_before.py, in the same folder, runs the ring pass under torch's race detector,
# and leaves out each wait in turn.

SWEEP_S = 0.02  # between two sweeps over what was posted; [Note: a watchdog that sweeps]
IDLE_SWEEPS = 10  # without anything: the thread ends


@dataclass(slots=True, eq=False)
class Pending:
    """Hold a batch in flight. Its buffers must not be written, nor what it receives read, before `wait`.

    Attributes:
        works, peers: the Works of torch, and for each the world ranks that it depends on.
        timeout_s: seconds that the batch may take.
        sent, received, group: the tensors, and what carries them: a process group, or shared memory of CUDA
            (`shared_memory.py`). It is aborted if the batch fails.
        watchdog: holds the deadline if a stream waits; None if the host waits.
        streams: the streams that wait; None if the host waits.
        came: returns whether the device has reached the wait.
        arrived: returns whether the device has passed the wait: the works are done or have failed.
    """

    works: list[dist.Work]
    peers: list[tuple[int, ...]]
    mesh: RingMesh
    site: CallSite
    timeout_s: float
    sent: Sequence[Tensor]
    received: Sequence[Tensor]
    group: Any = None
    watchdog: WorkWatchdog | None = None
    streams: Streams | None = None
    came: Callable[[], bool] = field(init=False, default=lambda: True)
    arrived: Callable[[], bool] = field(init=False, default=lambda: True)
    deadline: float = field(init=False)
    _versions: list[int] = field(init=False)
    _over: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._versions = _versions(self.sent)
        # From the post on, not from the wait: with overlap a hop's attention lies between them.
        self.deadline = time.monotonic() + self.timeout_s

    def wait(self) -> None:
        """Wait for every message of the batch. The host waits, or on a GPU the current stream.

        Raises:
            RingPeerError: a rank failed, left, or did not come before the deadline; names it.
            RingBufferError: a tensor was written while it was being sent.
        """
        if self._over:  # without overlap a batch is waited for twice
            return
        sent, versions, watchdog = self.sent, self._versions, self.watchdog
        if watchdog is not None:
            self._wait_on_device(watchdog)
        elif self.works:
            try:
                wait_for(self.works, self.peers, self.mesh, self.site, self.deadline)
            except RingPeerError:
                # torch may still read and write them: their memory must not be used again.
                keep_for_ever(sent, self.received)
                raise
            self.works = []
        # No tensor is held any longer: the thread that watches needs none.
        self._over, self.sent, self.received = True, (), ()
        if watchdog is not None:
            watchdog.add(self)
        if _versions(sent) != versions:
            raise RingBufferError(
                f"ring rank {self.mesh.ring_rank} at {self.site}: expected that nobody writes to a tensor"
                " while it is being sent, but K, V or a gradient was changed in site; what arrived is a"
                " mixture. Do not modify the inputs of ring_attention from another thread while it runs"
            )

    def hand_over(self) -> None:
        """Let the watchdog complete a batch that nobody will wait for: the pass has failed."""
        if self.watchdog is not None and not self._over:
            # torch may still read and write its tensors: their memory must not be used again.
            keep_for_ever(self.sent, self.received)
            self._over, self.sent, self.received = True, (), ()
            self.watchdog.add(self)  # without marks: its works are asked themselves

    def _wait_on_device(self, watchdog: WorkWatchdog) -> None:
        """Order the present stream behind the works, between two marks; does not block."""
        streams = self.streams
        assert streams is not None, "a watchdog without streams"
        self.came = partial(streams.reached, streams.mark())
        done = 0
        try:
            for work in self.works:
                work.wait()
                done += 1
        except RuntimeError as error:  # NCCL has found, by now, that a rank or a connection failed
            mesh, site, peers = self.mesh, self.site, self.peers[done]
            if isinstance(error, DEVICE_ERROR):
                mesh.state.broken = own_fault(mesh, site, error)
            else:  # it says that something failed, but not which rank: ask the monitor
                cause = _cause(error, site)
                if mesh.detector is not None:
                    mesh.detector.report_wait(peers, site.key, str(site))
                    mesh.detector.report_timeout(peers, cause)
                mesh.state.broken = blame(mesh, site.hop, peers, cause)
            self.hand_over()  # the watchdog aborts what is stuck
            raise mesh.state.broken from error
        self.arrived = partial(streams.reached, streams.mark())


_VERSION = operator.attrgetter("_version")


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return how often each was written to; 0 for inference tensors, which keep no count."""
    try:
        return list(map(_VERSION, tensors))
    except RuntimeError:
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


class WorkWatchdog:
    """Supervise the works of a device in the order of their waits; [Note: no host in the loop].

    Meshes of one `MeshState` share a watchdog. Its `broken` is set where a batch fails.
    """

    def __init__(self) -> None:
        self._queue: deque[Pending | threading.Event] = deque()  # an event is set when its turn comes
        self._lock = threading.Lock()
        self._hurried = threading.Event()
        self._running = False

    @classmethod
    def of(cls, mesh: RingMesh) -> WorkWatchdog:
        """Return the watchdog of a mesh; made when first asked for."""
        if mesh.state.work_watchdog is None:
            mesh.state.work_watchdog = cls()
        return mesh.state.work_watchdog

    def add(self, batch: Pending) -> None:
        """Watch over a batch from now on, which holds no tensor any more; returns at once."""
        # A deque may be appended to while another thread takes from it.
        self._queue.append(batch)
        if not self._running:
            self._start()

    def synchronize(self, mesh: RingMesh) -> None:
        """Wait until all batches so far are over; see `RingMesh.synchronize`."""
        if self._running or self._queue:
            seen = threading.Event()
            self._queue.append(seen)
            self._hurried.set()
            if not self._running:
                self._start()
            seen.wait()  # each batch before it has a deadline of its own
        check_alive(mesh, None)

    def _start(self) -> None:
        with self._lock:
            start, self._running = not self._running, True
        if start:
            Task(self._run).start()

    # [Note: a watchdog that sweeps]
    # A thread that were woken for each batch would take the interpreter from the pass at every hop. This one
    # looks every SWEEP_S at what was waited for since, and ends after IDLE_SWEEPS without anything. Most
    # batches are over by then, which takes one query. During `synchronize` it looks every POLL_S.
    def _run(self) -> None:
        idle, streams = 0, None
        while True:
            if idle >= IDLE_SWEEPS:
                with self._lock:
                    self._running = bool(self._queue)
                    if not self._running:
                        return
            idle = 0 if self._queue else idle + 1
            while self._queue:
                one = self._queue.popleft()
                if isinstance(one, threading.Event):
                    one.set()
                    continue
                try:
                    if one.streams is not None and one.streams is not streams:
                        one.streams.prepare_thread()
                        streams = one.streams
                    if not _is_over(one):
                        self._see_through(one)
                except Exception as error:  # the device is lost, say; the batches behind it are looked at
                    one.mesh.state.broken = own_fault(one.mesh, one.site, error)
                one.works = []
                del one  # or its works would live on until the next one comes
            self._hurried.wait(SWEEP_S)
            self._hurried.clear()

    def _see_through(self, one: Pending) -> None:
        """Look until a batch is over; mark the mesh as broken where it fails, and abort what is stuck."""
        mesh = one.mesh
        try:
            if mesh.state.broken is None:
                self._wait_for_begin(one)
                deadline = time.monotonic() + one.timeout_s
                wait_for(one.works, one.peers, mesh, one.site, deadline, one.arrived, self._hurried)
                return
        except RingPeerError as error:
            # Nobody has seen it yet: a host that is stuck is still ended (`DetectorClient._last_resort`).
            mesh.state.broken = error
        # Whatever else was posted and does not end is stuck, too: nobody completes it any more.
        others = [other for other in list(self._queue) if isinstance(other, Pending) and not _is_over(other)]
        abort_groups((other.mesh, other.group) for other in (one, *others))

    def _wait_for_begin(self, one: Pending) -> None:
        """Wait until the device comes to the wait: before, it is busy with something else.

        A RingPeerError that names this rank says that it failed, or did not come within
        `step_timeout_seconds`: it may be in a step of the optimizer, say.
        """
        mesh = one.mesh
        limit = mesh.timeouts.limit("step")

        try:
            if poll(
                lambda: one.came() or (mesh.detector is not None and mesh.detector.fault is not None),
                limit.seconds,
                self._hurried,
            ):
                return
        except RuntimeError as error:  # of an event's query
            raise own_fault(mesh, one.site, error) from error
        cause = f"its device did not come to {one.site} within {limit.seconds:g} s ({limit.key})"
        raise own_fault(mesh, one.site, f"{cause}: what was launched before does not end")


def _is_over(one: Pending) -> bool:
    """Return whether a batch is over without a failure, as most are when they are looked at."""
    try:
        # a work that failed counts as completed, and its wait raises
        return one.arrived() and all(work.is_completed() and work.wait() for work in one.works)
    except RuntimeError:
        return False
