"""Collect what every rank of a ring did when, on one clock, and write it as a Chrome trace.

`timeline_of` reads the events of real ranks. `replay` places virtual ranks on one clock: their compute as
measured, their messages by a model of the links.
"""

from __future__ import annotations

import heapq
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from ds_ring.errors import RingConfigError
from ds_ring.measure.trace import Span, Trace

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
    return Timeline("real", len(traces), tuple(events), f"ranks on {where}; {clock}")


def this_machine(ranks: int, threads: int) -> str:
    """Return for a title how many cores there are here, and whether ranks share them."""
    cores = len(os.sched_getaffinity(0))
    text = f"{cores} {'core' if cores == 1 else 'cores'}"
    if ranks * threads <= cores:
        return f"one machine with {text}"
    return f"one machine, whose {text} they share: times are longer than on cores of their own"


def event_of(ring_rank: int, span: Span, start_us: float, end_us: float) -> Event:
    """Return a span as an event of a timeline."""
    sizes = (span.batch.bytes_sent, span.batch.bytes_received, span.buffers_bytes)
    return Event(ring_rank, span.what, span.phase, span.step, span.hop, start_us, end_us, *sizes)


def _first_wait_ns(trace: Trace) -> int:
    """Return when the first wait for a message ended; of a rank that never waits, when it began."""
    ends = [span.end_ns for span in trace.spans if span.what == "wait" and span.batch.receives]
    return ends[0] if ends else min((span.start_ns for span in trace.spans), default=0)


# A Chrome trace, for chrome://tracing and https://ui.perfetto.dev: a process is a ring rank (its pid is the
# rank's number), a thread is one way of running it.

LINKS = 10  # added to a timeline's thread: its modelled links


def chrome_trace(timelines: Sequence[Timeline], title: str = "") -> dict[str, Any]:
    """Return one JSON object; `ts` and `dur` are microseconds, bytes are in `args`.

    Args:
        timelines: real and simulated ones of rings of one size, each a thread of every rank.
        title: what was run.
    """
    rows: list[dict[str, Any]] = []
    # Without a sort index the viewers order processes by their first event.
    for rank in range(max((timeline.ring_size for timeline in timelines), default=0)):
        rows.append(_named("process", rank, 0, f"ring rank {rank}"))
        order = {"name": "process_sort_index", "ph": "M", "pid": rank, "tid": 0}
        rows.append(order | {"args": {"sort_index": rank}})
    for thread, timeline in enumerate(timelines):
        for rank in range(timeline.ring_size):
            rows.append(_named("thread", rank, thread, timeline.kind))
            if timeline.transfers:
                rows.append(_named("thread", rank, thread + LINKS, f"{timeline.kind} link, out (modelled)"))
        rows += [_event(event, thread) for event in timeline.events]
        rows += _transfers(timeline.transfers, thread + LINKS)
    notes = {timeline.kind: timeline.note for timeline in timelines}
    return {"traceEvents": rows, "displayTimeUnit": "ms", "otherData": {"title": title, **notes}}


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": f"{what}_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _event(event: Event, thread: int) -> dict[str, Any]:
    args = {"phase": event.phase, "step": event.step, "hop": event.hop, "buffers_bytes": event.buffers_bytes}
    if event.what != "compute":
        args |= {"bytes_sent": event.bytes_sent, "bytes_received": event.bytes_received}
    return {
        "name": f"{event.what} hop {event.hop}", "cat": event.phase, "ph": "X", "pid": event.ring_rank,
        "tid": thread, "ts": event.start_us, "dur": event.duration_us, "args": args,
    }  # fmt: skip


def _transfers(transfers: Sequence[Transfer], thread: int) -> Iterator[dict[str, Any]]:
    for one in transfers:
        args = {"bytes": one.payload_bytes, "to": one.target}
        yield {
            "name": f"to rank {one.target}", "cat": "transfer", "ph": "X", "pid": one.source, "tid": thread,
            "ts": one.start_us, "dur": one.end_us - one.start_us, "args": args,
        }  # fmt: skip


@dataclass(eq=False)
class _Message:
    source: int
    target: int
    payload_bytes: int
    ends_posted: int = 0
    arrives_us: float | None = None


class _ReplayStep(NamedTuple):
    """Hold a step of a rank as measured, and its messages."""

    send: Span
    compute: Span
    wait: Span
    messages: list[_Message]

    @property
    def send_us(self) -> float:
        return (self.send.end_ns - self.send.start_ns) / 1e3

    @property
    def compute_us(self) -> float:
        return (self.compute.end_ns - self.compute.start_ns) / 1e3


