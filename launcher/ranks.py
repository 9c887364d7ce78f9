"""Gloo ranks of this machine for the length of one call: started, waited for with a deadline, ended.

Owns the processes. They meet in a file, so there is no port to choose; each answers through a file as well.
"""

from __future__ import annotations

import ctypes
import datetime
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

POLL_S = 0.2
PR_SET_PDEATHSIG = 1  # of Linux: the signal that a process gets when its parent ends
# Seconds of silence after which a rank counts as lost: many ranks may share few cores here.
HEARTBEAT_S = 60.0


def run_ranks(
    task: Callable[..., Any],
    size: int,
    arguments: tuple[Any, ...],
    *,
    timeout_s: float,
    threads: int = 1,
    waiting: Callable[[], None] | None = None,
) -> list[Any]:
    """`task(mesh, *arguments)` on every rank of a ring; what each returned, by ring rank.

    Args:
        task: at the top level of a module; it, its arguments and its results are pickled.
        size: ranks, all of one ring.
        arguments: the same for all.
        timeout_s: until all have answered; what is alive then is killed.
        threads: of each rank.
        waiting: called a few times a second meanwhile.

    Raises:
        RingError: a rank failed (with what it raised), or did not answer in time.
    """
    from torch.multiprocessing.spawn import spawn

    from ds_ring.errors import RingError

    with tempfile.TemporaryDirectory(prefix="ds-ring-ranks-") as folder:
        deadline = time.monotonic() + timeout_s
        given = (size, folder, task, arguments, threads, timeout_s, os.getpid())
        context = spawn(_rank, given, nprocs=size, join=False)
        try:
            while not context.join(timeout=POLL_S):
                if waiting is not None:
                    waiting()
                if time.monotonic() > deadline:
                    raise RingError(
                        f"expected {size} ranks to answer within {timeout_s:g} s, they did not and were"
                        " ended; allow more time, or take fewer tokens or ranks"
                    )
        except RingError:
            raise
        except Exception as error:  # torch's, which name the first rank that failed
            raise RingError(
                f"expected {size} ranks to finish, got: {_first_failure(Path(folder), error)}"
            ) from error
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return [pickle.loads(_answer(folder, rank).read_bytes()) for rank in range(size)]


def _end_with(parent: int) -> None:
    """However the command ends (kill -9, too): torch asks for SIGINT then, which background jobs ignore."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was faster
        os.kill(os.getpid(), signal.SIGKILL)


def _answer(folder: str, rank: int) -> Path:
    return Path(folder, f"answer.{rank}")


def _first_failure(folder: Path, error: Exception) -> str:
    """What the rank that failed first has written, or what torch says of its end."""
    failures = sorted(folder.glob("failure.*"), key=lambda path: path.stat().st_mtime_ns)
    return failures[0].read_text() if failures else str(error).strip().splitlines()[-1]


def _rank(
    rank: int,
    size: int,
    folder: str,
    task: Callable[..., Any],
    arguments: tuple[Any, ...],
    threads: int,
    timeout_s: float,
    parent: int,
) -> None:
    """The life of one rank."""
    _end_with(parent)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # or gloo asks the name service for this host
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's library greets on stderr
    import torch
    import torch.distributed as dist

    from ds_ring import RingMesh

    torch.set_num_threads(threads)
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=size, timeout=timeout)
        mesh = RingMesh.from_world(size, heartbeat_timeout_s=HEARTBEAT_S)
        answer = pickle.dumps(task(mesh, *arguments))
        _answer(folder, rank).write_bytes(answer)
        dist.barrier()  # a rank that leaves early would look lost to the others
        mesh.close()
        dist.destroy_process_group()
    except Exception as error:
        Path(folder, f"failure.{rank}").write_text(f"rank {rank}: {type(error).__name__}: {error}")
        raise
