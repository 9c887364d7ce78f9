"""Name a rank under srun as DeepSpeed scripts expect it, and become its script."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

_FROM_SLURM = {
    "RANK": "SLURM_PROCID",
    "WORLD_SIZE": "SLURM_NTASKS",
    "LOCAL_RANK": "SLURM_LOCALID",
}


def environment_of(around: Mapping[str, str]) -> dict[str, str]:
    """Return what the script's environment has of Slurm's place for this task.

    Raises:
        SystemExit: it was not started by srun.
    """
    missing = [name for name in _FROM_SLURM.values() if name not in around]
    if missing:
        sys.exit(f"slurm_rank: expected to be started by Slurm's srun, which sets {missing[0]}")
    found = {name: around[source] for name, source in _FROM_SLURM.items()}
    # "8(x64)", or "2(x3),1": the nodes with as many tasks follow one another.
    counts: list[str] = []
    for part in around.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        tasks, _, times = part.partition("(x")
        counts += [tasks] * int(times.rstrip(")") or 1)
    node = int(around.get("SLURM_NODEID", "0"))
    if node < len(counts) and counts[node].isdecimal():
        found["LOCAL_SIZE"] = counts[node]
    return found


def main(argv: list[str]) -> None:
    """Run `argv`, a script or -m and a module with their arguments, in this process."""
    os.environ.update(environment_of(os.environ))
    os.execv(sys.executable, [sys.executable, "-u", *argv])


if __name__ == "__main__":
    main(sys.argv[1:])
