"""Run an invocation: stream its output, forward signals and exit status, end all its processes.

Knows nothing of engines. The engine's own care for its children is not enough: DeepSpeed's local runner dies
of SIGTERM without passing it on, and calls it success when its helper is killed by a signal.

A run whose launcher dies without ending it (by SIGKILL, out of memory, in a crash) is ended by a guardian:
this module in a small second process, in a session of its own. Its standard input is a pipe that
the launcher alone holds open: the first line is {"mark", "folder"} of the run, "done" means that the run has
ended, and the end of the file without that word means that the launcher is gone.
"""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import psutil

from ds_ring.errors import RingConfigError

from .job import Invocation, module_command
from .run_folder import FOLDER_VARIABLE, has_ring

# The processes of a run are found by an environment variable that they inherit. An engine may start sessions
# and process groups of its own; only a process that starts with an empty environment loses the variable.

MARK = "DS_RING_LAUNCH_ID"
GRACE_SECONDS = 15.0  # between SIGTERM and SIGKILL
ORPHAN_GRACE_SECONDS = 3.0  # of a run whose launcher was killed
FAULT_GRACE_SECONDS = 5.0  # without a request to end: survivors report the failed rank, or end by themselves
POLL_SECONDS = 0.1


def marked(
    mark: str, wanted: Callable[[list[str]], bool] = lambda words: True, variable: str = MARK
) -> list[psutil.Process]:
    """Return the live processes of the run whose command lines are wanted.

    Those of other users cannot be read, and are none of ours.
    """
    processes = []
    # By variable and not by parent: launchers and sessions cut processes off from their parents.
    for process in psutil.process_iter():
        try:
            is_ours = process.environ().get(variable) == mark and process.status() != psutil.STATUS_ZOMBIE
            if is_ours and wanted(process.cmdline()):
                processes.append(process)
        except (psutil.Error, OSError):
            continue
    return processes


def end_all(mark: str, grace_s: float, hurry: Callable[[], bool] = lambda: False) -> None:
    """Send SIGTERM to every process of the run; SIGKILL to the others after the grace, or in a hurry.

    A process that is stopped cannot end by itself, and is killed at once.
    """
    for process in marked(mark):
        with suppress(psutil.Error):  # it is gone
            stopped = process.status() == psutil.STATUS_STOPPED
            process.send_signal(signal.SIGKILL if stopped else signal.SIGTERM)
    wait_until_gone(mark, grace_s, hurry)
    for _ in range(3):  # again, for what was started while we looked
        for process in marked(mark):
            with suppress(psutil.Error):
                process.kill()
                process.wait(timeout=1)


def wait_until_gone(mark: str, seconds: float, hurry: Callable[[], bool] = lambda: False) -> None:
    """Wait until no process of the run is left, or the time is over, or `hurry` returns true."""
    deadline = time.monotonic() + seconds
    while marked(mark) and time.monotonic() < deadline and not hurry():
        time.sleep(POLL_SECONDS)


_DONE = "done"


class Guardian:
    """Hold the launcher's end of the pipe: made before the run, closed with `done` after its end."""

    def __init__(self, mark: str, folder: Path | None) -> None:
        self._run = json.dumps({"mark": mark, "folder": None if folder is None else str(folder)})
        self._start()

    def _start(self) -> None:
        # Without the mark it would end itself; it must import the same package wherever that is.
        environment = {name: value for name, value in os.environ.items() if name != MARK}
        self._process = subprocess.Popen(
            module_command("ds_ring_launcher.run.process"),
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            env=environment, start_new_session=True, text=True,
        )  # fmt: skip
        self._tell(self._run)

    def keep(self) -> None:
        """Start it again if somebody has ended it."""
        if self._process.poll() is not None:
            self._start()

    def done(self) -> None:
        """Send word that nothing of the run is left, and wait for its end."""
        self._tell(_DONE)
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        self._process.wait()

    def _tell(self, word: str) -> None:
        assert self._process.stdin is not None
        try:
            print(word, file=self._process.stdin, flush=True)
        except BrokenPipeError:  # it was ended: `keep` starts it again
            pass


