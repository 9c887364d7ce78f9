"""Forks real processes that have torch loaded already: each ends as a script ends, with all that belongs to it.

Owns the parent of the ranks. The ranks of `harness.py` are children of multiprocessing, which end without
Python's shutdown; what a process does at its end (goodbyes, exit codes, stuck threads) needs these.

    python -m tests.dist.zygote tests.dist.faults          # then one list of jobs per line on standard input:
    [{"world_size": 4, "deadline_s": 30, "folder": "/tmp/x", ...}]    -> {"exits": [[1, 1, -9, 1]]}

The module named on the command line has `rank_main(rank, job)`. A rank that is still there at the deadline is
killed and its exit is null: it hung. Output goes to rank<N>.log in the folder.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tests.dist.rank_server import RANK_ENVIRONMENT


def in_the_rank(rank: int, job: dict[str, Any]) -> None:
    """Become a rank: its output, environment, and to end with the parent."""
    log = os.open(Path(job["folder"], f"rank{rank}.log"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job["world_size"])})


def run(jobs: list[dict[str, Any]]) -> tuple[int, dict[str, Any]] | None:
    """Fork the ranks of all jobs at once and answer; in a rank, its number and its job."""
    pids: dict[tuple[int, int], int] = {}
    for number, job in enumerate(jobs):
        for rank in range(job["world_size"]):
            pid = os.fork()
            if not pid:
                in_the_rank(rank, job)
                return rank, job
            pids[number, rank] = pid
    exits: list[list[int | None]] = [[None] * job["world_size"] for job in jobs]
    left, began = set(pids), time.monotonic()
    while left and time.monotonic() < began + max(job["deadline_s"] for job in jobs):
        for number, rank in sorted(left):
            pid, status = os.waitpid(pids[number, rank], os.WNOHANG)
            if pid:
                exits[number][rank] = os.waitstatus_to_exitcode(status)
                left.discard((number, rank))
        if all(rank in jobs[number].get("stopped", ()) for number, rank in left):
            break  # they never end by themselves, or not soon
        time.sleep(0.01)
    for place in left:
        os.kill(pids[place], signal.SIGKILL)
        os.waitpid(pids[place], 0)
    print(json.dumps({"exits": exits}), flush=True)
    return None


def main() -> None:
    """Serve jobs until standard input ends; in a rank, run it and end as any script does."""
    os.environ.update(RANK_ENVIRONMENT)
    module = importlib.import_module(sys.argv[1])
    module.preload(sys.argv[2:])
    gc.collect()
    gc.freeze()
    print(json.dumps({"ready": True}), flush=True)
    while line := sys.stdin.readline():
        place = run(json.loads(line))
        if place is not None:
            module.rank_main(*place)
            return


if __name__ == "__main__":
    main()
