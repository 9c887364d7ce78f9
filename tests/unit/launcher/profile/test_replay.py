"""The schedule of virtual ranks with modelled transfers, against small ones that were worked out by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from ds_ring import Causal, RingConfigError, make_layout, simulate
from ds_ring.comm.messages import MessageSize, PostedBatch
from ds_ring.measure.trace import Span, Trace
from ds_ring.simulation.simulate import GeneratedSource, SimulationOptions
from ds_ring_launcher.profile.timeline import Event, Timeline, replay

MBIT_S = 8.0  # a byte takes a microsecond


def trace_of(rank: int, *steps: tuple[int, int, PostedBatch], phase: str = "forward") -> Trace:
    """Spans of steps (send, compute in microseconds, batch); waits are measured as nothing."""
    trace, now_ns = Trace(rank), 1_000_000 * rank
    for number, (send_us, compute_us, batch) in enumerate(steps):
        for what, took_us, hop in (("send", send_us, 1), ("compute", compute_us, 0), ("wait", 0, 1)):
            end_ns = now_ns + 1000 * took_us
            posted = PostedBatch() if what == "compute" else batch
            trace.spans.append(Span(what, phase, number, number + hop, now_ns, end_ns, 0, 0, posted))
            now_ns = end_ns
    return trace


def to(peer: int, *sizes: int) -> tuple[MessageSize, ...]:
    return tuple(MessageSize(peer, size) for size in sizes)


def blocks(timeline: Timeline, rank: int) -> list[tuple[str, float, float]]:
    return [(event.what, event.start_us, event.end_us) for event in timeline.of_rank(rank)]


def test_a_rank_waits_for_its_neighbours_message() -> None:
    """Both send 100 bytes to each other; rank 1 posts at 40, so both messages travel from 40 to 140."""
    first = trace_of(0, (10, 50, PostedBatch(to(1, 100), to(1, 100))), (0, 20, PostedBatch()))
    second = trace_of(1, (40, 200, PostedBatch(to(0, 100), to(0, 100))), (0, 30, PostedBatch()))
    timeline = replay({0: first, 1: second}, MBIT_S)
    assert blocks(timeline, 0) == [
        ("send", 0, 10), ("compute", 10, 60), ("wait", 60, 140), ("compute", 140, 160),
    ]  # fmt: skip
    assert blocks(timeline, 1) == [("send", 0, 40), ("compute", 40, 240), ("compute", 240, 270)]
    assert [tuple(one) for one in timeline.transfers] == [(0, 1, 100, 40, 140), (1, 0, 100, 40, 140)]
    assert timeline.end_us == 270 and timeline.total_us(0, "compute") == 70
    assert timeline.of_rank(0)[0].bytes_sent == timeline.of_rank(0)[0].bytes_received == 100


def test_messages_share_a_link_one_after_the_other() -> None:
    """K and V to rank 1 and as much to rank 2: 10 bytes each, out of one link; then into one."""
    first = trace_of(0, (0, 5, PostedBatch((*to(1, 10, 10), *to(2, 10, 10)), ())))
    others = [trace_of(rank, (0, 5, PostedBatch((), to(0, 10, 10)))) for rank in (1, 2)]
    timeline = replay({0: first, 1: others[0], 2: others[1]}, MBIT_S)
    assert [blocks(timeline, rank)[-1] for rank in range(3)] == [
        ("wait", 5, 40), ("wait", 5, 20), ("wait", 5, 40),
    ]  # fmt: skip
    both_in = trace_of(2, (0, 5, PostedBatch((), (*to(0, 10), *to(1, 10)))))
    senders = [trace_of(rank, (0, 5, PostedBatch(to(2, 10), ()))) for rank in (0, 1)]
    timeline = replay({0: senders[0], 1: senders[1], 2: both_in}, MBIT_S)
    assert [one.end_us for one in timeline.transfers] == [10, 20]


def test_the_next_step_waits_for_what_came_in_the_one_before() -> None:
    """A chain of three: what rank 0 sends late delays rank 1, and through it rank 2."""
    hops = [
        trace_of(0, (0, 100, PostedBatch()), (0, 10, PostedBatch(to(1, 50), ()))),
        trace_of(1, (0, 10, PostedBatch((), to(0, 50))), (0, 10, PostedBatch(to(2, 50), ()))),
        trace_of(2, (0, 10, PostedBatch((), to(1, 50))), (0, 10, PostedBatch())),
    ]
    timeline = replay(dict(enumerate(hops)), MBIT_S)
    assert [one.start_us for one in timeline.transfers] == [100, 150]
    assert blocks(timeline, 2) == [("compute", 0, 10), ("wait", 10, 200), ("compute", 200, 210)]


def test_the_backward_pass_begins_together() -> None:
    traces = {rank: trace_of(rank, (0, 10 * (rank + 1), PostedBatch())) for rank in range(2)}
    for rank, trace in traces.items():
        trace.spans += trace_of(rank, (0, 7, PostedBatch()), phase="backward").spans
    timeline = replay(traces, MBIT_S)
    assert [(event.ring_rank, event.start_us) for event in timeline.events if event.phase == "backward"] == [
        (0, 20), (1, 20),
    ]  # fmt: skip


@pytest.mark.parametrize("rate", [0, -1, float("nan")])
def test_a_link_has_a_rate(rate: float) -> None:
    with pytest.raises(RingConfigError, match="above 0"):
        replay({}, rate)


@pytest.mark.parametrize("ring_size", [1, 2, 4])
def test_a_simulated_ring(ring_size: int) -> None:
    """Of real traces: in order, without overlap, and never shorter than computing or sending alone."""
    source = GeneratedSource(512, heads=4, head_dim=16)
    layout = make_layout("zigzag", tokens=512, ring_size=ring_size)
    result = simulate(
        source,
        pattern=Causal(),
        layout=layout,
        grad_out=True,
        measure_memory=False,
        trace=True,
        options=SimulationOptions(chunk_bytes=1),
    )
    wall = torch.get_num_threads() > 1
    assert all(trace.processor_time != wall for trace in result.traces.values())
    slow, fast = (replay(result.traces, rate) for rate in (10.0, 1e9))
    assert slow.end_us >= fast.end_us and "MODELLED" in slow.note
    assert ("compute in wall time" if wall else "compute in processor time") in slow.note
    assert (slow.end_us > fast.end_us) == (ring_size > 1)
    for rank in range(ring_size):
        events = slow.of_rank(rank)
        check_events(events)
        sent = sum(result.bytes_sent[rank])
        assert sum(event.bytes_sent for event in events if event.what == "send") == sent
        assert slow.end_us >= max(sent * 8 / 10, slow.total_us(rank, "compute"))
        out = [one for one in slow.transfers if one.source == rank]
        assert sum(one.payload_bytes for one in out) == sent
        for before, after in pairwise(out):
            assert before.end_us <= after.start_us


def check_events(events: list[Event]) -> None:
    assert {event.phase for event in events} == {"forward", "backward"}
    assert all(event.duration_us > 0 for event in events)
    for before, after in pairwise(events):
        assert before.end_us <= after.start_us + 1e-6
