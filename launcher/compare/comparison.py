"""Check every contestant, then time those that are exact in turns; end within a budget of seconds.

A table is one number of devices and one cell. Each table gets an equal part of the seconds that are left when
it begins. What does not fit is a row that says so.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from .cells import Cell
from .group import NO_ANSWER, START_S, WORKER, Group, Verdict, check, explain_failure, write_answer
from .peers import ONE, PEERS, Peer
from .worker import TIME

ANSWERS = 0.2  # of the budget, for the answers of one process
MIN_CHECK_TOKENS = 1024
TURN_S, MAX_PASSES = 0.2, 20  # a turn of short passes has several
MIN_ROW_S = 1.0
RESERVE = 0.05  # of the budget, to end processes
SHARES = ((1, 16), (1, 4), (1, 32), (3, 32), (1, 16), (1, 2))  # of packed documents: few are long


class Request(NamedTuple):
    """Say what is compared."""

    cells: tuple[Cell, ...]
    sizes: tuple[int, ...]  # numbers of devices
    device: str  # "cpu" or "cuda"
    rounds: int = 7
    budget_s: float = 600.0
    deadline_s: float = 60.0  # of one contestant's check or turn


@dataclass
class Row:
    """Hold what came of one contestant in one table."""

    devices: int
    case: str
    contestant: str
    version: str | None
    take: str
    verdict: Verdict
    checked_tokens: int = 0
    seconds: list[float] = field(default_factory=list)  # of each round, of the slowest rank
    peak_bytes: int = 0  # of the rank that needs most; 0 where it is not measured

    @property
    def median_s(self) -> float | None:
        """Return the median of the rounds."""
        return statistics.median(self.seconds) if self.seconds else None

    def as_json(self) -> dict[str, Any]:
        """Return the row with its verdict's words."""
        return asdict(self) | {"verdict": self.verdict._asdict(), "median_s": self.median_s}


class Clock:
    """Divide the seconds until `end`."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Return the seconds that are left, 0 at least."""
        return max(0.0, self.end - time.monotonic())

    def part(self, parts: int) -> Clock:
        """Return a clock of one of so many equal parts of what is left."""
        return Clock(self.left_s / parts)


