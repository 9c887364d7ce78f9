"""Runs a function on real gloo ranks, and never hangs: results, tracebacks or stacks come back.

Owns the processes: start, deadline, stack dump, end. What a rank does in its process is rank_process.py.

    def shard_sum(rank, world_size, scale):                  # at module level, so that a rank can import it
        x = torch.ones(3) * rank * scale
        torch.distributed.all_reduce(x)
        return x

    run_ranks(shard_sum, 4, 2.0)                             # [tensor, tensor, tensor, tensor]
    rank_pool(4).run(shard_sum, 2.0)                         # the same on ranks that stay alive (a fixture)
    rank_pool(4).collect(shard_sum, 2.0)[3].error_type       # "" or "RingShapeError": for tests of errors

Ranks are forked from one server process that has imported torch already: a rank costs milliseconds. The monitors
of their meshes are forked from another one (monitors.py). A pool is replaced after any call in which a rank did
not return, after a test that failed (conftest.py), and when its ranks have many threads. What a call leaves behind
in the process (caches, defaults, patched modules) stays for the next call on that pool; process groups are removed
and the seed is set to 0. A test is skipped where every rank says that its machine lacks something. The output of
ranks goes to a file, and into the report when something fails.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import pytest

from ds_ring.errors import RingError
from tests.clock import unqueued_seconds
from tests.dist.rank_process import (
    DUMP_SIGNAL,
    RankOutcome,
    log_path,
    pack,
    serve,
    stack_path,
    unpack,
)
from tests.dist.rank_server import start_server

_START_SECONDS = 60.0
DEADLINE_SECONDS = 120.0  # of a call that takes seconds, on a machine that others keep busy
_STACK_SECONDS = 1.0
_END_SECONDS = 5.0
# After one rank has failed the others mostly wait for it in a collective: they get this long to say more.
_GRACE_SECONDS = 3.0
_LOG_LINES = 40
# gloo's threads wake a hundred times a second. Those of groups that something still refers to never end.
_MAX_THREADS = 40
_SKIPPED = pytest.skip.Exception.__name__


class RanksFailed(AssertionError):
    """Some rank raised, exited or hung. `outcomes` has every rank, the message every failing one."""

    def __init__(self, what: str, outcomes: Sequence[RankOutcome]) -> None:
        self.outcomes = list(outcomes)
        failed = [outcome for outcome in outcomes if outcome.status != "returned"]
        parts = [f"--- rank {item.rank} {_summary(item)}\n{item.report.rstrip()}" for item in failed]
        super().__init__("\n".join([f"{what}: {len(failed)} of {len(outcomes)} ranks failed", *parts]))


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = DEADLINE_SECONDS, **kwargs: Any
) -> list[Any]:
    """`fn(rank, world_size, *args, **kwargs)` on fresh ranks: their results by rank, or RanksFailed."""
    with RankPool(world_size) as pool:
        return pool.run(fn, *args, timeout_s=timeout_s, **kwargs)


def run_ranks_collect(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = DEADLINE_SECONDS,
    grace_s: float | None = None,
    silent: Sequence[int] = (),
    **kwargs: Any,
) -> list[RankOutcome]:
    """The same on fresh ranks, but what became of each rank is the result, whatever it is."""
    with RankPool(world_size) as pool:
        return pool.collect(fn, *args, timeout_s=timeout_s, grace_s=grace_s, silent=silent, **kwargs)


def catch_refusal(call: Callable[..., object], *args: Any, **kwargs: Any) -> str:
    """Call, and return the type and the message of ds_ring's error; "" for none."""
    try:
        call(*args, **kwargs)
    except RingError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Failure(NamedTuple):
    """What a call raised; `error` is "" for nothing.

    Attributes:
        error, families: name of its type, and of all that it inherits from.
        text: of the error.
        seconds: until then, without time in the queue for a processor.
    """

    error: str
    families: tuple[str, ...]
    text: str
    seconds: float


def catch_failure(call: Callable[..., object], *args: Any, **kwargs: Any) -> Failure:
    """Call, and return what came of it, also of an error that is not ds_ring's."""
    started, error = unqueued_seconds(), None
    try:
        call(*args, **kwargs)
    except Exception as raised:
        error = raised
    seconds = unqueued_seconds() - started
    families = tuple(cls.__name__ for cls in type(error).__mro__)
    return Failure("" if error is None else families[0], families, str(error), seconds)


def catch_refusals(calls: Mapping[str, Callable[[], object]]) -> dict[str, str]:
    """Return what each call by name is refused with."""
    return {name: catch_refusal(call) for name, call in calls.items()}


