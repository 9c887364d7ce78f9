"""The threads that wait for torch's works, at the end of a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# One interpreter imports torch; two processes forked from it end, one after the other.
SCRIPT = """
import os, sys, torch, torch.distributed as dist
from ds_ring.comm.waiting import _WaitTask, _waiters

for attempt in range(2):
    child = os.fork()
    if not child:
        store = f"file://{sys.argv[1]}{attempt}"
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        job = _WaitTask([dist.all_reduce(torch.zeros(4), async_op=True) for _ in range(5000)])
        wake = job.wake
        _waiters.start(job)
        del job  # the thread has the last reference: it deletes the works while the process ends
        wake.wait()
        sys.exit()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status:
        sys.exit(f"attempt {attempt}: status {status}")
"""


AT_EXIT = """
import atexit
atexit.register(lambda: print([thread.is_alive() for thread in waiting._waiters.threads]))  # runs last
from ds_ring.comm import waiting

task = waiting.Task(lambda: None)
waiting._waiters.start(task)
task.result()
"""


def test_no_thread_outlives_the_functions_at_exit() -> None:
    run = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=100)
    assert run.stdout == "[False]\n", run.stderr


@pytest.mark.night
def test_a_process_ends_in_order_while_a_thread_deletes_works(tmp_path: Path) -> None:
    """Without the end of those threads: "terminate called without an active exception", status -6."""
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "store")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stderr
