"""Enforce the deadlines of messages between GPUs in a thread, and abort process groups that are blocked.

A stream waits for these messages, so the host does not know whether they have arrived. Owns the thread, and
the decision that a mesh is broken.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ds_ring.comm.mesh import RingMesh
from ds_ring.comm.waiting import (
    Task,
    check_alive,
    get_own_fault,
    poll,
    wait_for,
)
from ds_ring.errors import RingPeerError
from ds_ring.health.stuck_waits import keep_for_ever
from ds_ring.limits import ABORT_S

if TYPE_CHECKING:
    from ds_ring.comm.in_flight import Pending

_log = logging.getLogger(__name__)

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
    def for_mesh(cls, mesh: RingMesh) -> WorkWatchdog:
        """Return the watchdog of a mesh, made at the first call."""
        watchdog = mesh.state.work_watchdog
        if watchdog is None:
            watchdog = mesh.state.work_watchdog = cls()
        assert isinstance(watchdog, cls)
        return watchdog

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
                entry = self._queue.popleft()
                if isinstance(entry, threading.Event):
                    entry.set()
                    continue
                try:
                    if entry.streams is not None and entry.streams is not streams:
                        entry.streams.prepare_thread()
                        streams = entry.streams
                    if not _is_over(entry):
                        self._see_through(entry)
                except Exception as error:  # such as a lost device; go on with the next batches
                    entry.mesh.state.broken = get_own_fault(entry.mesh, entry.site, error)
                entry.works = []
                del entry  # or its works would live on until the next one comes
            self._hurried.wait(SWEEP_S)
            self._hurried.clear()

    def _see_through(self, pending: Pending) -> None:
        """Poll a batch until it ends. If it fails, mark the mesh as broken and abort unfinished works."""
        mesh = pending.mesh
        try:
            if mesh.state.broken is None:
                self._wait_for_begin(pending)
                deadline = time.monotonic() + pending.timeout_s
                wait_for(
                    pending.works, pending.peers, mesh, pending.site, deadline, pending.arrived, self._hurried
                )
                return
        except RingPeerError as error:
            # Nobody has seen it yet: a host that is stuck is still ended (`DetectorClient._end_process`).
            mesh.state.broken = error
        # Other batches that were posted and have not ended cannot complete any more.
        others = [
            entry
            for entry in list(self._queue)
            if not isinstance(entry, threading.Event) and not _is_over(entry)
        ]
        abort_groups((entry.mesh, entry.group) for entry in (pending, *others))

    def _wait_for_begin(self, pending: Pending) -> None:
        """Wait until the device reaches the wait; earlier, it is busy with other work.

        Raises a RingPeerError that names this rank if the device fails, or does not reach the wait within
        `step_timeout_seconds` (it may be in a step of the optimizer, for example).
        """
        mesh = pending.mesh
        limit = mesh.timeouts.limit("step")

        try:
            if poll(
                lambda: pending.came() or (mesh.detector is not None and mesh.detector.fault is not None),
                limit.seconds,
                self._hurried,
            ):
                return
        except RuntimeError as error:  # of an event's query
            raise get_own_fault(mesh, pending.site, error) from error
        cause = f"its device did not come to {pending.site} within {limit.seconds:g} s ({limit.key})"
        raise get_own_fault(mesh, pending.site, f"{cause}: what was launched before does not end")


def _is_over(pending: Pending) -> bool:
    """Return whether a batch is over without a failure, as most are when they are looked at."""
    try:
        # a work that failed counts as completed, and its wait raises
        return pending.arrived() and all(work.is_completed() and work.wait() for work in pending.works)
    except RuntimeError:
        return False


# [Note: which groups are aborted]
# Of what was posted and does not end, the groups that the mesh has made: never the world's group, which is
# DeepSpeed's, nor a group of somebody else. A healthy group of the mesh stays. Each is aborted once. An abort
# can wait until another communicator is aborted, too (pytorch issue 119797). torch aborts in a thread of its
# own, so ncclGroupStart and ncclGroupEnd around several calls of `abort` do not join them. Here each group is
# aborted in a thread of its own, all of them are started before the first is waited for, and the wait has a
# deadline. A group that cannot be aborted is logged.
def abort_groups(stuck: Iterable[tuple[RingMesh, Any]]) -> None:
    """Abort those of the groups that their mesh has made, once; [Note: which groups are aborted]."""
    tasks: list[Task] = []
    for mesh, group in stuck:
        groups = [mesh.sequence_group, mesh.ring_group, mesh.ulysses_group, mesh.data_group]
        if (
            group is not None
            and any(group is mesh_group for mesh_group in groups)
            and id(group) not in mesh.state.aborted
        ):
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
