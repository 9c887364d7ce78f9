"""Run a function on ranks of this machine, with a hard deadline, and end all processes.

For commands that need a process group for a while. Ranks meet in a file, so that no port is taken. A training
run is started by an engine instead (engines/, process.py). Imports no torch: that takes a rank seconds, in
which its parent may be killed.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from ds_ring.errors import RingError

from .parent import end_with_parent

_GRACE_S = 5.0  # of the others, once one rank has failed: they say more, or end by themselves
_LOOK_S = 0.2
_WRONG_INPUT = 2


class RanksError(RingError, RuntimeError):
    """Report that a rank failed, or the deadline passed; the message has its number and the reason."""


def run_ranks(
    work: Callable[..., object],
    processes: int,
    arguments: tuple[Any, ...],
    *,
    threads: int,
    deadline_s: float,
    waiting: Callable[[], object] = lambda: None,
    imported: bool = False,
) -> list[Any]:
    """Run `work(*arguments)` on every rank of a new process group (gloo; nccl if the first argument is for
    cuda).

    Args:
        work: a function at the head of a module.
        processes: ranks.
        arguments: of `work`; the first may have an attribute `device`.
        threads: of torch, on each rank.
        deadline_s: seconds after which all ranks are ended.
        waiting: called a few times a second while ranks run.
        imported: this process has imported what `work` needs, and used none of it: ranks are forked from it.

    Returns:
        What each rank returned; it, the function and its arguments are pickled.

    Raises:
        RanksError: a rank raised, ended, or did not end in time.
    """
    context: Any = multiprocessing.get_context("fork" if imported else "spawn")
    with tempfile.TemporaryDirectory(prefix="ds-ring-") as folder, _ended_by_signal():
        ranks: list[BaseProcess] = []
        try:
            for rank in range(processes):
                # Pickled here: a rank watches its parent before it unpickles, which imports torch.
                job = pickle.dumps((_rank, (rank, processes, folder, threads, deadline_s, work, arguments)))
                ranks.append(context.Process(target=_start, args=(os.getpid(), job), name=f"rank {rank}"))
                with _not_heard_by_children():
                    ranks[-1].start()
            _watch(ranks, folder, deadline_s, waiting)
        finally:
            for process in ranks:
                # No grace: all have ended by now, or the run has failed.
                process.kill()
                process.join()
        return [pickle.loads(_answer(folder, rank).read_bytes()) for rank in range(processes)]


def _start(parent: int, job: bytes) -> None:
    """Call the pickled (function, arguments) in a process that the death of `parent`, a process id, ends."""
    end_with_parent()
    if os.getppid() != parent:  # it was faster
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent as well, which ends its ranks
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    function, arguments = pickle.loads(job)
    function(*arguments)


@contextmanager
def _not_heard_by_children() -> Iterator[None]:
    """Block SIGINT for children: Ctrl-C while a rank imports torch is no traceback of its own."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:  # delayed signals arrive now
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _answer(folder: str, rank: int) -> Path:
    return Path(folder, f"answer{rank}")


def _watch(ranks: list[BaseProcess], folder: str, deadline_s: float, waiting: Callable[[], object]) -> None:
    """Wait until all have ended well; raise the first rank's message."""

    def failures() -> list[int]:
        ended = [(number, process.exitcode) for number, process in enumerate(ranks) if process.exitcode]
        # After a peer's failure a rank may end with 1 though it returned; [Note: the end of a process].
        return [number for number, code in ended if code != 1 or not _answer(folder, number).is_file()]

    deadline = time.monotonic() + deadline_s
    failed: list[int] = []
    while not failed and (running := [process for process in ranks if process.is_alive()]):
        if time.monotonic() >= deadline:
            raise RanksError(
                f"expected all ranks to end within {deadline_s:g} s, got {len(running)} still at work"
            )
        wait([process.sentinel for process in running], min(_LOOK_S, max(0.0, deadline - time.monotonic())))
        waiting()
        failed = failures()
    failed = failed or failures()  # just now
    until = time.monotonic() + _GRACE_S
    for process in ranks:
        process.join(max(0.0, until - time.monotonic()))
    for number in failed:
        # The rank that failed first may have died without a word, and another one tell why.
        error_file = Path(folder, f"error{number}")
        if error_file.is_file():
            raise RanksError(f"rank {number}: {error_file.read_text()}")
    if failed:
        codes = ", ".join(f"rank {number} with {ranks[number].exitcode}" for number in failed)
        raise RanksError(f"expected all ranks to end with 0, got {codes}; what they printed says why")


def _rank(
    rank: int,
    size: int,
    folder: str,
    threads: int,
    deadline_s: float,
    work: Callable[..., object],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's library greets on stderr
    if os.path.isdir("/sys/class/net/lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # or gloo asks the name service for this host
    import torch
    import torch.distributed as dist

    from ds_ring.transports.devices import select_gpu

    # For DeepSpeed, which reads them though the group is there.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(threads)
    cuda = getattr(arguments[0], "device", "cpu") == "cuda" if arguments else False
    try:
        if cuda:
            torch.cuda.set_device(select_gpu(rank, torch.cuda.device_count()))
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            f"file://{folder}/store",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=deadline_s),
        )
        answer = pickle.dumps(work(*arguments))
        dist.barrier()
        _answer(folder, rank).write_bytes(answer)
    except RingError as error:
        Path(folder, f"error{rank}").write_text(str(error))
        sys.exit(_WRONG_INPUT)
    dist.destroy_process_group()


@contextmanager
def _ended_by_signal() -> Iterator[None]:
    """Make SIGTERM end the ranks, too: without this it would end their parent alone."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    try:
        old = signal.signal(signal.SIGTERM, leave)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)
