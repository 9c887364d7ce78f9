"""Hold a batch of messages in flight, and wait for it: on the host, or on a GPU in the current stream.

Owns the tensors that torch still reads or writes. `waiting.py` owns the host's wait, a watchdog
(`cuda/watchdog.py`) the deadline of a wait in a stream.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from ds_ring.comm.mesh import RingMesh
from ds_ring.comm.streams import Streams
from ds_ring.comm.waiting import (
    CallSite,
    blame,
    describe_cause,
    get_own_fault,
    wait_for,
)
from ds_ring.compat.torch import DEVICE_ERROR
from ds_ring.errors import RingBufferError, RingPeerError
from ds_ring.health.stuck_waits import keep_for_ever

if TYPE_CHECKING:
    from ds_ring.comm.protocols import Watchdog


@dataclass(slots=True, eq=False)
class Pending:
    """A batch of messages in flight. Before `wait`, do not write to its tensors or read received tensors.

    Attributes:
        works, peers: the Works of torch, and for each the world ranks that it depends on.
        timeout_s: seconds that the batch may take.
        sent, received: the tensors.
        group: the process group that carries them; aborted if the batch fails.
        watchdog: holds the deadline if a stream waits; None if there is none, or the host waits.
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
    group: dist.ProcessGroup | None = None
    watchdog: Watchdog | None = None
    streams: Streams | None = None
    came: Callable[[], bool] = field(init=False, default=lambda: True)
    arrived: Callable[[], bool] = field(init=False, default=lambda: True)
    deadline: float = field(init=False)
    _versions: list[int] = field(init=False)
    _over: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._versions = _read_versions(self.sent)
        # The time counts from the post, not from the wait: with overlap a hop's attention runs in between.
        self.deadline = time.monotonic() + self.timeout_s

    def wait(self) -> None:
        """Wait for all messages of the batch. The host waits; on a GPU the current stream waits.

        Raises:
            RingPeerError: a rank failed, left, or was late; the error names the rank at fault.
            RingBufferError: a tensor was written while it was being sent.
        """
        if self._over:  # without overlap, `wait` is called twice for a batch
            return
        sent, versions, watchdog = self.sent, self._versions, self.watchdog
        if self.streams is not None:
            self._wait_on_device(self.streams)
        elif self.works:
            try:
                wait_for(self.works, self.peers, self.mesh, self.site, self.deadline)
            except RingPeerError:
                # torch may still read and write these tensors: their memory must not be used again.
                keep_for_ever(sent, self.received)
                raise
            self.works = []
        # Release the tensors: the watchdog needs only the works.
        self._over, self.sent, self.received = True, (), ()
        if watchdog is not None:
            watchdog.add(self)
        if _read_versions(sent) != versions:
            where, got = f"ring rank {self.mesh.ring_rank} at {self.site}", "one changed in place"
            advice = "do not modify inputs of ring_attention while it runs"
            raise RingBufferError.wrong(where, "unchanged K, V and gradients in flight", got, advice)

    def hand_over(self) -> None:
        """Let the watchdog complete the batch if its pass has failed: `wait` is not called any more."""
        if self.watchdog is not None and not self._over:
            # torch may still read and write its tensors: their memory must not be used again.
            keep_for_ever(self.sent, self.received)
            self._over, self.sent, self.received = True, (), ()
            self.watchdog.add(self)  # without marks in a stream, it queries the batch's works

    def _wait_on_device(self, streams: Streams) -> None:
        """Make the current stream wait for the works, and record a mark before and after; does not block."""
        self.came = partial(streams.reached, streams.mark())
        done = 0
        try:
            for work in self.works:
                work.wait()
                done += 1
        except RuntimeError as error:  # NCCL has found, by now, that a rank or a connection failed
            mesh, site, peers = self.mesh, self.site, self.peers[done]
            if isinstance(error, DEVICE_ERROR):
                mesh.state.broken = get_own_fault(mesh, site, error)
            else:  # the error does not name the failed rank: ask the monitor
                cause = describe_cause(error, site)
                if mesh.detector is not None:
                    mesh.detector.report_wait(peers, site.key, str(site))
                    mesh.detector.report_timeout(peers, cause)
                mesh.state.broken = blame(mesh, site.hop, peers, cause)
            self.hand_over()  # the watchdog aborts works that do not end
            raise mesh.state.broken from error
        self.arrived = partial(streams.reached, streams.mark())


_VERSION = operator.attrgetter("_version")


def _read_versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return how often each was written to; 0 for inference tensors, which keep no count."""
    try:
        return list(map(_VERSION, tensors))
    except RuntimeError:
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]
