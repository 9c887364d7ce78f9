"""Measure a pass: the peak of tensor memory, in real runs and in fake ones, and what happened when.

Owns the two ways of counting memory. Real: the running sum of the profiler's allocation events, which is
exact and includes kernel workspaces (a resident-set figure is neither); what another thread frees, gloo's
say, it does not see (`tools/check_plan.py` waits for that). Fake: torch's `MemTracker` over fake tensors,
which allocates nothing, so that rank 0 of 1024 with a million tokens can be measured on a laptop. And owns
the trace: what a ring pass did from when to when.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._C._autograd import _profiler_enabled
from torch.profiler import ProfilerActivity, profile, record_function

if TYPE_CHECKING:
    from ds_ring.comm.mesh import RingMesh
    from ds_ring.ring.pool import Buffers

from ds_ring.comm.messages import NOTHING_SENT, PostedBatch

_MARK = "ds_ring span "  # and its number: a span's name among the profiler's events


class Span(NamedTuple):
    """Describe something that a ring pass did.

    Attributes:
        what: "send" (take what arrived, pack and post the next batch), "compute" (a hop's attention of every
            head chunk under way) or "wait" (for the batch). One of each, in this order, is a step.
        phase: "forward" or "backward".
        step: counts the steps of a phase from 0.
        hop: of the head chunk that set out last; "send" and "wait" have the hop that the messages are for,
            one more than what is computed meanwhile.
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
    """Hold what passes did, in order; no two spans overlap.

    Attributes:
        accumulators_bytes, batch: as they are now; the batch posted last.
        processor_time: times are the processor time of the thread, not the system's clock: for virtual ranks,
            so that what else the machine does is not taken for their work.
    """

    ring_rank: int = 0
    spans: list[Span] = field(default_factory=list)
    phase: str = ""
    accumulators_bytes: int = 0
    batch: PostedBatch = NOTHING_SENT
    processor_time: bool = False
    _open: tuple[str, int, int, Any] | None = field(default=None, init=False, repr=False)

    def begin(self, phase: str) -> None:
        """Begin a pass, "forward" or "backward"; a span that the one before left open is dropped."""
        self.phase, self._open = phase, None

    def enter(self, what: str, hop: int, buffers: Buffers) -> None:
        """End the span before, and begin one; under a profiler it is an event of that, too."""
        self.leave(buffers)
        event = None
        if _profiler_enabled():  # costs time where none listens
            event = record_function(f"{_MARK}{len(self.spans)}")
            event.__enter__()
        self._open = what, hop, self._now_ns(), event

    def leave(self, buffers: Buffers) -> None:
        """End a span, if there is one."""
        if self._open is None:
            return
        (what, hop, start_ns, event), self._open = self._open, None
        if event is not None:
            event.__exit__(None, None, None)
        last = self.spans[-1] if self.spans else None
        # A step begins with its "send"; "compute" and "wait" have the same number.
        step = 0 if last is None or last.phase != self.phase else last.step + (what == "send")
        where = (self.phase, step, hop)
        sizes = (buffers.held_bytes, self.accumulators_bytes)
        batch = NOTHING_SENT if what == "compute" else self.batch
        self.spans.append(Span(what, *where, start_ns, self._now_ns(), *sizes, batch))

    def _now_ns(self) -> int:
        return time.thread_time_ns() if self.processor_time else time.time_ns()


@contextmanager
def tracing(mesh: RingMesh) -> Iterator[Trace]:
    """Note what ring passes on a mesh do inside the block; a few microseconds a hop, nothing outside it."""
    trace = Trace(mesh.ring_rank)
    mesh.traces.append(trace)
    try:
        yield trace
    finally:
        mesh.traces.remove(trace)


class Level(NamedTuple):
    """Hold tensor memory from `time_ns` of the profiler's clock on, above what lived when measuring began."""

    time_ns: int
    live_bytes: int


@dataclass
class MemoryPeak:
    """Hold what was measured; filled when the measured block ends.

    Attributes:
        peak_bytes, end_bytes: highest and last total of live bytes above what lived at its start.
        levels: after every allocation and release, by time.
        spans: start and end of the spans of a trace, by their number in it, ns of the same clock.
    """

    peak_bytes: int = 0
    end_bytes: int = 0
    levels: list[Level] = field(default_factory=list, repr=False)
    spans: dict[int, tuple[int, int]] = field(default_factory=dict, repr=False)


@contextmanager
def measure_cpu_memory() -> Iterator[MemoryPeak]:
    """Count CPU tensor memory that a block allocates; the figures are there once the block has ended."""
    result = MemoryPeak()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield result
    allocations = []
    for event in profiler.profiler.kineto_results.events():
        name = event.name()
        if name == "[memory]":
            allocations.append((event.start_ns(), event.nbytes()))
        elif name.startswith(_MARK):
            result.spans[int(name[len(_MARK) :])] = event.start_ns(), event.end_ns()
    for time_ns, change_bytes in sorted(allocations, key=lambda event: event[0]):
        result.end_bytes += change_bytes
        result.levels.append(Level(time_ns, result.end_bytes))
        result.peak_bytes = max(result.peak_bytes, result.end_bytes)


def fake_memory_peak(work: Callable[[], object]) -> int:
    """Return peak bytes of the (fake) tensors that `work` makes; call under `FakeTensorMode`."""
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    with tracker:
        kept = work()
    peaks = tracker.get_tracker_snapshot("peak")
    del kept
    return max(int(snapshot["Total"]) for snapshot in peaks.values())


def shard_unit_bytes(batch: int, heads: int, local_tokens: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of a local [batch, heads, local_tokens, head_dim]: the unit of the memory tables."""
    return batch * heads * local_tokens * head_dim * dtype.itemsize
