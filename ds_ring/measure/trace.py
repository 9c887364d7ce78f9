"""Record what ring passes did, and when: spans of sending, computing and waiting.

Owns the times. `comm/messages.py` defines the events of a pass.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

from ds_ring.comm.mesh import RingMesh
from ds_ring.comm.messages import NOTHING_SENT, BatchEvent, Observers, PostedBatch

MARK = "ds_ring span "  # and its number: a span's name among the profiler's events


class Span(NamedTuple):
    """Describe something that a ring pass did.

    Attributes:
        what: "send" (take what arrived, pack and post the next batch), "compute" (a hop's attention of every
            head chunk under way) or "wait" (for the batch). One of each, in this order, is a step.
        phase: "forward" or "backward".
        step: counts the steps of a phase from 0.
        hop: of the head chunk that set out last, as in `BatchEvent` (`comm/messages.py`).
        start_ns, end_ns: of the system's clock (`time.time_ns`), or as `Trace.processor_time` says.
        buffers_bytes: memory of messages at the end: in flight, held, or kept for the next ones.
        accumulators_bytes: float32 accumulators of low-precision results.
        batch: the messages posted ("send") or waited for ("wait"); empty for "compute".
    """

    what: str
    phase: str
    step: int
    hop: int
    start_ns: int
    end_ns: int
    buffers_bytes: int
    accumulators_bytes: int
    batch: PostedBatch = NOTHING_SENT


@dataclass
class Trace:
    """Record what ring passes did, in order; no two spans overlap. An `Observer`.

    Attributes:
        processor_time: times are the processor time of the thread, not the system's clock: for virtual ranks,
            so that other load of the machine does not count as their work.
    """

    spans: list[Span] = field(default_factory=list)
    processor_time: bool = False
    _open: tuple[BatchEvent, int, Any] | None = field(default=None, init=False, repr=False)
    _posted: PostedBatch = field(default=NOTHING_SENT, init=False, repr=False)

    def on_batch(self, event: BatchEvent) -> None:
        """End the span before, and begin one; under a profiler it is an event of that, too."""
        if event.stage == "begin":
            self._open = None  # a pass that raised has left it open
            return
        if event.stage == "compute":
            self._posted = event.posted
        self._end_span(event)
        if event.stage == "end":
            return
        profiled = None
        if _profiler_enabled():  # costs time without a profiler
            profiled = record_function(f"{MARK}{len(self.spans)}")
            profiled.__enter__()
        self._open = event, self._now_ns(), profiled

    def _end_span(self, now: BatchEvent) -> None:
        if self._open is None:
            return
        (event, start_ns, profiled), self._open = self._open, None
        if profiled is not None:
            profiled.__exit__(None, None, None)
        last = self.spans[-1] if self.spans else None
        # A step begins with its "send"; "compute" and "wait" have the same number.
        step = 0 if last is None or last.phase != event.phase else last.step + (event.stage == "send")
        times = start_ns, self._now_ns()
        sizes = now.buffers_bytes, now.accumulators_bytes
        batch = NOTHING_SENT if event.stage == "compute" else self._posted
        self.spans.append(Span(event.stage, event.phase, step, event.hop, *times, *sizes, batch))

    def _now_ns(self) -> int:
        return time.thread_time_ns() if self.processor_time else time.time_ns()


@contextmanager
def tracing(mesh: RingMesh) -> Iterator[Trace]:
    """Record what ring passes on a mesh do inside the block; a few microseconds a hop, nothing outside it."""
    trace, observers = Trace(), mesh.owners[Observers]
    observers.append(trace)
    try:
        yield trace
    finally:
        observers.remove(trace)
