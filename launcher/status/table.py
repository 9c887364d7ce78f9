"""Print what is known of a run as tables for a terminal."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from ..tables import console, print_table
from .page import memory_text, number_text, seconds_text, what_happened
from .run_status import LinkStatus, RankStatus, RunStatus

MOST_ROWS = 16  # of ranks and links; --json has all
_MOST_LETTERS = 400


def print_status(status: RunStatus) -> None:
    """Print a run's state, attempts, ranks, links and checkpoints."""
    console().print(_summary(status), soft_wrap=True)
    print_table(_attempts(status))
    if status.ranks:
        print_table(_ranks(status))
    if status.links:
        print_table(_links(status))
    if status.checkpoints:
        print_table(_checkpoints(status))


def _summary(status: RunStatus) -> str:
    moment, why = status.last_moment, f" ({status.why})" if status.why else ""
    lines = [f"[bold]{_cut(status.path)}[/bold]: [bold]{status.state}[/bold]{_cut(why)}"]
    if moment is not None:
        rate, loss = number_text(moment.tokens_per_second), number_text(moment.loss)
        lines.append(f"step {moment.step:,}, loss {loss}, {rate} tokens per second")
    if status.age_seconds is not None:
        lines.append(f"the latest figures are {seconds_text(status.age_seconds)} old")
    missing = status.attempts[-1].missing if status.attempts else {}
    lines += [f"missing host {_cut(name)}: {_cut(why)}" for name, why in missing.items()]
    return "\n".join(lines)


def _attempts(status: RunStatus) -> Table:
    table = _titled("attempts, the latest last")
    for head in ("attempt", "ranks", "ring", "from", "last step", "took", "ended"):
        table.add_column(head)
    table.add_column("what happened", overflow="fold")
    for one in status.attempts[-MOST_ROWS:]:
        took = None if one.started_at is None else (one.ended_at or status.at) - one.started_at
        said = what_happened(one)
        table.add_row(
            str(one.number), _or_blank(one.world_size), _or_blank(one.sequence_parallel_size),
            _cut(one.checkpoint or "the start"), _or_blank(one.last_step), seconds_text(took),
            one.verdict or "under way", _cut(said),
        )  # fmt: skip
    return table


def _ranks(status: RunStatus) -> Table:
    shown = _chosen(status.ranks)
    more = len(status.ranks) - len(shown)
    left = f"; {more:,} more are in --json" if more else ""
    table = _titled(f"ranks of the last attempt{left}")
    for head in ("rank", "host", "state", "step", "step takes", "memory, at most", "figures"):
        table.add_column(head)
    for one in shown:
        takes = "" if one.step_seconds is None else f"{1e3 * one.step_seconds:,.0f} ms"
        memory = "" if one.memory_bytes is None else memory_text(one.memory_bytes)
        age = "none" if one.age_seconds is None else f"{seconds_text(one.age_seconds)} old"
        table.add_row(
            str(one.rank), _cut(one.host or ""), _cut(one.state), _or_blank(one.step), takes, memory, age
        )
    return table


def _chosen(ranks: tuple[RankStatus, ...]) -> list[RankStatus]:
    """Return the ranks to look at first: those that are not at work, then the oldest figures, most memory."""
    if len(ranks) <= MOST_ROWS:
        return list(ranks)
    oldest = sorted(ranks, key=lambda one: (one.state == "at work", -(one.age_seconds or 1e18)))
    largest = sorted(ranks, key=lambda one: -(one.memory_bytes or 0))
    kept = {one.rank: one for one in (*oldest[: MOST_ROWS // 2], *largest[: MOST_ROWS // 2])}
    return [kept[rank] for rank in sorted(kept)]


def _links(status: RunStatus) -> Table:
    more = len(status.links) - MOST_ROWS
    left = f"; {more:,} more are in --json" if more > 0 else ""
    table = _titled(f"hop times by link, the slowest first{left}")
    for head in ("from rank", "to rank", "host", "a hop takes", "of which waiting", "payload"):
        table.add_column(head)
    for one in status.links[:MOST_ROWS]:
        table.add_row(*_link(one))
    return table


def _link(one: LinkStatus) -> tuple[str, ...]:
    hop, wait = f"{1e3 * one.hop_seconds:.2f} ms", f"{1e3 * one.wait_seconds:.2f} ms"
    return str(one.source), str(one.to), _cut(one.between), hop, wait, f"{one.payload_bytes / 1024:,.0f} KiB"


def _checkpoints(status: RunStatus) -> Table:
    table = _titled("checkpoints that are whole by their manifest, the newest first")
    for head in ("tag", "step", "saved", "size", "loaded next"):
        table.add_column(head)
    for one in status.checkpoints:
        age = f"{seconds_text(status.at - one.saved_at)} ago"
        size = memory_text(one.total_bytes)
        table.add_row(_cut(one.tag), _or_blank(one.step), age, size, "yes" if one.is_latest else "")
    return table


def _titled(title: str) -> Table:
    return Table(title=title, title_justify="left")


def _cut(text: str) -> str:
    """Return text of any origin without letters that steer a terminal, and without rich's markup."""
    text = text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]} ..."
    return escape("".join(sign if sign.isprintable() else " " for sign in text))


def _or_blank(value: object) -> str:
    return "" if value is None else str(value)
