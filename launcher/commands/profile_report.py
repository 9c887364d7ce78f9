"""Print what `ds-ring profile` found: rows for machines, tables for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .shapes import MIB

if TYPE_CHECKING:
    from ..profile.job import Job
    from ..profile.measure import RingRun
    from ..profile.timeline import Timeline


def row_of(run: RingRun) -> dict[str, Any]:
    """Return a ring for machines; bytes, those of `at_peak` of the rank that needs most."""
    from ..profile.bars import parts_of

    return {
        "run": run.kind,
        "ring_size": run.ring_size,
        "layout": run.layout_name,
        "peak_bytes": run.peak_bytes,
        "ring_rank": run.busiest,
        "at_peak": parts_of(run.ranks[run.busiest].memory),
        "peak_bytes_by_rank": [rank.memory.peak_bytes for rank in run.ranks],
    }


def times_of(timeline: Timeline) -> dict[str, Any]:
    """Return a timeline for machines; milliseconds by ring rank."""
    from ..profile.timeline import WHATS

    ranks = range(timeline.ring_size)
    spent = {
        f"{what}_ms": [round(timeline.total_us(rank, what) / 1e3, 3) for rank in ranks] for what in WHATS
    }
    return {
        "timeline": timeline.kind, "ring_size": timeline.ring_size, "note": timeline.note,
        "wall_ms": round(timeline.end_us / 1e3, 3), **spent,
    }  # fmt: skip


def print_memory(job: Job, runs: list[RingRun]) -> None:
    """Print a table of peaks and their parts, a row for each ring."""
    from rich.table import Table

    from ..profile.bars import LABELS, bars_of, one_over_p, shown_parts
    from ..tables import print_table

    bars = bars_of(runs)
    parts, line = shown_parts(bars), one_over_p(bars)
    table = Table(title=f"{job.title}: MiB of the rank that needs most", caption_justify="left")
    for name in ("ring", "run", "layout", "rank", "peak", "of 1/P", *(LABELS[part] for part in parts)):
        table.add_column(name, justify="left" if name in ("run", "layout") else "right")
    for run, bar in zip(runs, bars, strict=True):
        table.add_row(
            str(bar.ring_size), bar.kind, run.layout_name, str(bar.ring_rank), f"{bar.total_bytes / MIB:.2f}",
            f"{bar.total_bytes / line.at(bar.ring_size):.3f}",
            *(f"{bar.parts[part] / MIB:.2f}" for part in parts),
        )  # fmt: skip
    print_table(table)


def print_times(timelines: list[Timeline]) -> None:
    """Print a table for each timeline, a row for each rank."""
    from rich.table import Table

    from ..profile.timeline import WHATS
    from ..tables import console, print_table

    for timeline in timelines:
        said = f"\ntimeline of ring {timeline.ring_size}, {timeline.kind}: {timeline.note}"
        console().print(said, markup=False)
        table = Table(caption=f"ms of {timeline.end_us / 1e3:.1f}")
        for name in ("rank", *WHATS):
            table.add_column(name, justify="right")
        for rank in range(timeline.ring_size):
            spent = [timeline.total_us(rank, what) for what in WHATS]
            table.add_row(str(rank), *(f"{us / 1e3:.1f}" for us in spent))
        print_table(table)
