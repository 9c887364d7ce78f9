"""Place virtual ranks on one timeline: compute as measured, messages by a model of the links."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from ds_ring.errors import RingConfigError
from ds_ring.runtime.trace import Span, Trace

from .timeline import Event, Timeline, Transfer, event_of


@dataclass(eq=False)
class _Message:
    source: int
    target: int
    payload_bytes: int
    ends_posted: int = 0
    arrives_us: float | None = None


class _Step(NamedTuple):
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


def _steps_of(traces: Mapping[int, Trace], phase: str) -> dict[int, list[_Step]]:
    """Return the steps of a phase by rank; both ends of a message share one object."""
    messages: dict[tuple[int, int, int], _Message] = {}
    steps: dict[int, list[_Step]] = {}
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
            steps[rank].append(_Step(send, compute, wait, mine))
    return steps


class _Phase:
    """Simulate one phase of all ranks, event by event."""

    def __init__(self, steps: Mapping[int, list[_Step]], us_per_byte: float, begin_us: float) -> None:
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
