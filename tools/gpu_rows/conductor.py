"""Compute rows in processes of their own, and write each result at once. Knows no torch and no GPU.

A process computes the rows of one part, one after the other. Whatever ends it (an exception, an exit, a
signal, a row's limit) costs the row under way: the next process goes on behind it. Results are appended to
DIR/gpu_first.jsonl and flushed to the disk when they come; DIR/gpu_first.md is the table of them.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from .order import PARTS, Row

Result = dict[str, Any]  # "row", and "case", "results" and "wrong" of a ResultRow
Compute = Callable[[Row], Iterable[tuple[Any, Any, str]]]
START_S = 60.0  # of a process, beside the limit of its first row
BROKEN = 75  # exit status of a process whose device gives errors only


class Book:
    """Hold results, those of an earlier call among them, and write each one at once."""

    def __init__(self, folder: Path, where: Result, again: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.where, self.results = folder / "gpu_first.jsonl", where, list[Result]()
        lines = [] if again or not self.path.is_file() else self.path.read_text().splitlines()
        known = [json.loads(line) for line in lines if line.endswith("}")]  # a crash may cut the last one
        if known and known[0] == where:
            bad = {result["row"] for result in known[1:] if result["wrong"]}
            ended = {result["row"] for result in known[1:] if "seconds" in result} - bad
            self.results = [result for result in known[1:] if result["row"] in ended]
        self.path.write_text("")
        for result in (where, *self.results):
            self._append(result)

    @property
    def done(self) -> set[str]:
        """Return the rows that have ended without a fault."""
        return {f"{result['part']}: {result['row']}" for result in self.results}

    def add(self, row: Row, case: Any, results: Any, wrong: str = "", **facts: Any) -> None:
        """Write a result."""
        result = {"part": row.part, "row": row.name, "case": case, "results": results, "wrong": wrong} | facts
        self.results.append(result)
        self._append(result)
        self.path.with_suffix(".new").write_text(self.table())
        self.path.with_suffix(".new").replace(self.path.with_suffix(".md"))
        if wrong:
            print(f"WRONG: {row.part}: {row.name}: {wrong}", file=sys.stderr, flush=True)

    def _append(self, result: Result) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(result, default=str) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def table(self) -> str:
        """Return the results as Markdown, a table for each part."""
        text = [json.dumps(self.where), ""]
        for part, title in PARTS.items():
            shown = [
                result
                for result in self.results
                if result["part"] == part and ("seconds" not in result or result["wrong"])
            ]
            cells = [
                {"row": result["row"], **result["case"], **result["results"]}
                | ({"WRONG": result["wrong"]} if result["wrong"] else {})
                for result in shown
            ]
            columns = list(dict.fromkeys(key for row in cells for key in row))
            lines = [columns, ["---"] * len(columns)] if cells else []
            lines += [
                [" ".join(str(row.get(key, "")).replace("|", "/").split()) for key in columns]
                for row in cells
            ]
            text += [f"## {title}", "", *(f"| {' | '.join(line)} |" for line in lines), ""] if cells else []
        return "\n".join(text)


def conduct(
    rows: Sequence[Row], book: Book, compute: Compute, seconds: float, healthy: Callable[[], bool]
) -> None:
    """Compute the rows in order; after `seconds` in all the rest is noted as not reached."""
    end, left = time.monotonic() + seconds, list(rows)
    while left and time.monotonic() < end:
        part, environment = left[0].part, left[0].environment
        count = next(
            (n for n, row in enumerate(left) if (row.part, row.environment) != (part, environment)), len(left)
        )
        del left[: _run(left[:count], book, compute, end, healthy)]
    for row in left:
        book.add(row, {}, {}, "not reached; call again")


def _run(group: Sequence[Row], book: Book, compute: Compute, end: float, healthy: Callable[[], bool]) -> int:
    """Compute rows in one process; return how many of them are over, at least one."""
    reader, writer = os.pipe()
    log = book.path.with_suffix(".log")
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _child(group, writer, log, compute, healthy)
    os.close(writer)
    over, begun, fault = 0, time.monotonic(), ""
    limit = [min(end, begun + START_S + group[0].seconds)]
    try:
        for message in _messages(child, reader, limit):
            if "begin" in message:
                begun = time.monotonic()
                limit[0] = min(end, begun + group[over].seconds)
            elif "end" in message:
                book.add(group[over], {}, {}, message["end"], seconds=round(time.monotonic() - begun, 1))
                print(
                    f"{time.monotonic() - begun:6.1f} s  {group[over].part}: {group[over].name}", flush=True
                )
                over += 1
                limit[0] = min(end, time.monotonic() + START_S)
            else:
                book.add(group[over], *message["result"])
    except TimeoutError:
        fault = f"did not end within {time.monotonic() - begun:.1f} s"
    finally:
        os.close(reader)
        status = os.waitstatus_to_exitcode(_ended(child, 0.0 if fault else 1.0))
    if over < len(group) and (over == 0 or status != BROKEN):
        last = (log.read_text(errors="replace").strip().splitlines() or [""])[-1]
        fault = fault or f"the process ended with {status}; its log: {last[:200]}"
        book.add(group[over], {}, {}, fault, seconds=round(time.monotonic() - begun, 1))
        over += 1
    return over


def _messages(child: int, reader: int, limit: list[float]) -> Iterator[Any]:
    """Yield the messages of a process until it has ended; raise TimeoutError when limit[0] has passed."""
    rest, has_ended = b"", False
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        while True:
            if selector.select(min(0.2, max(0.0, limit[0] - time.monotonic()))):
                if not (data := os.read(reader, 1 << 16)):
                    return
                *lines, rest = (rest + data).split(b"\n")
                yield from (json.loads(line) for line in lines)
            elif has_ended:  # a process that it has started still has the pipe
                return
            elif time.monotonic() >= limit[0]:
                raise TimeoutError
            else:
                has_ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _ended(child: int, grace_s: float) -> int:
    """End a process and all that it has started, at once or after a while; return its status."""
    until = time.monotonic() + grace_s
    while not (state := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < until:
        time.sleep(0.01)
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        pass
    return state[1] if state[0] else os.waitpid(child, 0)[1]


def _child(
    group: Sequence[Row], writer: int, log: Path, compute: Compute, healthy: Callable[[], bool]
) -> NoReturn:
    """Compute rows, with all that is printed in the log, and leave without any handler of the parent."""
    from ds_ring_launcher.run.parent import end_with_parent

    def tell(**message: Any) -> None:
        os.write(writer, json.dumps(message, default=str).encode() + b"\n")

    os.setsid()
    end_with_parent()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.environ.update(group[0].environment)
    for row in group:
        print(f"--- {row.part}: {row.name}", flush=True)
        tell(begin=row.name)
        fault = ""
        try:
            for result in compute(row):
                tell(result=result)
        except Exception as error:
            traceback.print_exc()
            fault = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        tell(end=fault)
        if fault and not healthy():
            os._exit(BROKEN)
    os._exit(0)
