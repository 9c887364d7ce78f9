"""Order the streams of a device by events. Owns the calls of torch.cuda that do, and nothing that is ordered.

[Note: three streams]
A pass launches on the caller's stream. NCCL moves messages on a stream of its own, which begins behind what
the stream that posts has launched so far, and a wait for its Work makes the present stream wait, not the
host. The first hop needs no message, so it is launched before the ranks have compared their headers, and the
messages of its batch are posted from a second stream that stands behind a mark made before that hop: they
travel while it computes. `tests/unit/ring/test_happens_before.py` proves that this orders every access.
"""

from __future__ import annotations

import ctypes
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ds_ring.masks.tiles import SlotRanges, expand_ranges
from ds_ring.ring.trace import is_fake

_log = logging.getLogger(__name__)
SUCCESS, NOT_READY = 0, 600  # of CUDA's driver
THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class Streams:
    """Make and follow marks ([Note: three streams]). On the CPU everything is over when its call returns."""

    def mark(self) -> Any:
        """Return a mark that is reached once all that was launched here so far has run; None for none."""
        return None

    def reached(self, mark: Any) -> bool:
        """Return whether the device has come to a mark; never waits."""
        return True

    @contextmanager
    def behind(self, mark: Any) -> Iterator[None]:
        """Return a context in which what is posted begins behind a mark, not behind what came after it."""
        yield

    def prepare_thread(self) -> None:
        """Let the present thread ask for marks that others have made."""


class CudaStreams(Streams):
    """Order the present stream of a device and one beside it, from which messages are posted.

    (Written for CUDA, not run so far: no GPU was at hand.)
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Nothing but events runs on it; a high priority keeps persistent kernels from holding it up.
        self._posting = torch.cuda.Stream(device, priority=-1)

    def mark(self) -> torch.cuda.Event:
        mark = torch.cuda.Event()
        mark.record(torch.cuda.current_stream(self._device))
        return mark

    def reached(self, mark: torch.cuda.Event) -> bool:
        driver = _driver()
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
        driver = _driver()
        if driver is None:
            return
        mode = ctypes.c_int(THREAD_LOCAL)
        result = driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        if result != SUCCESS:
            _log.warning("ds_ring: a thread's capture mode cannot be set: error %d of CUDA's driver", result)


# [Note: queries from another thread]
# `Event.query` and `Work.is_completed` hold the interpreter's lock, and a query of an event can wait for
# another thread that is inside CUDA (a comment of torch's ProcessGroupNCCL.cpp says so). Then no thread of
# Python runs: heartbeats stop, and the monitor takes this rank for dead. So an event is queried through
# CUDA's driver by ctypes, which releases the lock, at growing intervals (`waiting.poll`), and `is_completed`
# is called once for a batch, after an event behind the batch was reached. (The last batch of a pass that
# raised has no such event: there `is_completed` is asked at these intervals.)
# While a thread captures a CUDA graph in the mode "global", torch's default, a query by another thread is
# refused and invalidates the capture. A thread that has set its own mode to "thread local" is exempt; torch's
# and NCCL's own watchdogs do the same. A stream that is captured itself is refused by `checks.py`.
# All of this is known from CUDA's documentation and the sources of torch and NCCL. No GPU has shown it.
@lru_cache(maxsize=1)
def _driver() -> Any:
    """Return CUDA's driver library; None where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        _log.warning(
            "ds_ring: CUDA's driver library cannot be loaded (%s): events are queried through torch, which"
            " holds the interpreter's lock and disturbs the capture of a CUDA graph in another thread", error,
        )  # fmt: skip
        return None


def stream_of(device: torch.device) -> int:
    """Return a number for the present stream of a device: work on one stream is done in order."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


HOST = Streams()
_cuda_streams = lru_cache(maxsize=None)(CudaStreams)


def streams_of(tensor: Tensor) -> Streams:
    """Return the streams of the device that a tensor lies on."""
    return _cuda_streams(tensor.device) if tensor.is_cuda and not is_fake(tensor) else HOST


# Move small tables to a device without making the host wait for it.
#
# Owns the copy, how much of what was copied is kept (`ByteLRU`), and indices of slots.

KEPT_BYTES = 256 << 20  # of indices
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def outside_inference_mode(function: F) -> F:
    """Let a function make its tensors outside of inference mode, because later calls read them.

    An evaluation in inference mode may be the first that needs a table. A training step could not save an
    inference tensor for its backward pass, nor write to it.
    """
    return torch.inference_mode(False)(function)


class ByteLRU(Generic[T]):
    """Keep what lies on a device, up to a number of bytes; what was used longest ago goes, not the latest."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.nbytes = max_bytes, 0
        self._found: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: Hashable) -> T | None:
        """Return what is kept by a key."""
        if key not in self._found:
            return None
        self._found.move_to_end(key)
        return self._found[key][0]

    def add(self, key: Hashable, value: T, nbytes: int) -> T:
        """Keep a value, and let go of others until all fit; return it."""
        # A running total: a sum over all that is kept would grow with every batch of documents.
        self._found[key] = value, nbytes
        self.nbytes += nbytes
        while self.nbytes > self.max_bytes and len(self._found) > 1:
            self.nbytes -= self._found.popitem(last=False)[1][1]
        return value


_kept: ByteLRU[Tensor] = ByteLRU(KEPT_BYTES)


def to_device(table: Tensor, device: torch.device) -> Tensor:
    """Return a CPU tensor's copy on a device, through pinned memory: a pageable copy makes the host wait."""
    if device.type != "cuda":
        return table.to(device)
    # Fake tensors cannot be pinned, and copying one waits for nothing.
    pinned = table if active_fake_mode() is not None else table.pin_memory()
    return pinned.to(device, non_blocking=True)


def active_fake_mode() -> Any:
    """Return the FakeTensorMode that is on, or None: a tensor of one mode cannot be used in another."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def _place(device: torch.device) -> tuple[torch.device, int, Any]:
    """Return device, stream and fake mode: a copy is ordered before later work of its own stream only."""
    mode = active_fake_mode()
    return device, stream_of(device) if mode is None else 0, mode


@outside_inference_mode
def slot_index(ranges: SlotRanges, device: torch.device) -> Tensor:
    """Return the slots of some ranges as an index, int64 [n], kept from call to call."""
    key = (ranges.tobytes(), *_place(device))
    found = _kept.get(key)
    if found is None:
        index = to_device(torch.from_numpy(expand_ranges(ranges)), device)
        found = _kept.add(key, index, index.nbytes)
    return found


@outside_inference_mode
def numbers_on(numbers: tuple[Any, ...], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return numbers (or rows of numbers) as a tensor on a device, kept from call to call."""
    key = (numbers, dtype, *_place(device))
    found = _kept.get(key)
    if found is None:
        tensor = to_device(torch.tensor(numbers, dtype=dtype), device)
        found = _kept.add(key, tensor, tensor.nbytes)
    return found
