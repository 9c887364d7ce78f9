"""Make a call that may never return (a collective of torch, say) so that it can be left.

Owns the thread that makes the call, and the error that names a rank. Works of torch that are under way
already are `waiting.py`'s: those need no thread of their own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from ds_ring.errors import RingError, RingPeerError
from ds_ring.health.monitor.failure_detector import GRACE_S, Fault
from ds_ring.health.watch import Watch, keep_for_ever
from ds_ring.schedule.grid import Grid

PATIENCE_S = 0.25  # a wait that lasts longer is told to the monitor, and gets so long to end after a fault
VERDICT_S = GRACE_S + 1.5  # for the monitor's answer
T = TypeVar("T")


class _Call(Generic[T]):
    """Hold what a thread is to do, and its result."""

    def __init__(self, act: Callable[[], T]) -> None:
        self.act, self.wake = act, threading.Event()
        self.results: list[T] = []
        self.error: BaseException | None = None
        cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        self.device = torch.cuda.current_device() if cuda else None  # a thread has its own

    @property
    def finished(self) -> bool:
        return bool(self.results) or self.error is not None

    def run(self) -> None:
        try:
            if self.device is not None:
                torch.cuda.set_device(self.device)
            self.results.append(self.act())
        except BaseException as error:
            self.error = error
        self.wake.set()


def call_guarded(
    act: Callable[[], T], watch: Watch | None, grid: Grid, what: str, step: int, timeout_s: float
) -> T:
    """Make a call in which all ranks of the world take part; leave it when one of them fails.

    Args:
        act: the call. Where it is left, its thread stays, and the process ends as
            [Note: the end of a process] in `watch.py` says.
        watch: None calls without a guard.
        grid: for the names of ranks in the error.
        what: for messages, "making process groups" say.
        step: the number of this call among those before the mesh's first one; the same on all ranks.
        timeout_s: for the call.

    Raises:
        RingPeerError: a rank failed, or the time is over; names the rank.
    """
    if watch is None:
        return act()
    call = _Call(act)
    thread = threading.Thread(target=call.run, name="ds_ring call", daemon=True)
    thread.start()
    # Most calls end at once: only a long one is worth a message to the monitor.
    if not call.wake.wait(PATIENCE_S):
        _wait_watched(call, watch, grid, what, step, time.monotonic() + timeout_s)
    if call.finished:
        thread.join()  # it only lets go of the call; [Note: threads at exit] in runtime/waiting.py
    if call.results:
        return call.results[0]
    if call.finished and call.error is not None and not is_of_distributed(call.error):
        raise call.error
    if not call.finished:
        keep_for_ever(call)
    cause = f"{what} failed" if call.finished else f"{what} did not end within {timeout_s:g} s"
    fault = verdict(watch) or Fault(-1, f"{cause}, and no rank is known to have failed: {call.error}")
    raise peer_error(grid, watch.rank, None, fault) from call.error


def _wait_watched(call: _Call[T], watch: Watch, grid: Grid, what: str, step: int, deadline: float) -> None:
    """Tell the monitor, and wait until the call is over, a fault is known or the deadline passes."""
    others = [rank for rank in range(grid.world_size) if rank != watch.rank]
    watch.expect(call.wake)
    watch.waits(others, (-1, step), what)
    try:
        while not call.finished and watch.fault is None and time.monotonic() < deadline:
            call.wake.wait(min(1.0, max(0.0, deadline - time.monotonic())))
        if watch.fault is not None:
            end = time.monotonic() + PATIENCE_S
            while not call.finished and time.monotonic() < end:
                time.sleep(0.005)
        # The deadline has passed and nobody is known to have failed: the monitor is to find out who is late.
        elif not call.finished:
            watch.accuse(others, f"it did not come to {what} in time")
        if call.finished:
            watch.goes_on()
    finally:
        watch.expect_no_more(call.wake)


def verdict(watch: Watch) -> Fault | None:
    """Wait a moment for the monitor's verdict; return who failed, if that is known then."""
    end = time.monotonic() + VERDICT_S
    while watch.fault is None and watch.is_open and time.monotonic() < end:
        time.sleep(0.005)
    return watch.fault


def is_of_distributed(error: BaseException) -> bool:
    """Return whether torch.distributed raised this error because a peer or a connection failed."""
    if isinstance(error, RingError) or not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in text for word in ("gloo", "nccl", "c10d"))


def peer_error(grid: Grid, rank: int, hop: int | None, fault: Fault) -> RingPeerError:
    """Return the monitor's verdict as the error of a world rank, with ranks by their place in the ring."""
    data, ring_rank, _ = grid.coordinates(rank)
    if not 0 <= fault.rank < grid.world_size:
        return RingPeerError(ring_rank, hop, None, fault.cause)
    other = grid.coordinates(fault.rank)
    peer = other.ring if other.data == data else None
    alone = peer is not None and grid.world_size == grid.ring_size
    who = "" if alone else f"rank {fault.rank} of the world: "
    return RingPeerError(ring_rank, hop, peer, who + fault.cause)