def check_texts(texts_by_rank: Iterable[Mapping[str, str]], words: Mapping[str, str]) -> None:
    """Require of every rank the texts of these names, each with its words."""
    for texts in texts_by_rank:
        assert texts.keys() == words.keys()
        assert not {name: texts[name] for name in words if words[name] not in texts[name]}


def first_in_time(run: Callable[[], list[Any]], in_time: Callable[[list[Any]], bool]) -> list[Any]:
    """The results of the first run of three that was in time, or of the last.

    For times that hold what ds_ring waits for: other programs on the machine can only add to them.
    """
    for _ in range(3):
        result = run()
        if in_time(result):
            break
    return result


class RankPool:
    """`world_size` ranks of one process group, alive from call to call. Started on the first call."""

    def __init__(self, world_size: int) -> None:
        assert world_size >= 1, f"a pool needs a rank at least, got world_size {world_size}"
        self.world_size = world_size
        self._folder = ""
        self._processes: list[ForkServerProcess] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The process ids by rank; empty while the pool is not started."""
        return [process.pid for process in self._processes if process.pid is not None]

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout_s: float = DEADLINE_SECONDS, **kwargs: Any
    ) -> list[Any]:
        """The results by rank. RanksFailed soon after a rank fails, or at the deadline with every stack.

        Skips the test where every rank calls `pytest.skip`.
        """
        outcomes = self._call(fn, args, kwargs, timeout_s, grace_s=_GRACE_SECONDS)
        if all(outcome.error_type == _SKIPPED for outcome in outcomes):
            pytest.skip(outcomes[0].message)
        if any(outcome.status != "returned" for outcome in outcomes):
            raise RanksFailed(f"{fn.__qualname__} on {self.world_size} ranks, {timeout_s:g} s", outcomes)
        return [outcome.value for outcome in outcomes]

    def collect(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout_s: float = DEADLINE_SECONDS,
        grace_s: float | None = None,
        silent: Sequence[int] = (),
        **kwargs: Any,
    ) -> list[RankOutcome]:
        """What became of each rank. All get until the deadline, or `grace_s` after the first one failed.

        `silent`: ranks that stop for good; nobody waits for them once the others have answered.
        """
        grace_s = timeout_s if grace_s is None else grace_s
        return self._call(fn, args, kwargs, timeout_s, grace_s, silent)

    def close(self) -> None:
        """Let idle ranks end by themselves, kill what does not, wait for all, remove the folder."""
        self.resume()
        for pipe in self._pipes:
            _send(pipe, b"")
        deadline = time.monotonic() + _END_SECONDS
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def discard(self) -> None:
        """Kill the ranks at once, whatever they do: the next call starts new ones."""
        self._kill()

    def _call(
        self,
        fn: Callable[..., Any],
        args: Any,
        kwargs: Any,
        timeout_s: float,
        grace_s: float,
        silent: Sequence[int] = (),
    ) -> list[RankOutcome]:
        request = _request(fn, args, kwargs)
        if any(_threads(pid) > _MAX_THREADS for pid in self.pids):
            self.close()
        try:
            if not self._processes:
                self._start()
            started = time.monotonic()
            self.resume()
            for pipe in self._pipes:
                _send(pipe, request)
            outcomes = self._gather(started, started + timeout_s, grace_s, silent)
        except BaseException:  # ctrl-C, say: answers still under way must not meet the next call
            self._kill()
            raise
        if any(outcome.status != "returned" for outcome in outcomes):
            self._kill()
        else:  # gloo's threads wake a hundred times a second, 5 % of the suite
            self._signal(signal.SIGSTOP)
        return outcomes

    def resume(self) -> None:
        """Let the ranks run, which stop between calls: for what a thread of theirs has to finish."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for pid in self.pids:
            os.kill(pid, number)

    def _gather(
        self, started: float, deadline: float, grace_s: float, silent: Sequence[int]
    ) -> list[RankOutcome]:
        """One outcome for each rank, by rank; those that have not answered at the deadline hang."""
        outcomes: dict[int, RankOutcome] = {}
        expected = set(range(self.world_size)) - set(silent)
        while not expected <= outcomes.keys() and time.monotonic() < deadline:
            for rank in self._ready(
                [rank for rank in range(self.world_size) if rank not in outcomes], deadline
            ):
                answer = _receive(self._pipes[rank])
                outcomes[rank] = unpack(answer) if answer else self._exited(rank, time.monotonic() - started)
                if outcomes[rank].status != "returned":
                    deadline = min(deadline, time.monotonic() + grace_s)
        hung = [rank for rank in range(self.world_size) if rank not in outcomes]
        stacks = self._dump_stacks(hung)
        for rank in hung:
            report = f"{stacks[rank]}\n{self._log_tail(rank)}"
            outcomes[rank] = RankOutcome(rank, "hung", time.monotonic() - started, report=report)
        return [outcomes[rank] for rank in range(self.world_size)]

    def _ready(self, ranks: Sequence[int], deadline: float) -> list[int]:
        """Those of `ranks` that have answered or ended; waits for the first one."""
        handles: list[Any] = [self._pipes[rank] for rank in ranks]
        handles += [self._processes[rank].sentinel for rank in ranks]
        result = wait(handles, max(0.0, deadline - time.monotonic()))
        return [r for r in ranks if self._pipes[r] in result or self._processes[r].sentinel in result]

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="ranks_")
        start_server()
        context = multiprocessing.get_context("forkserver")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            arguments = (rank, self.world_size, self._folder, theirs)
            process = context.Process(target=serve, args=arguments, name=f"rank{rank}", daemon=True)
            process.start()
            theirs.close()  # or the end of the rank would not close the pipe
            self._processes.append(process)
            self._pipes.append(ours)
        self._await_ready(time.monotonic())

    def _await_ready(self, started: float) -> None:
        waiting = list(range(self.world_size))
        while waiting:
            reported = self._ready(waiting, started + _START_SECONDS)
            ended = [rank for rank in reported if _receive(self._pipes[rank]) != b"ready"]
            if ended or not reported:
                seconds = time.monotonic() - started
                late = [RankOutcome(r, "hung", seconds, report=self._log_tail(r)) for r in waiting]
                outcomes = [self._exited(item.rank, seconds) if item.rank in ended else item for item in late]
                raise RanksFailed(f"a pool of {self.world_size} ranks did not start", outcomes)
            waiting = [rank for rank in waiting if rank not in reported]

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()  # by the pid of a child that is not reaped yet; ends a stopped one, too
        for process in self._processes:
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._processes, self._pipes, self._folder = [], [], ""

    def _exited(self, rank: int, seconds: float) -> RankOutcome:
        self._processes[rank].join(_END_SECONDS)
        message = f"exit code {self._processes[rank].exitcode}"
        return RankOutcome(rank, "exited", seconds, message=message, report=self._log_tail(rank))

    def _dump_stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """The Python stacks of all threads of `ranks`, which are alive but have not answered."""
        states = {rank: _state(self._processes[rank].pid) for rank in ranks}
        for rank in ranks:
            pid = self._processes[rank].pid
            if pid is not None and self._processes[rank].is_alive():
                os.kill(pid, DUMP_SIGNAL)
        deadline = time.monotonic() + _STACK_SECONDS
        paths = {rank: stack_path(self._folder, rank) for rank in ranks}
        running = [
            paths[rank] for rank in ranks if not states[rank].startswith("T")
        ]  # T: stopped, as if dead
        while time.monotonic() < deadline and not all(map(_has_main_thread, running)):
            time.sleep(0.02)
        return {rank: _text(paths[rank]) or f"no stack: the process is {states[rank]}" for rank in ranks}

    def _log_tail(self, rank: int) -> str:
        lines = _text(log_path(self._folder, rank)).splitlines()[-_LOG_LINES:]
        return "its output:\n" + "\n".join(lines) if lines else "it printed nothing"


