"""The threads that wait for torch's works, at the end of a process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys, torch, torch.distributed as dist
from ds_ring.runtime.waiting import _WaitTask, _waiters

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
job = _WaitTask([dist.all_reduce(torch.zeros(4), async_op=True) for _ in range(5000)])
wake = job.wake
_waiters.start(job)
del job  # the thread has the last reference: it deletes the works while the process ends
wake.wait()
"""


@pytest.mark.parametrize("attempt", range(3))
def test_a_process_ends_in_order_while_a_thread_deletes_works(tmp_path, attempt):
    """Without the end of those threads: "terminate called without an active exception", status -6."""
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "store")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stderr
