"""Start all ranks of a job on this machine in place of mpirun, forked from a process without torch.

Takes mpirun's command line as `launcher/engines/mpirun.py` writes it. What mpirun and that module do for a
rank is done in the forked process: its place in the environment, and an end with this process. A second
after the first rank that ends badly all others are killed, as mpirun does it. A rank ends as any Python
program does, but for the interpreter's last clearing up: that writes to every page, which a forked process
copies first, and a thousand ranks on two cores take seconds for it that no cluster takes.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from ds_ring_launcher.run import rank as rank_main
from ds_ring_launcher.run.environment_file import read_environment
from ds_ring_launcher.run.job import ENVIRONMENT_FILE, RANK_SCRIPT
from ds_ring_launcher.run.parent import end_with_parent
from ds_ring_launcher.run.run_folder import FOLDER_VARIABLE
from simulated_cluster import rank_script  # noqa: F401  its imports are made once
from simulated_cluster.figures import Figures, Of

_LOOK_SECONDS = 0.02
_GRACE_SECONDS = 1.0


def main(argv: list[str]) -> int:
    """Fork the ranks and wait for them; return the status of the first one that failed, as mpirun does."""
    slots = [int(host.rpartition(":")[2]) for host in argv[argv.index("--host") + 1].split(",")]
    count = int(argv[argv.index("-n") + 1])
    command = argv[argv.index("ds_ring_launcher.engines.mpirun") + 1 :]
    if sum(slots) != count or command[:1] != [str(RANK_SCRIPT)]:
        sys.exit(f"engine: expected {count} slots and {RANK_SCRIPT}, got {sum(slots)} and {command[:1]}")
    arguments = command[1:]
    folder = Path(arguments[arguments.index("--figures") + 1])
    figures = Figures(folder / f"{Path(os.environ[FOLDER_VARIABLE]).name}.figures", count)
    ranks: dict[int, int] = {}
    os.environ.update(read_environment(os.environ.pop(ENVIRONMENT_FILE)))
    gc.freeze()  # or the first collection of each rank copies what all share
    for size in slots:
        for local_rank in range(size):
            rank = len(ranks)
            figures.note(rank, Of.FORKED, time.time())
            pid = os.fork()
            if pid == 0:
                _be(rank, count, local_rank, size, arguments)
            ranks[pid] = rank
            figures.note(rank, Of.PID, pid)
    return _wait(ranks, figures)


def _be(rank: int, count: int, local_rank: int, slots: int, arguments: list[str]) -> NoReturn:
    """Run the script as a rank, in the forked process; end it."""
    end_with_parent()
    os.setpgid(0, 0)
    place = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": local_rank, "LOCAL_SIZE": slots}
    os.environ.update({name: str(number) for name, number in place.items()})
    status = 0
    try:
        rank_main.main(arguments)
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _wait(ranks: dict[int, int], figures: Figures) -> int:
    """Wait for all; kill the others a second after the first bad end."""
    first, deadline = 0, float("inf")
    while ranks:
        pid, ended = os.waitpid(-1, os.WNOHANG)
        if pid:
            status = os.waitstatus_to_exitcode(ended)
            figures.note(ranks.pop(pid), Of.STATUS, status)
            if status and not first:
                first, deadline = status, time.monotonic() + _GRACE_SECONDS
            continue
        if time.monotonic() > deadline:
            for left in ranks:
                os.kill(left, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(_LOOK_SECONDS)
    return first if first >= 0 else 128 - first


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