def make_documents(tokens: int, multiple: int) -> tuple[int, ...]:
    """Return lengths of packed documents, multiples of `multiple` as `tokens` is; one where it is short."""
    unit = tokens // multiple
    lengths = [unit * share // whole * multiple for share, whole in SHARES[:-1]]
    lengths = [length for length in lengths if length]
    return (*lengths, tokens - sum(lengths))


def compare(
    request: Request, peers: Sequence[Peer] = PEERS, worker: Sequence[str] = WORKER,
    show: Callable[[str], object] = lambda text: None, spent_s: float = 0.0,
) -> list[Row]:  # fmt: skip
    """Return a row for each contestant in each table; errors, hangs and wrong numbers are rows, too.

    Args:
        request: what is compared.
        peers: the contestants.
        worker: the command of a rank, before its arguments.
        show: is told of each step.
        spent_s: seconds of the budget that are gone already.
    """
    clock, rows = Clock(request.budget_s * (1 - RESERVE) - spent_s), list[Row]()
    alone = Group(ONE, 1, request.device, start_s=min(START_S, request.budget_s / 4))
    with tempfile.TemporaryDirectory(prefix="ds-ring-compare-") as name:
        try:
            answers = [
                _find_answer(alone, cell, request, Path(name, f"{number}.pt"), show)
                for number, cell in enumerate(request.cells)
            ]
            for at, size in enumerate(request.sizes):
                part = clock.part(len(request.sizes) - at)
                rows += _compare_size(request, size, alone, answers, part, peers, worker, show)
        finally:
            alone.end()
    return rows


class Answer(NamedTuple):
    """Hold the answer of one process, to a cell of as many tokens as there was time for."""

    cell: Cell
    path: Path
    failure: str = ""


def _find_answer(
    alone: Group, cell: Cell, request: Request, path: Path, show: Callable[[str], object]
) -> Answer:
    """Compute answers of doubled lengths until the cell's own, or until the next would take too long."""
    allowed_s = request.budget_s * ANSWERS / len(request.cells)
    multiple, halvings = 2 * max(request.sizes), 0
    while cell.tokens >> halvings + 1 >= MIN_CHECK_TOKENS and (cell.tokens >> halvings) % (2 * multiple) == 0:
        halvings += 1
    answer, clock = Answer(cell, path, "there was no time for it"), Clock(allowed_s)
    for halving in range(halvings, -1, -1):
        shorter = _shorten(cell, cell.tokens >> halving, multiple)
        show(f"{cell.name}: one process computes {shorter.tokens:,} tokens")
        part = path.with_suffix(f".{halving}")
        seconds = write_answer(alone, shorter, part, clock.left_s)
        if isinstance(seconds, str):
            return answer if answer.failure == "" else Answer(cell, path, seconds)
        answer.path.unlink(missing_ok=True)
        answer = Answer(shorter, part)
        if 5 * seconds > clock.left_s:
            break
    return answer


def _shorten(cell: Cell, tokens: int, multiple: int) -> Cell:
    documents = make_documents(tokens, multiple) if cell.documents else ()
    return replace(cell, tokens=tokens, documents=documents)


def _compare_size(
    request: Request, size: int, alone: Group, answers: Sequence[Answer], clock: Clock, peers: Sequence[Peer],
    worker: Sequence[str], show: Callable[[str], object],
) -> list[Row]:  # fmt: skip
    start_s = min(START_S, clock.left_s / 3)
    groups = [alone, *(Group(peer, size, request.device, worker, start_s) for peer in peers)]
    rows: list[Row] = []
    late: list[Group] = []  # whose ranks hung: they would take the seconds of others again
    try:
        present = [group for group in groups if group.peer.version() is not None]
        for group in present:  # all at once: most of it is importing
            group.start()
        starting = Clock(start_s)
        for group in present:
            group.join(starting.left_s)
        for at, (cell, answer) in enumerate(zip(request.cells, answers, strict=True)):
            table, part = dict[str, Row](), clock.part(len(answers) - at)
            for group in groups:
                if group in late:
                    verdict = Verdict("left out", "it gave no answer in time in an earlier table")
                else:
                    verdict = _check(group, answer, request, part)
                if verdict.why.startswith(NO_ANSWER):
                    late.append(group)
                show(f"{size} devices, {cell.name}: {group.peer.name}: {verdict}")
                table[group.peer.name] = Row(
                    size, cell.name, group.peer.name, group.peer.version(),
                    group.peer.take, verdict, answer.cell.tokens,
                )  # fmt: skip
            exact = [group for group in groups if table[group.peer.name].verdict.word == "exact"]
            _take_turns(exact, table, cell, answer, request, part)
            rows += table.values()
    finally:
        for group in groups[1:]:
            group.end()
    return rows


def _check(group: Group, answer: Answer, request: Request, clock: Clock) -> Verdict:
    if group.peer.version() is None:
        return Verdict("not installed")
    if answer.failure:
        return Verdict("left out", f"one process has no answer: {answer.failure}")
    start_s = min(group.start_s, clock.left_s / 4)
    if not group.join(start_s):
        word = "does not run" if group.has_ended else "left out"
        return Verdict(word, f"its ranks did not join within {start_s:.0f} s {group.end()}".strip())
    deadline_s = min(request.deadline_s, clock.left_s / 4)  # the others need the rest
    if deadline_s < MIN_ROW_S:
        return Verdict("left out", f"the budget of {request.budget_s:g} s is spent")
    return check(group, answer.cell, answer.path, deadline_s)


def _take_turns(
    groups: list[Group], table: dict[str, Row], cell: Cell, answer: Answer, request: Request, clock: Clock
) -> None:
    """Time contestants in turns: one pass to warm up, then rounds that begin with another one each."""
    passes: dict[str, int] = {}
    for turn in range(1 + request.rounds):
        began = time.monotonic()
        start = turn % max(1, len(groups))
        for group in groups[start:] + groups[:start]:
            row, deadline_s = table[group.peer.name], min(request.deadline_s, clock.left_s)
            if deadline_s < MIN_ROW_S or row.verdict.word != "exact":
                continue
            replies, printed = group.call(TIME, cell, answer.path, deadline_s, passes.get(group.peer.name, 1))
            if len(replies) < group.size or any("raised" in reply for reply in replies):
                failure = explain_failure(group.size, replies, printed)
                row.verdict = failure._replace(why=f"exact, then {failure.why}")
                continue
            seconds = max(reply["seconds"] for reply in replies)
            row.peak_bytes = max(reply["peak_bytes"] for reply in replies)
            if turn:
                row.seconds.append(seconds)
            passes[group.peer.name] = max(1, min(MAX_PASSES, int(TURN_S / max(seconds, 1e-6))))
        if 1.5 * (time.monotonic() - began) > clock.left_s:
            break
    for row in table.values():
        if row.verdict.word == "exact" and not row.seconds:
            row.verdict = Verdict("left out", f"exact; the budget of {request.budget_s:g} s is spent")
