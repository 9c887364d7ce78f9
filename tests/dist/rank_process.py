"""The child side of the harness: one gloo rank that serves calls until its pipe closes.

Owns what a rank process is: its environment, process group, log, stack dump and its answers. Starts and ends
no process: that is harness.py.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import io
import os
import signal
import sys
import time
import traceback
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from tests.dist.rank_server import RANK_ENVIRONMENT

DUMP_SIGNAL = signal.SIGUSR1
_PR_SET_PDEATHSIG = 1
_ENGINES = ("DeepSpeedEngine", "DeepSpeedZeroOptimizer")

Status = Literal["returned", "raised", "exited", "hung"]


class RankOutcome(NamedTuple):
    """What became of one rank in one call."""

    rank: int
    status: Status
    seconds: float
    value: Any = None
    error_type: str = ""  # the class name of what was raised
    error_types: tuple[str, ...] = ()  # that name and the names of all its base classes
    message: str = ""
    report: str = ""  # the traceback of what raised; stack and output of what hung or exited


def log_path(folder: str, rank: int) -> Path:
    return Path(folder, f"rank{rank}.log")


def stack_path(folder: str, rank: int) -> Path:
    return Path(folder, f"rank{rank}.stack")


def pack(value: object) -> bytes:
    """By torch.save: no shared memory, nothing that dies with the sender."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def serve(rank: int, world_size: int, folder: str, pipe: Connection) -> None:
    """Join the process group, say so, and answer calls until the parent sends nothing or goes away."""
    _die_with_the_parent()
    _redirect_output(folder, rank)
    os.environ.update(RANK_ENVIRONMENT | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    os.environ["WORLD_SIZE"] = str(world_size)
    torch.set_num_threads(1)
    # No timeout of its own below torch's 30 minutes: the deadline is the parent's, so that what a test sees
    # in time is the doing of the code under test.
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world_size)
    pipe.send_bytes(b"ready")
    while request := _next_request(pipe):
        _forget_the_last_call()
        pipe.send_bytes(_answer(rank, world_size, request))
    dist.destroy_process_group()


def _next_request(pipe: Connection) -> bytes:
    try:
        return pipe.recv_bytes()
    except EOFError:
        return b""


def _answer(rank: int, world_size: int, request: bytes) -> bytes:
    started = time.perf_counter()
    try:
        fn, args, kwargs = unpack(request)
        value = fn(rank, world_size, *args, **kwargs)
        return pack(RankOutcome(rank, "returned", time.perf_counter() - started, value))
    except SystemExit:  # it ends the process, as in a training script
        raise
    except BaseException as error:  # pytest.fail and pytest.skip are no Exceptions
        seconds = time.perf_counter() - started
        names = tuple(cls.__name__ for cls in type(error).__mro__ if cls is not object)
        report = traceback.format_exc()
        return pack(RankOutcome(rank, "raised", seconds, None, names[0], names, str(error), report))


def _forget_the_last_call() -> None:
    """Groups and meshes of an earlier call hold threads and sockets. Only now are all ranks through with them.

    DeepSpeed's hooks of gradients and its engine hold each other, by autograd's nodes, which Python does not collect.
    """
    for item in gc.get_objects():
        kind = type(item)  # isinstance would ask a weak proxy, which raises if its object is gone
        if issubclass(kind, torch.nn.Parameter) or kind.__name__.startswith(_ENGINES):
            vars(item).clear()
    item = None
    gc.collect()
    world = dist.group.WORLD
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not world:
            dist.destroy_process_group(group)
    torch.manual_seed(0)


def _die_with_the_parent() -> None:
    """A rank that hangs must not outlive the tests, however they end (kill -9, too).

    The server ends when the last copy of a pipe's write end is closed. The test process has one, and every
    rank inherits another for servers of its own: without that, the kernel ends the rank after the server.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    server = forkserver._forkserver
    alive = getattr(server, "_forkserver_alive_fd", None)
    if alive is not None:
        os.close(alive)
        setattr(server, "_forkserver_alive_fd", None)  # noqa: B010 (unknown to the stubs)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is the parent's to handle


def _redirect_output(folder: str, rank: int) -> None:
    with open(log_path(folder, rank), "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    faulthandler.enable(file=2)
    stack = os.open(stack_path(folder, rank), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    faulthandler.register(DUMP_SIGNAL, file=stack, all_threads=True)
