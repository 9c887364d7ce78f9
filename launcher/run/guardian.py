"""End a run whose launcher died without ending it: by SIGKILL, out of memory, in a crash.

A small process beside the launcher, in a session of its own. Its standard input is a pipe that the launcher
alone holds open: the first line names the run, "done" says that the run has ended, and the end of the file
without that word says that the launcher is gone, however it died.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import psutil

# The processes of a run are found by an environment variable that they inherit. An engine may start sessions
# and process groups of its own; only a process that starts with an empty environment loses the variable.

MARK = "DS_RING_LAUNCH_ID"
GRACE_SECONDS = 15.0  # between SIGTERM and SIGKILL
ORPHAN_GRACE_SECONDS = 3.0  # of a run whose launcher was killed
FAULT_GRACE_SECONDS = 5.0  # where nobody asked for the end: survivors say who failed, or end by themselves
POLL_SECONDS = 0.1


def marked(mark: str, variable: str = MARK) -> list[psutil.Process]:
    """Return the live processes of the run; those of other users cannot be read, and are none of ours."""
    found = []
    # By variable and not by parent: launchers and sessions cut processes off from their parents.
    for process in psutil.process_iter():
        try:
            if process.environ().get(variable) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def end_all(mark: str, grace_s: float, hurry: Callable[[], bool] = lambda: False) -> None:
    """Send SIGTERM to every process of the run; SIGKILL to what is left after the grace, or in a hurry.

    A process that is stopped cannot end by itself, and is killed at once.
    """
    for process in marked(mark):
        send(process, signal.SIGKILL if _is_stopped(process) else signal.SIGTERM)
    wait_until_gone(mark, grace_s, hurry)
    for _ in range(3):  # again, for what was started while we looked
        for process in marked(mark):
            send(process, signal.SIGKILL)
            _reap(process)


def _is_stopped(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def wait_until_gone(mark: str, seconds: float, hurry: Callable[[], bool] = lambda: False) -> None:
    """Wait until no process of the run is left, or the time is over, or `hurry` says true."""
    deadline = time.monotonic() + seconds
    while marked(mark) and time.monotonic() < deadline and not hurry():
        time.sleep(POLL_SECONDS)


def command_line(process: psutil.Process) -> list[str]:
    """Return the arguments of a process; none where it is gone."""
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def parent_of(process: psutil.Process) -> int | None:
    """Return the process id of a process's parent; None where it is gone."""
    try:
        return int(process.ppid())
    except psutil.Error:
        return None


def send(process: psutil.Process, number: signal.Signals) -> None:
    """Send a signal to a process that may be gone."""
    try:
        process.send_signal(number)
    except psutil.Error:
        pass


def _reap(process: psutil.Process) -> None:
    try:
        process.wait(timeout=1)
    except psutil.Error:
        pass


_DONE = "done"


class Guardian:
    """Hold the launcher's end of the pipe: made before the run is started, told `done` after its end."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._start()

    def _start(self) -> None:
        # Without the mark it would end itself; it must import the same package wherever that is.
        environment = {name: value for name, value in os.environ.items() if name != MARK}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ds_ring_launcher.run.guardian"],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            env=environment, start_new_session=True, text=True,
        )  # fmt: skip
        self._tell(self._mark)

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
    """Wait for the end of standard input; end the run unless the launcher said that it is done."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):  # meant for the launcher
        signal.signal(number, signal.SIG_IGN)
    mark, *said = sys.stdin.read().split() or [""]
    if not mark or _DONE in said or not marked(mark):
        return
    try:
        print("ds-ring: the launcher was killed; ending this run's processes", file=sys.stderr, flush=True)
    except OSError:  # the terminal went with it
        pass
    end_all(mark, ORPHAN_GRACE_SECONDS)


if __name__ == "__main__":
    main()
