"""`CudaStreams` under torch's race detector, with streams and events that stand in for CUDA's.

`tests/unit/ring/test_happens_before.py` proves that a pass orders every access if `mark` and `behind` do what
they say. Here they do it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
import torch
from torch.cuda._sanitizer import EventHandler

from ds_ring.cuda.streams import CudaStreams
from tests.fake_cuda import fake_gpu


class Gpu:
    """Streams and events of one device, and the race detector that they tell everything."""

    def __init__(self) -> None:
        self.detector, self.numbers, self.current = EventHandler(), count(), 0
        self.names = defaultdict[int, list[str]](list)

    def access(self, read: set[int] = frozenset(), written: set[int] = frozenset()) -> list[Any]:  # type: ignore[assignment]
        """Launch a kernel on the current stream; return the races that the detector finds."""
        found = self.detector._handle_kernel_launch(self.current, read, written, set(), "kernel", self.names)
        return list(found)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream.number
        yield
        self.current = before

    def patches(self) -> dict[str, Any]:
        current = Stream(self, 0)
        return {
            "Stream": lambda *args, **kwargs: Stream(self, 1 + next(self.numbers)),
            "Event": lambda: Event(self, next(self.numbers)),
            "stream": self.stream,
            "current_stream": lambda device: current,
        }


class Stream:
    def __init__(self, gpu: Gpu, number: int) -> None:
        self.gpu, self.number = gpu, number

    def wait_event(self, event: Event) -> None:
        self.gpu.detector._handle_event_wait(event.number, self.number)


class Event:
    def __init__(self, gpu: Gpu, number: int) -> None:
        self.gpu, self.number = gpu, number

    def record(self, stream: Stream) -> None:
        self.gpu.detector._handle_event_record(self.number, stream.number)


@pytest.mark.parametrize(("read", "races"), [("before the mark", 0), ("after the mark", 1)])
def test_work_behind_a_mark_waits_for_the_mark_and_for_nothing_later(read: str, races: int) -> None:
    gpu = Gpu()
    with fake_gpu(**gpu.patches()):
        streams = CudaStreams(torch.device("cuda", 0))
        gpu.access(written={1})
        mark = streams.mark()
        gpu.access(written={2})
        with streams.behind(mark):
            assert gpu.current != 0
            assert len(gpu.access(read={1} if read == "before the mark" else {2})) == races
        assert gpu.current == 0
