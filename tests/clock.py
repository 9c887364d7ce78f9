"""Time of tests: what the code took and waited for, not the load of the machine, and waits with a deadline.

Owns no deadline. Beside other programs a thread that could run stands in the kernel's queue for a processor;
Linux counts that time, and here it is left out.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from pathlib import Path

_SCHEDULER = Path("/proc/thread-self/schedstat")  # nanoseconds on a processor, in the queue; times it ran


def unqueued_seconds() -> float:
    """Return seconds of a steady clock, less those that this thread stood in the queue for a processor."""
    try:
        queued_ns = int(_SCHEDULER.read_text().split()[1])
    except (OSError, IndexError, ValueError):  # a kernel without that count: all time is the code's
        queued_ns = 0
    return time.perf_counter() - queued_ns / 1e9


def wait_until(condition: Callable[[], object], seconds: float = 60.0, pause_s: float = 0.02) -> None:
    """Wait for what becomes true; an AssertionError names it where it does not."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {inspect.getsource(condition).strip()}"
        time.sleep(pause_s)
