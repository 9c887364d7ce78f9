"""Run a script as one rank of a run: its log, and what ended it, go into the folder of the attempt.

What every engine starts, by rank_script.py, where the cluster YAML names a `run_folder`. In the process of
the script, so that signals, exit status and stacks are its own. run_folder.py describes the files.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType

from ds_ring.error_origins import compiled_in, get_failure_kind
from ds_ring.written_files import append_text

from .job import open_standard_streams, raise_file_limit
from .probe import interface_to
from .run_folder import FOLDER_VARIABLE, TOLD_TO_END, RankFault, write_exit, write_fault

_FRAMES = 5  # the innermost ones that are kept: enough to tell one bug from another
_ENDS_A_RANK = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(argv: list[str]) -> None:
    """Run the script in `argv`, where DeepSpeed's launcher puts its `--local_rank=N` first."""
    before = [word for word in argv[:1] if word.startswith("--local_rank")]
    script, *arguments = argv[len(before) :]
    rank, folder = int(os.environ.get("RANK", "0")), Path(os.environ[FOLDER_VARIABLE])
    raise_file_limit()
    open_standard_streams()
    _mark_end(folder / f"rank-{rank}.stopped")
    _copy_output(folder / f"rank-{rank}.log")
    _choose_interface()
    faulthandler.enable()
    _record_sigterm(folder, rank)
    sys.argv = [script, *before, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as leaving:
        code = leaving.code or 0
        write_exit(folder, rank, code if isinstance(code, int) else 1, _step())
        raise
    except BaseException as error:
        write_fault(folder, describe_fault(error, rank, _step()))
        error.__traceback__ = _own_frames(error.__traceback__)
        raise  # Python prints it, by the hook that names the culprit
    write_exit(folder, rank, 0, _step())


def _step() -> int | None:
    """Return the optimizer step that is under way, if the script's engine is one of ds_ring.initialize."""
    report = sys.modules.get("ds_ring.measure.run_report")
    return None if report is None else report.step_under_way()


def describe_fault(error: BaseException, rank: int, step: int | None) -> RankFault:
    """Describe an exception, and say whose fault it is."""
    trace = _own_frames(error.__traceback__)
    frames = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(trace)]
    printed = "".join(traceback.format_exception(type(error), error, trace))
    kind, blames = get_failure_kind(error)
    name = type(error).__name__
    return RankFault(
        rank, time.time(), step, kind, name, str(error)[:2000], tuple(frames[-_FRAMES:]), printed, blames,
        compiled_in(error) is None,
    )  # fmt: skip


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the script's first line on: without this file's frames and runpy's."""
    here = {__file__, runpy.__file__, "<frozen runpy>"}
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in here:
        trace = trace.tb_next
    return trace


def _choose_interface() -> None:
    """Name the interface that reaches rank 0 to gloo and NCCL, if none is named."""
    # gloo asks the name service for this host's own name, and on many systems that is loopback's.
    wanted = [name for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name not in os.environ]
    interface = interface_to(os.environ["MASTER_ADDR"]) if wanted and "MASTER_ADDR" in os.environ else None
    if interface is not None:
        os.environ.update(dict.fromkeys(wanted, interface))


def _record_sigterm(folder: Path, rank: int) -> None:
    """Write down that the rank got a request to end, where the script does not handle that itself.

    Slurm's word for it is SIGUSR1 (engines/slurm.py): a script that knows SIGTERM alone hears it as SIGTERM.
    """
    rank_pid = os.getpid()  # forked workers inherit the handlers, and Slurm signals them, too

    # An engine ends the others as soon as one rank is gone: the silent one is gone.
    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() == rank_pid:
            write_exit(folder, rank, TOLD_TO_END)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def pass_on(number: int, frame: FrameType | None) -> None:
        if os.getpid() == rank_pid:
            os.kill(rank_pid, signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGUSR1, pass_on)


@contextmanager
def _heirs_hear_nothing() -> Iterator[None]:
    """Block the signals that end a rank for processes started in the block: it ends after the rank."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS_A_RANK)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _mark_end(path: Path) -> None:
    """Let `path` be made as soon as this process is gone, however it ends."""
    # A shell waits for the end of a pipe whose other end this process alone holds: forked workers close it,
    # and the executed program has not got it.
    read, write = os.pipe()
    os.register_at_fork(after_in_child=lambda: os.close(write))
    with _heirs_hear_nothing():
        waiting = subprocess.Popen(
            ["sh", "-c", 'set -C; read nothing; : > "$1"', "sh", str(path)],
            stdin=read, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    os.close(read)
    waiting.returncode = 0  # it is not waited for


def _copy_output(log: Path) -> None:
    """Let everything that this process and its children print go into `log` as well."""
    # Processes and not threads: what a rank printed before SIGKILL or a crash arrives, too. They end with
    # their writers. SIGPIPE stays ignored in them: a terminal that is gone ends no log.
    together = os.path.sameopenfile(1, 2)  # one terminal, say: one process, which keeps the order of lines
    try:
        append_text(log, "")  # `tee` would follow a link that somebody has put there
    except OSError as error:
        print(f"ds-ring: {log}: expected a file to write to, got {error.strerror}; no log", file=sys.stderr)
        return
    for descriptors in [(1, 2)] if together else [(1,), (2,)]:
        with _heirs_hear_nothing():
            tee = subprocess.Popen(
                ["tee", "-a", str(log)], stdin=subprocess.PIPE, stdout=descriptors[0],
                stderr=subprocess.DEVNULL, restore_signals=False,
            )  # fmt: skip
        assert tee.stdin is not None
        for descriptor in descriptors:
            os.dup2(tee.stdin.fileno(), descriptor)
        tee.stdin.close()
        tee.returncode = 0  # Popen must not warn that it still runs: it ends after this process
