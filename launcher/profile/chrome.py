"""Write timelines as a Chrome trace, for chrome://tracing and https://ui.perfetto.dev.

Owns the format: a process is a ring rank (its pid is the number), a thread is one way of running it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .timeline import Event, Timeline, Transfer

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
