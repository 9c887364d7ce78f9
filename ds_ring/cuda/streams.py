"""Synchronize CUDA streams with events. Only this module records events and waits for them.

[Note: three streams]
A pass launches kernels on the caller's stream. NCCL transfers messages on a stream of its own, which waits
for the work that the posting stream has launched so far. Waiting for a Work blocks the current stream, not
the host. The first hop needs no message, so it is launched before the ranks have compared their headers. Its
batch is posted from a second stream, which waits only for an event recorded before that hop: so the messages
travel while the hop computes. `tests/unit/ring/test_happens_before.py` proves that this orders every access.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

from ds_ring.comm.streams import Streams

_log = logging.getLogger(__name__)
SUCCESS, NOT_READY = 0, 600  # of CUDA's driver
THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class CudaStreams(Streams):
    """Synchronize the current stream of a device with a second stream, from which messages are posted."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Nothing but events runs on it; a high priority keeps persistent kernels from holding it up.
        self._posting = torch.cuda.Stream(device, priority=-1)

    def mark(self) -> torch.cuda.Event:
        mark = torch.cuda.Event()
        mark.record(torch.cuda.current_stream(self._device))
        return mark

    def reached(self, mark: torch.cuda.Event) -> bool:
        driver = _load_driver()
        result = NOT_READY if driver is None else driver.cuEventQuery(ctypes.c_void_p(mark.cuda_event))
        if driver is not None and result in (SUCCESS, NOT_READY):
            return bool(result == SUCCESS)
        return bool(mark.query())  # raises torch's error where the device has failed

    @contextmanager
    def behind(self, mark: torch.cuda.Event) -> Iterator[None]:
        self._posting.wait_event(mark)
        with torch.cuda.stream(self._posting):
            yield

    def prepare_thread(self) -> None:
        torch.cuda.set_device(self._device)  # a thread has its own
        driver = _load_driver()
        if driver is None:
            return
        mode = ctypes.c_int(THREAD_LOCAL)
        result = driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        if result != SUCCESS:
            _log.warning("ds_ring: a thread's capture mode cannot be set: error %d of CUDA's driver", result)


# [Note: queries from another thread]
# `Event.query` and `Work.is_completed` hold the interpreter's lock, and a query of an event can wait for
# another thread that is inside CUDA (source: a comment in torch's ProcessGroupNCCL.cpp). Then no Python
# thread runs: heartbeats stop, and the monitor takes this rank for dead. So an event is queried with CUDA's
# driver by ctypes, which releases the lock, at growing intervals (`waiting.poll`), and `is_completed` is
# called once for a batch, after the event recorded after the batch has completed. (The last batch of a pass
# that raised has no such event: there `is_completed` is called at these intervals.)
# While a thread captures a CUDA graph in the mode "global", torch's default, a query by another thread is
# refused and invalidates the capture. A thread that has set its own mode to "thread local" is exempt; torch's
# and NCCL's own watchdogs do the same. A stream that is captured itself is refused by `checks.py`.
# Sources: CUDA's documentation, torch and NCCL. An H200 has shown the capture (tools/results/gpu_h200.md).
@lru_cache(maxsize=1)
def _load_driver() -> Any:
    """Return CUDA's driver library; None where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        _log.warning(
            "ds_ring: CUDA's driver library cannot be loaded (%s): events are queried through torch, which"
            " holds the interpreter's lock and disturbs the capture of a CUDA graph in another thread", error,
        )  # fmt: skip
        return None
