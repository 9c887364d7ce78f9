"""Order the streams of a device by events. Owns the calls of torch.cuda that do, and nothing that is ordered.

[Note: three streams]
A pass launches on the caller's stream. NCCL moves messages on a stream of its own, which begins behind what
the stream that posts has launched so far, and a wait for its Work makes the present stream wait, not the
host. The first hop needs no message, so it is launched before the ranks have compared their headers, and the
messages of its batch are posted from a second stream that stands behind a mark made before that hop: they
travel while it computes. `tests/unit/runtime/test_happens_before.py` proves that this orders every access.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from ds_ring.runtime.trace import is_fake


class Streams(Protocol):
    """Make and follow marks; see [Note: three streams]."""

    def mark(self) -> Any:
        """Return a mark that is reached once all that was launched here so far has run; None for none."""
        ...

    def reached(self, mark: Any) -> bool:
        """Return whether the device has come to a mark; never waits."""
        ...

    def behind(self, mark: Any) -> Any:
        """Return a context in which what is posted begins behind a mark, not behind what came after it."""
        ...


class HostStreams:
    """Order nothing: on the CPU everything is over when its call returns."""

    def mark(self) -> None:
        return None

    def reached(self, mark: None) -> bool:
        return True

    @contextmanager
    def behind(self, mark: None) -> Iterator[None]:
        yield


class CudaStreams:
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
        return bool(mark.query())

    @contextmanager
    def behind(self, mark: torch.cuda.Event) -> Iterator[None]:
        self._posting.wait_event(mark)
        with torch.cuda.stream(self._posting):
            yield


HOST = HostStreams()
_cuda_streams = lru_cache(maxsize=None)(CudaStreams)


def streams_of(tensor: Tensor) -> Streams:
    """Return the streams of the device that a tensor lies on."""
    return _cuda_streams(tensor.device) if tensor.is_cuda and not is_fake(tensor) else HOST
