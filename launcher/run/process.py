"""Run an invocation: stream its output, forward signals and exit status, leave no process behind.

Knows nothing of engines. The engine's own care for its children is not enough: DeepSpeed's local runner dies
of SIGTERM without passing it on, and calls it success when its helper is killed by a signal. What outlives
the launcher itself is ended by guardian.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from .guardian import (
    FAULT_GRACE_SECONDS,
    GRACE_SECONDS,
    MARK,
    POLL_SECONDS,
    Guardian,
    command_line,
    end_all,
    marked,
    parent_of,
    send,
    wait_until_gone,
)
from .job import RANK_MODULE, Invocation

_SETTLE_SECONDS = 3.0  # helpers of a finished run (compile workers, resource trackers) end by themselves
_FAILURE = 1

_Handler = Callable[[int, FrameType | None], object]


@dataclass
class Grace:
    """Hold how long ranks have to end by themselves after a signal; may be changed while a run ends."""

    seconds: float = GRACE_SECONDS


def run(
    invocation: Invocation,
    caller_environment: Mapping[str, str],
    script: str,
    signals: list[int],
    grace: Grace,
    stdin: int | None = None,
) -> int:
    """Run to the end and return the exit status; 128 + n where signal n ended it.

    Args:
        invocation: what to run.
        caller_environment: what it adds its variables to.
        script: that the ranks run, by which they are known.
        signals: those that this process has got (`signals_noted`); a new one ends the run in order.
        grace: for the ranks, after a signal.
        stdin: of the engine.
    """
    mark = uuid.uuid4().hex
    environment = {**caller_environment, **invocation.environment, MARK: mark}
    for path, text in invocation.files.items():
        path.write_text(text)
    guardian = Guardian(mark)
    # A session of its own, so that the terminal's Ctrl-C comes through us alone, once.
    engine = subprocess.Popen(invocation.argv, env=environment, stdin=stdin, start_new_session=True)
    try:
        while engine.poll() is None and not signals:
            guardian.keep()
            time.sleep(POLL_SECONDS)
        if not signals:
            return _status(engine.returncode, mark, script, signals)
        say(f"got {signal.Signals(signals[0]).name}; ending all processes of this run")
        _let_end(engine, invocation.end_signal, mark, signals, grace)
        return 128 + signals[0]
    finally:
        before = len(signals)
        # An engine that has ended by itself has ended its ranks, or tried to.
        seconds = grace.seconds if signals else min(grace.seconds, FAULT_GRACE_SECONDS)
        end_all(mark, seconds, hurry=lambda: len(signals) != before)
        engine.wait()
        guardian.done()


def _status(returncode: int, mark: str, script: str, signals: list[int]) -> int:
    """Return the engine's status, unless it says 0 while ranks of the run are still at work."""
    if returncode != 0:
        return returncode if returncode > 0 else 128 - returncode
    before = len(signals)
    wait_until_gone(mark, _SETTLE_SECONDS, hurry=lambda: len(signals) != before)
    ranks = [process.pid for process in marked(mark) if script in command_line(process)]
    if ranks:
        say(f"error: the engine ended with status 0 but left ranks running (pids {ranks}); ending them")
        return _FAILURE
    return 0


def _let_end(
    engine: subprocess.Popen[bytes], end_signal: int | None, mark: str, signals: list[int], grace: Grace
) -> None:
    """Let the ranks alone hear that they are to end, and wait: their helpers must live while they save."""
    before, deadline = len(signals), time.monotonic() + grace.seconds
    if end_signal is not None:
        try:
            os.kill(engine.pid, end_signal)  # a child that is not waited for yet: the pid is still its own
        except ProcessLookupError:
            return
    else:
        ranks = {one.pid: one for one in marked(mark) if RANK_MODULE in command_line(one)[2:4]}
        if not ranks:
            return  # without a run_folder: a rank cannot be told from what it has started
        for rank in ranks.values():
            if parent_of(rank) not in ranks:  # no forked worker of a rank
                send(rank, signal.SIGTERM)
    while engine.poll() is None and time.monotonic() < deadline and len(signals) == before:
        time.sleep(POLL_SECONDS)


@contextmanager
def signals_noted() -> Iterator[list[int]]:
    """Record the signals that end a run instead of dying of them; an ignored one (nohup) stays ignored.

    SIGUSR1 is what Slurm sends ahead of time (`--signal=USR1@120`).
    """
    noted: list[int] = []
    old: dict[signal.Signals, _Handler | int | None] = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        if signal.getsignal(number) is not signal.SIG_IGN:
            old[number] = signal.signal(number, lambda got, _frame: noted.append(got))
    try:
        yield noted
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def say(text: str) -> None:
    """Print a line to stderr, if that is still there."""
    try:
        print(f"ds-ring: {text}", file=sys.stderr, flush=True)
    except OSError:
        pass


def few(items: Sequence[object]) -> str:
    """Name the first eight of many, for a line that a person reads."""
    more = len(items) - 8
    return ", ".join(map(str, items[:8])) + (f" and {more} more" if more > 0 else "")
