"""Runs an invocation: streams its output, forwards signals and exit status, leaves no process behind.

Knows nothing of engines. The engine's own care for its children is not enough: DeepSpeed's local runner dies
of SIGTERM without passing it on, and calls it success when its helper is killed by a signal.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

import psutil

from .job import Invocation

# Every process of a run inherits this variable, however it is reparented and whatever session it is put in.
_MARK = "DS_RING_LAUNCH_ID"
_GRACE_SECONDS = 15.0  # between SIGTERM and SIGKILL
_SETTLE_SECONDS = 3.0  # helpers of a finished run (compile workers, resource trackers) end by themselves
_POLL_SECONDS = 0.1
_FAILURE = 1

_Handler = Callable[[int, FrameType | None], object]


def run(invocation: Invocation, caller_environment: Mapping[str, str], script: str) -> int:
    """Run to the end and return the exit status; 128 + n where signal n ended it."""
    mark = uuid.uuid4().hex
    environment = {**caller_environment, **invocation.environment, _MARK: mark}
    for path, text in invocation.files.items():
        path.write_text(text)
    with _signals_noted() as signals:
        # A session of its own, so that the terminal's Ctrl-C comes through us alone, once.
        engine = subprocess.Popen(invocation.argv, env=environment, start_new_session=True)
        try:
            while engine.poll() is None and not signals:
                time.sleep(_POLL_SECONDS)
            if not signals:
                return _status(engine.returncode, mark, script, signals)
            _say(f"got {signal.Signals(signals[0]).name}; ending all processes of this run")
            return 128 + signals[0]
        finally:
            _end(mark, signals)
            engine.wait()


def _status(returncode: int, mark: str, script: str, signals: list[int]) -> int:
    """The engine's status, unless it says 0 while ranks of the run are still at work."""
    if returncode != 0:
        return returncode if returncode > 0 else 128 - returncode
    _wait_until_gone(mark, _SETTLE_SECONDS, signals)
    ranks = [process.pid for process in _marked(mark) if script in _command_line(process)]
    if ranks:
        _say(f"error: the engine ended with status 0 but left ranks running (pids {ranks}); ending them")
        return _FAILURE
    return 0


def _end(mark: str, signals: list[int]) -> None:
    """SIGTERM to every process of the run; SIGKILL to what is left after the grace or at a second signal."""
    for process in _marked(mark):
        _send(process, signal.SIGTERM)
    before = len(signals)
    _wait_until_gone(mark, _GRACE_SECONDS, signals, before)
    for _ in range(3):  # again, for what was started while we looked
        for process in _marked(mark):
            _send(process, signal.SIGKILL)
            _reap(process)


def _wait_until_gone(mark: str, seconds: float, signals: list[int], noted: int = 0) -> None:
    deadline = time.monotonic() + seconds
    while _marked(mark) and time.monotonic() < deadline and len(signals) == noted:
        time.sleep(_POLL_SECONDS)


def _marked(mark: str) -> list[psutil.Process]:
    """The live processes of the run. Those of other users cannot be read, and are none of ours."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def _send(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.Error:
        pass


def _reap(process: psutil.Process) -> None:
    try:
        process.wait(timeout=1)
    except psutil.Error:
        pass


@contextmanager
def _signals_noted() -> Iterator[list[int]]:
    """Note SIGINT, SIGTERM and SIGHUP instead of dying of them; an ignored one (nohup) stays ignored."""
    noted: list[int] = []
    old: dict[signal.Signals, _Handler | int | None] = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            old[number] = signal.signal(number, lambda got, _frame: noted.append(got))
    try:
        yield noted
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _say(text: str) -> None:
    print(f"ds-ring: {text}", file=sys.stderr, flush=True)
