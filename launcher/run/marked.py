"""Find the processes of one run on this machine by a variable that they inherit, and end them.

Knows nothing of engines. Whatever an engine does with sessions, process groups and parents, a process of the
run keeps the variable, unless it is started with an empty environment.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import psutil

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
