"""Runs inside a rank that mpirun started: names the rank as DeepSpeed scripts expect, then runs the script.

Without it DeepSpeed asks mpi4py, and overwrites MASTER_ADDR and MASTER_PORT with guesses of its own (29500).
Needs no MPI library: Open MPI tells each process its place in the environment.
"""

from __future__ import annotations

import os
import runpy
import sys

_FROM_OPEN_MPI = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}


def main(argv: list[str]) -> None:
    """Run the script `argv[0]` with the rest as its arguments, as `python script ...` would."""
    missing = [name for name in _FROM_OPEN_MPI.values() if name not in os.environ]
    if missing:
        sys.exit(f"mpi_rank: expected to be started by Open MPI's mpirun, which sets {missing[0]}")
    for name, source in _FROM_OPEN_MPI.items():
        os.environ[name] = os.environ[source]
    sys.argv = list(argv)
    sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
