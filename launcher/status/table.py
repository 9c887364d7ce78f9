"""Describe the state of a run in tables of text, and print them on a terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

from .run_status import AttemptStatus, RankStatus, RunStatus

MAX_ROWS = 16  # of a table on a terminal; --json has all
_MAX_LETTERS = 2000


class StatusTable(NamedTuple):
    """Hold a table; `left_out` counts rows that only --json has."""

    title: str
    heads: str  # with a comma and a blank between them
    rows: Sequence[tuple[str, ...]]
    left_out: int = 0


def print_status(status: RunStatus) -> None:
    """Print a run's state, attempts, ranks, links and checkpoints."""
    from rich.markup import escape
    from rich.table import Table

    from ..tables import console, print_table

    moment, why = status.latest, f" ({status.why})" if status.why else ""
    lines = [f"[bold]{escape(plain(status.path))}[/bold]: [bold]{status.state}[/bold]{escape(plain(why))}"]
    if moment is not None:
        loss = "" if moment.loss is None else f", loss {number_text(moment.loss)}"
        speed = moment.tokens_per_second  # not known of a first step
        rate = "" if speed is None else f", {number_text(speed)} tokens per second"
        lines.append(f"step {moment.step:,}{loss}{rate}")
    if status.age_seconds is not None:
        lines.append(f"the latest figures are {seconds_text(status.age_seconds)} old")
    missing = status.attempts[-1].missing if status.attempts else {}
    lines += [escape(plain(f"missing host {name}: {why}")) for name, why in missing.items()]
    console().print("\n".join(lines), soft_wrap=True)
    for part in make_tables(status):
        left = f"; {part.left_out:,} more are in --json" if part.left_out else ""
        table = Table(title=f"{part.title}{left}", title_justify="left")
        for head in part.heads.split(", "):
            table.add_column(head, overflow="fold")
        for row in part.rows:
            table.add_row(*(escape(plain(cell, 400)) for cell in row))
        if part.rows:
            print_table(table)


def make_tables(status: RunStatus, most: int = MAX_ROWS) -> list[StatusTable]:
    """Return the tables of attempts, ranks, links and checkpoints, of at most so many rows each."""
    attempts = status.attempts[::-1]
    ranks = _chosen(status.ranks, most)
    links = [
        (
            str(link.source), str(link.to), link.between, f"{1e3 * link.hop_seconds:.2f} ms",
            f"{1e3 * link.wait_seconds:.2f} ms", f"{link.payload_bytes / 1024:,.0f} KiB",
        )
        for link in status.links[:most]
    ]  # fmt: skip
    checkpoints = [
        (
            checkpoint.tag, _or_blank(checkpoint.step),
            f"{seconds_text(status.at - checkpoint.saved_at)} before", memory_text(checkpoint.total_bytes),
            "yes" if checkpoint.is_latest else "",
        )
        for checkpoint in status.checkpoints
    ]  # fmt: skip
    return [
        StatusTable(
            "Attempts and faults, the latest first",
            "attempt, began, took, ranks, ring, from, last step, ended, what happened",
            [_attempt(attempt, status.at) for attempt in attempts[:most]],
            left_out=max(len(attempts) - most, 0),
        ),
        StatusTable(
            "Ranks of the last attempt",
            "rank, host, state, step, step takes, memory at most, figures are from",
            [_rank(rank) for rank in ranks],
            left_out=len(status.ranks) - len(ranks),
        ),
        StatusTable(
            "Hop times by link, the slowest first",
            "from rank, to rank, host, a hop takes, of which waiting, payload of a hop",
            links,
            left_out=len(status.links) - len(links),
        ),
        StatusTable(
            "Checkpoints that are whole by their manifest, the newest first",
            "tag, step, saved, size, loaded next",
            checkpoints,
        ),
    ]


def _attempt(attempt: AttemptStatus, now: float) -> tuple[str, ...]:
    began = (
        "" if attempt.started_at is None else time.strftime("%m-%d %H:%M:%S", time.gmtime(attempt.started_at))
    )
    took = None if attempt.started_at is None else (attempt.ended_at or now) - attempt.started_at
    text = "; ".join(attempt.faults) or ("" if attempt.why == attempt.verdict else attempt.why or "")
    without = f" (without {', '.join(attempt.missing)})" if attempt.missing else ""
    return (
        str(attempt.number), began, seconds_text(took), _or_blank(attempt.world_size),
        _or_blank(attempt.sequence_parallel_size), attempt.checkpoint or "the start",
        _or_blank(attempt.last_step), attempt.verdict or "under way", f"{text}{without}".lstrip(),
    )  # fmt: skip


def _rank(rank: RankStatus) -> tuple[str, ...]:
    takes = "" if rank.step_seconds is None else f"{1e3 * rank.step_seconds:,.0f} ms"
    age = "none yet" if rank.age_seconds is None else f"{seconds_text(rank.age_seconds)} before"
    memory = "" if rank.memory_bytes is None else memory_text(rank.memory_bytes)
    return str(rank.rank), rank.host or "", rank.state, _or_blank(rank.step), takes, memory, age


def _chosen(ranks: Sequence[RankStatus], most: int) -> Sequence[RankStatus]:
    """Return the ranks to look at first: those that are not at work, then the oldest figures, most memory."""
    if len(ranks) <= most:
        return ranks
    oldest = sorted(ranks, key=lambda rank: (rank.state == "at work", -(rank.age_seconds or 1e18)))
    largest = sorted(ranks, key=lambda rank: -(rank.memory_bytes or 0))
    shown = {rank.rank: rank for rank in (*oldest[: most // 2], *largest[: most // 2])}
    return [shown[rank] for rank in sorted(shown)]


def seconds_text(seconds: float | None) -> str:
    """Return a span of time that a person reads."""
    if seconds is None or not math.isfinite(seconds):
        return "unknown"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def memory_text(size: int | None) -> str:
    """Return bytes as MiB or GiB."""
    if size is None:
        return "unknown"
    if size < 2**20:
        return f"{size / 2**10:,.0f} KiB"
    return f"{size / 2**20:,.0f} MiB" if size < 10 * 2**30 else f"{size / 2**30:,.1f} GiB"


def number_text(value: float | None) -> str:
    """Return a figure of about four digits; unknown, nan and infinite ones by name."""
    if value is None or not math.isfinite(value):
        return "unknown" if value is None else repr(value)
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.4g}"


def plain(text: str, most: int = _MAX_LETTERS) -> str:
    """Return text of any origin, cut, and without letters that a browser hides or a terminal obeys."""
    text = text if len(text) <= most else f"{text[:most]} ..."
    return "".join(sign if sign.isprintable() else " " for sign in text)


def _or_blank(value: object) -> str:
    return "" if value is None else str(value)
