"""Guard who may use a mesh: the process that made it, until it is closed, one thread at a time.

Owns that state and the errors about it. A mesh's calls are counted and its messages matched by order, so two
threads that call at once would mix their tensors up; a forked child would speak through its parent's sockets.

[Note: several meshes]
Several meshes can work at the same time in different threads. What they share (caches) is filled with equal
values by whoever comes first, and needs no lock.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from ds_ring.errors import RingMeshError, RingPeerError


class Settles(Protocol):
    """See messages through; `pending.py`'s DeviceWatch does."""

    def settle(self, mesh: Any) -> None:
        """Wait until all messages so far are over; raise RingPeerError if one failed."""
        ...


class MeshUse:
    """Hold whether a mesh can be used, and by which thread it is used now.

    Attributes:
        closed: `RingMesh.close` was called.
        broken: a transfer between GPUs failed, or did not end in time; every further call raises it.
        operations: kinds of passes so far; peers connect in a first one ([Note: compile skew]).
        patience_s: seconds that every wait may take at the least: some rank compiles; else 0.
        aborted: ids of the process groups that were aborted then.
        device_watch: sees to the messages between GPUs; made by the first exchange on the mesh.
    """

    def __init__(self) -> None:
        self.closed = False
        self.broken: RingPeerError | None = None
        self.operations: set[Hashable] = set()
        self.patience_s = 0.0
        self.aborted: set[int] = set()
        self.device_watch: Settles | None = None
        self._process = os.getpid()
        self._busy = threading.Lock()
        self._thread: int | None = None  # the one that holds `_busy`

    def check(self) -> None:
        """Refuse a mesh that is closed, or that another process made.

        Raises:
            RingMeshError: either.
        """
        if os.getpid() != self._process:
            raise RingMeshError(
                f"expected a mesh of this process ({os.getpid()}), got one that process {self._process} made"
                " before it was forked; its connections belong to that process: start ranks with a launcher"
                " or with spawn, and make the process group and the mesh in each of them"
            )
        if self.closed:
            raise RingMeshError(
                "expected an open mesh, got one after mesh.close(); make a new one with"
                " RingMesh.from_world(...)"
            )

    @contextmanager
    def one_call(self, tell: Callable[[str], None] | None = None) -> Iterator[None]:
        """Surround a call on the mesh; calls within it are part of it. Never waits.

        Args:
            tell: is told of two threads at once, before the error is raised here.

        Raises:
            RingMeshError: as `check`, or another thread is in a call.
        """
        self.check()
        me = threading.get_ident()
        if self._thread == me:  # only this thread can have written that
            yield
            return
        if not self._busy.acquire(blocking=False):
            why = (
                "expected one thread at a time on a mesh, got a call of thread"
                f" {threading.current_thread().name!r} while thread {_name_of(self._thread)} is in one; ranks"
                " match messages by the order of calls: give each thread a mesh of its own, made in the same"
                " order on every rank"
            )
            if tell is not None:
                tell(why)
            raise RingMeshError(why)
        self._thread = me
        try:
            yield
        finally:
            self._thread = None
            self._busy.release()


def _name_of(thread: int | None) -> str:
    names = [repr(known.name) for known in threading.enumerate() if known.ident == thread]
    return names[0] if names else f"number {thread}"
