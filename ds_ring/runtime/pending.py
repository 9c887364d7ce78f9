"""Hold a batch of messages in flight, and wait for it: by the host, or on a GPU by the stream.

Owns what a wait means on either, and the thread that watches over the works of a GPU. How long the host
waits, and whom it blames, is `waiting.py`'s; what is posted is the exchange's.

[Note: no host in the loop]
A wait for a Work of NCCL makes the present stream wait and returns at once, so the host runs ahead of the
GPU. Deadlines and verdicts are then a thread's: it looks at the mark that was made when the batch was posted
(from there on the deadline runs: before it the GPU was busy with something else), then at the works. Where
they fail, or do not end in time, it asks the monitor who is to blame, marks the mesh as broken, so that the
next call on it raises the error, and aborts the groups that are stuck, so that NCCL's kernels do not spin for
ever ([Note: which groups are aborted]). A device that fails, or never comes to the mark, is this rank's own
fault.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_ring.errors import RingBufferError, RingPeerError
from ds_ring.health.watch import keep_for_ever
from ds_ring.runtime.mesh import RingMesh
from ds_ring.runtime.stuck_groups import abort_groups
from ds_ring.runtime.waiting import Place, Task, of_device, own_fault, wait_for

LOOK_S = 1e-3  # between two looks of the thread at a mark or an event
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
        begun: returns whether the device has come to the post.
        device: which; None for the host.
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
    begun: Callable[[], bool] = _at_once
    device: torch.device | None = None
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
            for work in self.works:
                work.wait()  # orders the present stream behind it; does not block
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
            # Its tensors stay with this one, which is kept for ever.
            without = replace(self, sent=(), received=())
            self.watch.add(without)

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
    """Watch over works of a device, in the order in which they were posted; [Note: no host in the loop].

    Args:
        mesh: who is who; its `use.broken` is set where a batch fails.
    """

    def __init__(self, mesh: RingMesh) -> None:
        self._mesh = mesh
        self._queue: deque[Pending] = deque()
        self._lock = threading.Lock()
        self._running = False

    def add(self, batch: Pending) -> None:
        """Watch over a batch from now on, which holds no tensor any more; returns at once."""
        # A deque may be appended to while another thread takes from it.
        self._queue.append(batch)
        if not self._running:
            self._start()

    def _start(self) -> None:
        with self._lock:
            start, self._running = not self._running, True
        if start:
            Task(self._run).start()

    # [Note: a watch that sweeps]
    # A thread that were woken for each batch would take the interpreter from the pass at every hop. This one
    # looks every SWEEP_S at what has been posted since, and ends after IDLE_SWEEPS without anything.
    def _run(self) -> None:
        idle, device = 0, None
        while idle < IDLE_SWEEPS or not self._may_end():
            idle = 0 if self._queue else idle + 1
            while self._queue:
                one = self._queue.popleft()
                if one.device != device and torch.cuda.is_available():
                    torch.cuda.set_device(one.device)  # a thread has its own
                device = one.device
                if not _is_over(one):
                    self._see_through(one)
                one.works = []
                del one  # or its works would live on until the next one comes
            time.sleep(SWEEP_S)

    def _may_end(self) -> bool:
        with self._lock:
            self._running = bool(self._queue)
            return not self._running

    def _see_through(self, one: Pending) -> None:
        """Look until a batch is over; mark the mesh as broken where it fails, and abort what is stuck."""
        mesh, watch = self._mesh, self._mesh.watch
        noticed = watch is not None and watch.noticed
        try:
            if mesh.use.broken is None:
                self._wait_for_begin(one)
                deadline = time.monotonic() + one.timeout_s
                wait_for(one.works, one.peers, mesh, one.place, deadline, on_device=True)
                return
        except RingPeerError as error:
            mesh.use.broken = error
            # Nobody has seen it yet: a host that is stuck must still be ended (`Watch._last_resort`).
            if watch is not None:
                watch.noticed = noticed
        # Whatever else was posted and does not end is stuck, too: nobody completes it any more.
        stuck = [one, *(other for other in list(self._queue) if not _is_over(other))]
        abort_groups(mesh, [other.group for other in stuck])

    def _wait_for_begin(self, one: Pending) -> None:
        """Wait until the device comes to the post: before, it is busy with something else.

        Raises:
            RingPeerError: it failed, or did not come within BUSY_TIMEOUT_S: names this rank.
        """
        mesh, end = self._mesh, time.monotonic() + BUSY_TIMEOUT_S
        try:
            while not one.begun() and (mesh.watch is None or mesh.watch.fault is None):
                if time.monotonic() > end:
                    cause = f"its device did not come to {one.place} within {BUSY_TIMEOUT_S:g} s"
                    raise own_fault(mesh, one.place, f"{cause}: what was launched before does not end")
                time.sleep(LOOK_S)
        except RingPeerError:
            raise
        except RuntimeError as error:  # of an event's query
            raise own_fault(mesh, one.place, of_device(error)) from error


def _is_over(one: Pending) -> bool:
    """Return whether a batch is over without a failure, as most are when they are looked at."""
    try:
        # a work that failed counts as completed, and its wait raises
        return one.begun() and all(work.is_completed() and work.wait() for work in one.works)
    except RuntimeError:
        return False
