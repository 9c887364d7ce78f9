"""A batch of messages in flight, and the wait for it: by the host, or on a GPU by the stream.

Owns both kinds of wait, and the thread that monitors the works of a GPU. `waiting.py` owns how long the host
waits and which rank it blames; the exchange owns what is posted.

[Note: no host in the loop]
Waiting for a Work of NCCL makes the current stream wait and returns at once, so the host runs ahead of the
GPU. A thread then has the deadline and decides who failed. Two events (marks) surround the wait in the
stream. The deadline counts from the first mark: before it the GPU is busy with earlier work. After the second
mark, the thread asks the works whether they have failed. If they have, or do not end in time, the thread asks
the monitor which rank is at fault, marks the mesh as broken, and aborts the groups that are blocked, so that
NCCL's kernels do not spin for ever ([Note: which groups are aborted]). The next call on a broken mesh raises
the error, and so does `RingMesh.settle`, which waits for the thread ([Note: results that stay] in
`culprits.py`). If a device fails or never reaches the first mark, the fault is this rank's own.

[Note: what the host still does]
The host compares headers: gloo sends them as CPU tensors. `engine.step` at the end of an accumulation, and
everything that saves, begin with `settle`; so no optimizer adds the results of a failed hop, and no
checkpoint has them. `tests/unit/runtime/test_no_host_sync.py` records every operator of a pass over fake CUDA
tensors. test_happens_before.py, in the same folder, runs the ring pass under torch's race detector, and
leaves out each wait in turn.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_ring.errors import RingBufferError, RingPeerError
from ds_ring.health.watch import keep_for_ever
from ds_ring.runtime.mesh import RingMesh
from ds_ring.runtime.streams import Streams
from ds_ring.runtime.stuck_groups import abort_groups
from ds_ring.runtime.waiting import (
    Place,
    Task,
    check_alive,
    failed_wait,
    look,
    of_device,
    own_fault,
    wait_for,
)

SWEEP_S = 0.02  # between two sweeps over what was posted; [Note: a watch that sweeps]
IDLE_SWEEPS = 10  # without anything: the thread ends
BUSY_TIMEOUT_S = 1800.0  # for what a device does before it comes to a batch: a step of the optimizer, say


def _at_once() -> bool:
    return True


@dataclass(slots=True, eq=False)
class Pending:
    """Hold a batch in flight. Its buffers must not be written, nor what it receives read, before `wait`.

    Attributes:
        works: of torch.
        peers: of each the world ranks it depends on.
        mesh: who is who.
        place: where this is.
        timeout_s: seconds that it may take.
        sent, received: the tensors concerned.
        group: what they travel through.
        watch: takes over the deadline, on a device; None where the host waits.
        streams: of that device.
        came: returns whether the device has come to the wait.
        arrived: returns whether it has passed the wait, so that the works are done or have failed.
    """

    works: list[dist.Work]
    peers: list[tuple[int, ...]]
    mesh: RingMesh
    place: Place
    timeout_s: float
    sent: Sequence[Tensor]
    received: Sequence[Tensor]
    group: ProcessGroup | None = None
    watch: DeviceWatch | None = None
    streams: Streams | None = None
    came: Callable[[], bool] = field(init=False, default=_at_once)
    arrived: Callable[[], bool] = field(init=False, default=_at_once)
    deadline: float = field(init=False)
    _versions: list[int] = field(init=False)
    _over: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._versions = _versions(self.sent)
        # From the post on, not from the wait: with overlap a hop's attention lies between them.
        self.deadline = time.monotonic() + self.timeout_s

    def wait(self) -> None:
        """Wait for every message of the batch: the host, or on a device the present stream.

        Raises:
            RingPeerError: a rank failed, left, or did not come before the deadline; names it.
            RingBufferError: a tensor was written while it was being sent.
        """
        if self._over:  # without overlap a batch is waited for twice
            return
        sent, versions, watch = self.sent, self._versions, self.watch
        if watch is None:
            if self.works:
                self._wait_here()
            self.works = []
        else:
            self._wait_on_device(watch)
        # No tensor is held any longer: the thread that watches needs none.
        self._over, self.sent, self.received = True, (), ()
        if watch is not None:
            watch.add(self)
        if _versions(sent) != versions:
            raise RingBufferError(
                f"ring rank {self.mesh.ring_rank} at {self.place}: expected that nobody writes to a tensor"
                " while it is being sent, but K, V or a gradient was changed in place; what arrived is a"
                " mixture. Do not modify the inputs of ring_attention from another thread while it runs"
            )

    def hand_over(self) -> None:
        """Let the watch of the device see to a batch that nobody will wait for: the pass has failed."""
        if self.watch is not None and not self._over:
            # torch may still read and write its tensors: their memory must not be used again.
            keep_for_ever(self.sent, self.received)
            self._over, self.sent, self.received = True, (), ()
            self.watch.add(self)  # without marks: its works are asked themselves

    def _wait_on_device(self, watch: DeviceWatch) -> None:
        """Order the present stream behind the works, between two marks; does not block."""
        streams = self.streams
        assert streams is not None, "a watch without streams"
        self.came = partial(streams.reached, streams.mark())
        done = 0
        try:
            for work in self.works:
                work.wait()
                done += 1
        except RuntimeError as error:  # NCCL has found, by now, that a rank or a connection failed
            self.mesh.use.broken = failed_wait(self.mesh, self.place, self.peers[done], error)
            self.hand_over()  # the watch aborts what is stuck
            raise self.mesh.use.broken from error
        self.arrived = partial(streams.reached, streams.mark())

    def _wait_here(self) -> None:
        try:
            wait_for(self.works, self.peers, self.mesh, self.place, self.deadline)
        except RingPeerError:
            # torch may still read and write them: their memory must not be used again.
            keep_for_ever(self.sent, self.received)
            raise


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return how often each was written to; 0 for inference tensors, which keep no count."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


class DeviceWatch:
    """Watch over works of a device, in the order in which they were waited for; [Note: no host in the loop].

    Meshes of one `MeshUse` share a watch. Its `broken` is set where a batch fails.
    """

    def __init__(self) -> None:
        self._queue: deque[Pending | threading.Event] = deque()  # an event is set when its turn comes
        self._lock = threading.Lock()
        self._hurried = threading.Event()
        self._running = False

    @classmethod
    def of(cls, mesh: RingMesh) -> DeviceWatch:
        """Return the watch of a mesh; made when first asked for."""
        if mesh.use.device_watch is None:
            mesh.use.device_watch = cls()
        assert isinstance(mesh.use.device_watch, cls)
        return mesh.use.device_watch

    def add(self, batch: Pending) -> None:
        """Watch over a batch from now on, which holds no tensor any more; returns at once."""
        # A deque may be appended to while another thread takes from it.
        self._queue.append(batch)
        if not self._running:
            self._start()

    def settle(self, mesh: RingMesh) -> None:
        """Wait until all batches so far are over; see `RingMesh.settle`."""
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

    # [Note: a watch that sweeps]
    # A thread that were woken for each batch would take the interpreter from the pass at every hop. This one
    # looks every SWEEP_S at what was waited for since, and ends after IDLE_SWEEPS without anything. Most
    # batches are over by then, which takes one query. While somebody waits in `settle` it looks every LOOK_S.
    def _run(self) -> None:
        idle, streams = 0, None
        while idle < IDLE_SWEEPS or not self._may_end():
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
                    one.mesh.use.broken = own_fault(one.mesh, one.place, of_device(error))
                one.works = []
                del one  # or its works would live on until the next one comes
            self._hurried.wait(SWEEP_S)
            self._hurried.clear()

    def _may_end(self) -> bool:
        with self._lock:
            self._running = bool(self._queue)
            return not self._running

    def _see_through(self, one: Pending) -> None:
        """Look until a batch is over; mark the mesh as broken where it fails, and abort what is stuck."""
        mesh = one.mesh
        try:
            if mesh.use.broken is None:
                self._wait_for_begin(one)
                deadline = time.monotonic() + one.timeout_s
                wait_for(one.works, one.peers, mesh, one.place, deadline, one.arrived, self._hurried)
                return
        except RingPeerError as error:
            # Nobody has seen it yet: a host that is stuck is still ended (`Watch._last_resort`).
            mesh.use.broken = error
        # Whatever else was posted and does not end is stuck, too: nobody completes it any more.
        others = [other for other in list(self._queue) if isinstance(other, Pending) and not _is_over(other)]
        abort_groups((other.mesh, other.group) for other in (one, *others))

    def _wait_for_begin(self, one: Pending) -> None:
        """Wait until the device comes to the wait: before, it is busy with something else.

        Raises:
            RingPeerError: it failed, or did not come within BUSY_TIMEOUT_S: names this rank.
        """
        mesh = one.mesh

        def came() -> bool:
            return one.came() or (mesh.watch is not None and mesh.watch.fault is not None)

        try:
            if look(came, BUSY_TIMEOUT_S, self._hurried):
                return
        except RuntimeError as error:  # of an event's query
            raise own_fault(mesh, one.place, of_device(error)) from error
        cause = f"its device did not come to {one.place} within {BUSY_TIMEOUT_S:g} s"
        raise own_fault(mesh, one.place, f"{cause}: what was launched before does not end")


def _is_over(one: Pending) -> bool:
    """Return whether a batch is over without a failure, as most are when they are looked at."""
    try:
        # a work that failed counts as completed, and its wait raises
        return one.arrived() and all(work.is_completed() and work.wait() for work in one.works)
    except RuntimeError:
        return False
