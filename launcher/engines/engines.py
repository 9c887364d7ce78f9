"""Build the command line of an engine that exists already: the table of engines, each a file beside this one.

Starts nothing and writes nothing: run/process.py runs an `Invocation`, and `--dry-run` prints it. A new
engine is a file, one row of the table and one word in cluster.py; one that starts all hosts needs more
(CONTRIBUTING.md, "Others").
"""

from __future__ import annotations

from collections.abc import Callable

from ..run.job import Invocation, Job
from .deepspeed import deepspeed
from .mpirun import mpirun
from .slurm import slurm
from .torchrun import torchrun

ENGINES: dict[str, Callable[[Job], Invocation]] = {
    "deepspeed": deepspeed,
    "torchrun": torchrun,
    "mpirun": mpirun,
    "slurm": slurm,
}
STARTS_ALL_HOSTS = frozenset({"mpirun", "slurm"})  # others start the host on which they are called


def build(job: Job) -> Invocation:
    """Return the invocation of the engine that the cluster names."""
    return ENGINES[job.cluster.engine](job)