# [Note: modelled transfers]
# Computing and packing take as long as they were measured to. Every rank has one link that carries one
# message out and one message in at a time, at full rate each way, without latency. A message leaves when both
# ends have posted it (as gloo and NCCL do) and both links are free; messages that are ready at the same
# moment leave in the order of their source, target and number. A step is over when its attention is computed
# and all messages of its batch, sent and received, have arrived: the next one of the rank begins then. A pass
# begins when all ranks have ended the one before, since they compare headers first. So the schedule follows
# from the traces alone. (Compute slows down where a machine computes and sends with the same cores; here it
# does not.)
def replay(traces: Mapping[int, Trace], link_mbit_s: float) -> Timeline:
    """Return the timeline of virtual ranks; see [Note: modelled transfers].

    Args:
        traces: by ring rank, of all ranks of one simulation.
        link_mbit_s: rate of a rank's link each way, 10^6 bits per second.
    """
    if not link_mbit_s > 0:
        raise RingConfigError(f"link: expected a rate above 0 Mbit/s, got {link_mbit_s}; 10000, say")
    events: list[Event] = []
    transfers: list[Transfer] = []
    begin_us = 0.0
    for phase in ("forward", "backward"):
        replayed = _Phase(_steps_of(traces, phase), 8 / link_mbit_s, begin_us)
        replayed.run()
        events += replayed.events
        transfers += replayed.transfers
        begin_us = max((event.end_us for event in replayed.events), default=begin_us)
    events.sort(key=lambda event: (event.ring_rank, event.start_us))
    clock = "processor" if all(trace.processor_time for trace in traces.values()) else "wall"
    note = f"compute in {clock} time, rank by rank; transfers MODELLED: {link_mbit_s:g} Mbit/s each way"
    return Timeline("simulated", len(traces), tuple(events), note, tuple(transfers))


def _steps_of(traces: Mapping[int, Trace], phase: str) -> dict[int, list[_ReplayStep]]:
    """Return the steps of a phase by rank; both ends of a message share one object."""
    messages: dict[tuple[int, int, int], _Message] = {}
    steps: dict[int, list[_ReplayStep]] = {}
    for rank, trace in traces.items():
        spans = (span for span in trace.spans if span.phase == phase)
        posted: Counter[tuple[int, int]] = Counter()
        steps[rank] = []
        for _, (send, compute, wait) in groupby(spans, key=lambda span: span.step):
            ends = [(rank, message.peer, message.payload_bytes) for message in send.batch.sends]
            ends += [(message.peer, rank, message.payload_bytes) for message in send.batch.receives]
            mine = []
            for source, target, size in ends:
                # The nth message between two ranks is the same one at both ends: order is the only tag.
                key = (source, target, posted[source, target])
                posted[source, target] += 1
                mine.append(messages.setdefault(key, _Message(source, target, size)))
                assert mine[-1].payload_bytes == size, f"ends of a message differ: {key}"
            steps[rank].append(_ReplayStep(send, compute, wait, mine))
    return steps


class _Phase:
    """Simulate one phase of all ranks, event by event."""

    def __init__(self, steps: Mapping[int, list[_ReplayStep]], us_per_byte: float, begin_us: float) -> None:
        self.steps, self.us_per_byte = steps, us_per_byte
        self.events: list[Event] = []
        self.transfers: list[Transfer] = []
        self._out_free_us: defaultdict[int, float] = defaultdict(float)
        self._in_free_us: defaultdict[int, float] = defaultdict(float)
        self._under_way: dict[int, tuple[int, float]] = {}  # by rank: the step posted last, and when
        self._posts: list[tuple[float, int, int]] = []  # to come: when, rank, step
        for rank in steps:
            self._begin(rank, 0, begin_us)

    def run(self) -> None:
        """Process posts in order of time until every rank has finished."""
        while self._posts:
            now_us, rank, step = heapq.heappop(self._posts)
            self._under_way[rank] = step, now_us
            messages = self.steps[rank][step].messages
            for message in messages:
                message.ends_posted += 1
            ready = [message for message in messages if message.ends_posted == 2]
            for message in sorted(ready, key=lambda one: (one.source, one.target)):
                self._transfer(message, now_us)
            for concerned in sorted({rank, *(r for one in ready for r in (one.source, one.target))}):
                self._end_if_over(concerned)
        assert not self._under_way, f"no end: ranks {sorted(self._under_way)} wait for messages"

    def _begin(self, rank: int, step: int, now_us: float) -> None:
        """Start a step by packing its messages."""
        if step < len(self.steps[rank]):
            this = self.steps[rank][step]
            self._note(rank, this.send, now_us, now_us + this.send_us)
            # Messages leave when packing is done, not when it starts.
            heapq.heappush(self._posts, (now_us + this.send_us, rank, step))

    def _transfer(self, message: _Message, now_us: float) -> None:
        source, target = message.source, message.target
        start_us = max(now_us, self._out_free_us[source], self._in_free_us[target])
        message.arrives_us = end_us = start_us + message.payload_bytes * self.us_per_byte
        self._out_free_us[source] = self._in_free_us[target] = end_us
        self.transfers.append(Transfer(source, target, message.payload_bytes, start_us, end_us))

    def _end_if_over(self, rank: int) -> None:
        """End the current step once all arrivals are known, and start the next one."""
        if rank not in self._under_way:
            return
        step, posted_us = self._under_way[rank]
        this = self.steps[rank][step]
        arrivals = [message.arrives_us for message in this.messages]
        if None in arrivals:
            return
        del self._under_way[rank]
        computed_us = posted_us + this.compute_us
        end_us = max([computed_us, *(arrival for arrival in arrivals if arrival is not None)])
        self._note(rank, this.compute, posted_us, computed_us)
        self._note(rank, this.wait, computed_us, end_us)
        self._begin(rank, step + 1, end_us)

    def _note(self, rank: int, span: Span, start_us: float, end_us: float) -> None:
        if end_us > start_us:
            self.events.append(event_of(rank, span, start_us, end_us))
