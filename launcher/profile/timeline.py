"""Collect what every rank of a ring did when, on one clock.

Owns the events and the clock of real ones. Events of virtual ranks are `replay.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ds_ring.runtime.trace import Span, Trace

WHATS = ("compute", "send", "wait")


class Event(NamedTuple):
    """Hold something that a rank did; times in microseconds since the timeline began."""

    ring_rank: int  # who
    what: str  # "compute", "send" (packing and posting) or "wait"
    phase: str  # "forward" or "backward"
    step: int  # of the phase
    hop: int  # computed, or that of the messages
    # start_us, end_us: from when to when
    start_us: float
    end_us: float
    # bytes_sent, bytes_received: payloads of the batch; 0 for "compute"
    bytes_sent: int
    bytes_received: int
    buffers_bytes: int  # memory of messages at the end

    @property
    def duration_us(self) -> float:
        """Return its length, which is positive."""
        return self.end_us - self.start_us


class Transfer(NamedTuple):
    """Hold a modelled message: ring ranks, bytes, microseconds."""

    source: int
    target: int
    payload_bytes: int
    start_us: float
    end_us: float


@dataclass(frozen=True)
class Timeline:
    """Hold the events of one ring."""

    kind: str  # "real" or "simulated"
    ring_size: int  # P
    # of all ranks, each rank's in order of time; none of one rank overlap, none is empty
    events: tuple[Event, ...]
    note: str  # how its times came about, for titles
    # of a modelled network; empty for real ranks, whose messages are not timed one by one
    transfers: tuple[Transfer, ...] = ()

    @property
    def end_us(self) -> float:
        """Return when the last rank has finished."""
        return max((event.end_us for event in self.events), default=0.0)

    def of_rank(self, ring_rank: int) -> list[Event]:
        """Return a rank's events in order of time."""
        return [event for event in self.events if event.ring_rank == ring_rank]

    def total_us(self, ring_rank: int, what: str, phase: str | None = None) -> float:
        """Return the time that a rank spent with one thing, in one phase or in both."""
        return sum(
            event.duration_us
            for event in self.of_rank(ring_rank)
            if event.what == what and phase in (None, event.phase)
        )


def timeline_of(traces: Mapping[int, Trace], one_clock: bool = True, where: str = "one machine") -> Timeline:
    """Return the timeline of real ranks.

    Args:
        traces: by ring rank, of the same passes.
        one_clock: the ranks ran on one machine, whose clock all spans have. False for several machines: each
            rank's times are then shifted so that all leave their first wait with messages at the same moment,
            which is true to about the time of one message.
        where: they ran, for titles.
    """
    offsets_ns = {rank: 0 if one_clock else _first_wait_ns(trace) for rank, trace in traces.items()}
    starts_ns = [span.start_ns - offsets_ns[rank] for rank, trace in traces.items() for span in trace.spans]
    first_ns = min(starts_ns, default=0)
    events = [
        event_of(rank, span, (span.start_ns - offset_ns) / 1e3, (span.end_ns - offset_ns) / 1e3)
        for rank, trace in sorted(traces.items())
        for offset_ns in (offsets_ns[rank] + first_ns,)
        for span in trace.spans
        if span.end_ns > span.start_ns
    ]
    clock = "one clock" if one_clock else "clocks aligned at the end of each rank's first wait"
    return Timeline("real", len(traces), tuple(events), f"real ranks on {where}, {clock}")


def event_of(ring_rank: int, span: Span, start_us: float, end_us: float) -> Event:
    """Return a span as an event of a timeline."""
    sizes = (span.batch.bytes_sent, span.batch.bytes_received, span.buffers_bytes)
    return Event(ring_rank, span.what, span.phase, span.step, span.hop, start_us, end_us, *sizes)


def _first_wait_ns(trace: Trace) -> int:
    """Return when the first wait for a message ended; of a rank that never waits, when it began."""
    ends = [span.end_ns for span in trace.spans if span.what == "wait" and span.batch.receives]
    return ends[0] if ends else min((span.start_ns for span in trace.spans), default=0)