def main() -> None:
    """Be the guardian: at the end of standard input end the run, unless the launcher has reported `done`."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):  # meant for the launcher
        signal.signal(number, signal.SIG_IGN)
    first, *words = sys.stdin.read().splitlines() or [""]
    if not first.startswith("{") or _DONE in words:
        return
    run = json.loads(first)
    if marked(run["mark"]):
        say("the launcher was killed; ending this run's processes")
        end_all(run["mark"], ORPHAN_GRACE_SECONDS)
    if run["folder"] is not None:
        shutil.rmtree(run["folder"], ignore_errors=True)


@contextmanager
def private_folder() -> Iterator[Path]:
    """Make a folder for the files of one attempt; removed at the end, by the guardian if need be.

    One for each attempt: a long job may outlive a cleaning of /tmp.

    Raises:
        RingConfigError: there is no place for it.
    """
    try:
        temporary = tempfile.TemporaryDirectory(prefix="ds-ring-", ignore_cleanup_errors=True)
    except OSError as error:
        raise RingConfigError.wrong(
            "TMPDIR", "a temporary folder", f"none ({error.strerror})", "set it"
        ) from None
    with temporary as name:
        yield Path(name)


_SETTLE_SECONDS = 3.0  # helpers of a finished run (compile workers, resource trackers) end by themselves
_FAILURE = 1

_Handler = Callable[[int, FrameType | None], object]


NO_RING = (
    "no rank has made a ring: ring_attention of the DeepSpeed JSON was not at work. Call ds_ring.initialize,"
    " or ds_ring.enable() before the Trainer is made"
)


def marks_folder(folder: Path) -> Path:
    """Return the folder of `with_rank_marks`."""
    return folder / "ranks"


def with_rank_marks(invocation: Invocation, folder: Path) -> Invocation:
    """Let ranks mark in `folder` that they have made a ring, where no attempt has a folder for it."""
    if FOLDER_VARIABLE in invocation.environment:
        return invocation
    marks = marks_folder(folder)
    marks.mkdir()
    return replace(invocation, environment={**invocation.environment, FOLDER_VARIABLE: str(marks)})


def say_without_ring(status: int, folder: Path) -> None:
    """Say it where ranks that have ended well had `with_rank_marks`, and none has made a ring."""
    marks = marks_folder(folder)
    if status == 0 and marks.is_dir() and not has_ring(marks):
        say(NO_RING)


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
    folder: Path | None = None,
    stdin: int | None = None,
) -> int:
    """Run to the end and return the exit status; 128 + n where signal n ended it.

    Args:
        invocation: what to run.
        caller_environment: the variables of the caller.
        script: that the ranks run, by which they are known.
        signals: those that this process has got (`signals_noted`); a new one ends the run in order.
        grace: for the ranks, after a signal.
        folder: that the guardian removes if this process is killed.
        stdin: of the engine.
    """
    mark = uuid.uuid4().hex
    around = without_options(caller_environment, invocation.unset)
    environment = {**around, **invocation.environment, MARK: mark}
    for path, text in invocation.files.items():
        path.write_text(text, encoding="utf-8")
    guardian = Guardian(mark, folder)
    # A session of its own, so that the terminal's Ctrl-C comes through us alone, once.
    engine = subprocess.Popen(invocation.argv, env=environment, stdin=stdin, start_new_session=True)
    try:
        while engine.poll() is None and not signals:
            guardian.keep()
            time.sleep(POLL_SECONDS)
        if not signals:
            return _status(engine.returncode, mark, script, signals, grace)
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


def without_options(environment: Mapping[str, str], patterns: Sequence[str]) -> dict[str, str]:
    """Return an environment without the variables that an engine would read as options, and say which."""
    left_out = [
        name for name in environment if any(fnmatch.fnmatchcase(name, wildcard) for wildcard in patterns)
    ]
    if left_out:
        say(
            f"left out of the engine's environment: {few(sorted(left_out))}; they belong in engine_args"
            " of the cluster YAML"
        )
    return {name: value for name, value in environment.items() if name not in left_out}


def _status(returncode: int, mark: str, script: str, signals: list[int], grace: Grace) -> int:
    """Return the engine's status, unless it is 0 while ranks of the run are still at work."""
    if returncode != 0:
        return returncode if returncode > 0 else 128 - returncode
    before = len(signals)
    wait_until_gone(mark, _SETTLE_SECONDS, hurry=lambda: len(signals) != before)
    ranks = [process.pid for process in marked(mark, lambda words: script in words)]
    if ranks:
        say(f"error: the engine ended with status 0 but left ranks running (pids {ranks}); ending them")
        return _FAILURE
    left = [f"{_read_name(process)} (pid {process.pid})" for process in marked(mark)]
    if left:
        say(
            f"the script has ended and left {few(left)} at work, which end in {grace.seconds:g} s"
            " (grace_seconds); what must be finished, an upload say, the script has to wait for"
        )
        wait_until_gone(mark, grace.seconds, hurry=lambda: len(signals) != before)
    return 0


def _read_name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:  # it has just ended
        return "a process"


def _ranks(mark: str) -> list[psutil.Process]:
    """Return the processes that engines started as ranks of the run, and not what these have started."""
    started = {}
    for process in marked(mark):
        with suppress(psutil.Error):
            if "RANK" in process.environ():
                started[process.pid] = process
    ranks = []
    for process in started.values():
        with suppress(psutil.Error):
            if process.ppid() not in started:
                ranks.append(process)
    return ranks


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
        ranks = _ranks(mark)
        if not ranks:
            return
        for rank in ranks:
            with suppress(psutil.Error):  # it is gone
                rank.terminate()
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


def counted(count: int, singular: str, many: str) -> str:
    """Return a number with its noun."""
    return f"{count:,} {singular if count == 1 else many}"


def few(items: Sequence[object]) -> str:
    """Name the first eight of many, for a line that a person reads."""
    rest = len(items) - 8
    return ", ".join(map(str, items[:8])) + (f" and {rest} more" if rest > 0 else "")


if __name__ == "__main__":
    main()