Pool = Callable[[int], RankPool]  # the fixture `rank_pool`


def _summary(outcome: RankOutcome) -> str:
    what = {"raised": outcome.error_type, "exited": outcome.message}.get(outcome.status, "")
    return f"{outcome.status} {what}".rstrip() + f" after {outcome.seconds:.2f} s"


def _request(fn: Callable[..., Any], args: Any, kwargs: Any) -> bytes:
    try:
        return pack((fn, args, kwargs))
    except Exception as error:
        raise TypeError(
            f"a rank gets {fn!r} and its arguments pickled: expected a function at the top level of a module "
            f"and arguments that pickle, got: {error}"
        ) from error


def _send(pipe: Connection, data: bytes) -> None:
    with suppress(OSError):  # the rank is gone; its sentinel says so where it matters
        pipe.send_bytes(data)


def _receive(pipe: Connection) -> bytes:
    """One answer, or nothing where the rank has ended without one."""
    try:
        return pipe.recv_bytes() if pipe.poll(0) else b""
    except (EOFError, OSError):
        return b""


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _has_main_thread(path: Path) -> bool:
    """Whole: the thread that took the signal is the main one, and its outermost frame is written last."""
    return _text(path).rpartition("Current thread")[2].endswith((" in <module>\n", "\n  ...\n"))


def _state(pid: int | None) -> str:
    return _of_status(pid, "State", "gone")


def _threads(pid: int) -> int:
    return int(_of_status(pid, "Threads", "0"))


def _of_status(pid: int | None, key: str, otherwise: str) -> str:
    lines = _text(Path(f"/proc/{pid}/status")).splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(f"{key}:")), otherwise)
