"""Leave calls and waits of torch that may never return, and end a process that has some.

`client.py` has the detector that says who failed; a process without one loads this file alone.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from multiprocessing import util
from typing import TYPE_CHECKING, TypeVar

from ds_ring.errors import RingPeerError
from ds_ring.health.failure_detector.wire import GRACE_S, Fault
from ds_ring.limits import Limit
from ds_ring.schedule.grid import Grid

if TYPE_CHECKING:
    from ds_ring.health.client import DetectorClient

PATIENCE_S = 0.25  # a longer wait is reported to the monitor; after a fault, a wait gets this time to end
VERDICT_S = GRACE_S + 1.5  # for the monitor's answer
T = TypeVar("T")

clients_of_process: weakref.WeakSet[DetectorClient] = weakref.WeakSet()
# Buffers that a stuck wait of torch may still write to: those of one wait a mesh, which is broken then.
_in_stuck_waits: list[object] = []


def keep_for_ever(*things: object) -> None:
    """Keep buffers that torch may still write to; [Note: the end of a process]."""
    _in_stuck_waits.extend(things)


def _say_goodbye() -> None:
    """End all detectors of this process in order; [Note: the end of a process]."""
    error = getattr(sys, "last_value", None)
    detectors = list(clients_of_process)
    for detector in detectors:
        if error is not None and detector.fault is None:
            detector.report_failure(f"it ended with {type(error).__name__}: {str(error)[:300]}")
    for detector in detectors:
        detector.end()
    if _in_stuck_waits:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)


def _forget_in_child() -> None:
    """Close the connection in a forked child (a data loader's worker), which must not keep it open."""
    for detector in list(clients_of_process):
        detector.forget()
    clients_of_process.clear()
    _in_stuck_waits.clear()  # no thread of a child waits


def _say_goodbye_in_child(_: object) -> None:
    """Say goodbye at the end of a child of multiprocessing, which runs no atexit functions."""
    util.Finalize(None, _say_goodbye, exitpriority=100)


atexit.register(_say_goodbye)
_say_goodbye_in_child(None)  # this process may be one
# A child drops the finalizers that it inherits when it starts.
util.register_after_fork(clients_of_process, _say_goodbye_in_child)
os.register_at_fork(after_in_child=_forget_in_child)


def call_guarded(
    act: Callable[[], T], detector: DetectorClient | None, grid: Grid, what: str, step: int, limit: Limit
) -> T:
    """Make a call in which all ranks of the world take part; leave it when one of them fails.

    Args:
        act: the call. Where it is left, its thread stays: [Note: the end of a process].
        detector: None calls without a guard.
        grid: for the names of ranks in the error.
        what: for messages, "making process groups" say.
        step: the number of this call among those before the mesh's first one; the same on all ranks.
        limit: for the call.

    Raises:
        RingPeerError: a rank failed, or the time is over; names the rank.
    """
    if detector is None:
        return act()
    import torch

    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    device = torch.cuda.current_device() if cuda else None  # a thread has its own
    call: Future[T] = Future()

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            call.set_result(act())
        except BaseException as error:
            call.set_exception(error)

    thread = threading.Thread(target=run, name="ds_ring call", daemon=True)
    thread.start()
    # Most calls end at once: only a long one is worth a message to the monitor.
    if wait([call], PATIENCE_S).not_done:
        _wait_watched(call, detector, grid, what, step, limit)
    error = None
    if call.done():
        thread.join()  # it only lets go of the call; [Note: threads at exit] in comm/waiting.py
        error = call.exception()
        if error is None:
            return call.result()
        from ds_ring.error_origins import is_distributed_error

        if not is_distributed_error(error):
            return call.result()
    else:
        keep_for_ever(call, act)
    cause = f"{what} failed" if call.done() else f"{what} did not end within {limit.seconds:g} s"
    fault = verdict(detector, error) or Fault(-1, f"{cause}, and no rank is known to have failed: {error}")
    raise make_peer_error(grid, detector.rank, None, fault) from error


def _wait_watched(
    call: Future[T], detector: DetectorClient, grid: Grid, what: str, step: int, limit: Limit
) -> None:
    """Tell the monitor, and wait until the call is over, a fault is known or the limit passes."""
    deadline = time.monotonic() + limit.seconds
    others = [rank for rank in range(grid.world_size) if rank != detector.rank]
    wake = threading.Event()
    call.add_done_callback(lambda _: wake.set())
    detector.subscribe(wake)
    detector.report_wait(others, (-1, step), what, limit)
    try:
        while not call.done() and detector.fault is None and time.monotonic() < deadline:
            wake.wait(min(1.0, max(0.0, deadline - time.monotonic())))
        if detector.fault is not None:
            wait([call], PATIENCE_S)
        # The deadline has passed and no rank is known to have failed: ask the monitor which one is late.
        elif not call.done():
            detector.report_timeout(
                others, f"it did not come to {what} within {limit.seconds:g} s ({limit.key})"
            )
        if call.done():
            detector.wait_done()
    finally:
        detector.unsubscribe(wake)


def verdict(detector: DetectorClient, error: BaseException | None = None) -> Fault | None:
    """Wait a moment for the monitor's verdict; return who failed, if that is known then.

    Args:
        detector: of this rank.
        error: of a collective that is not ours; the monitor hears of it and looks for who left or never came.
    """
    if error is not None:
        detector.report_broken_collective(str(error).splitlines()[0] if str(error) else type(error).__name__)
    end = time.monotonic() + VERDICT_S
    while detector.fault is None and detector.is_open and time.monotonic() < end:
        time.sleep(0.005)
    return detector.fault


def make_peer_error(grid: Grid, rank: int, hop: int | None, fault: Fault) -> RingPeerError:
    """Return the monitor's verdict as the error of a world rank, with ranks by their place in the ring."""
    data, ring_rank, _ = grid.coordinates(rank)
    if not 0 <= fault.rank < grid.world_size:
        return RingPeerError(ring_rank, hop, None, fault.cause)
    location = grid.coordinates(fault.rank)
    peer = location.ring if location.data == data else None
    alone = peer is not None and grid.world_size == grid.ring_size
    who = "" if alone else f"rank {fault.rank} of the world: "
    return RingPeerError(ring_rank, hop, peer, who + fault.cause)
