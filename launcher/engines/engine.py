"""Define what an engine is: the program that starts the ranks of a job.

A new engine is a subclass in a file of its own, and a row in engines.py, which fills `ENGINES`. Files of
engines whose module also runs in each rank (mpirun.py, slurm.py) import what takes time inside functions.
"""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

from ..run.job import Invocation, Job, module_command
from ..run.run_folder import FOLDER_VARIABLE

if TYPE_CHECKING:
    from ds_ring.config.problems import Problem

    from ..cluster.cluster import Cluster

_SSH_ADVICE = "install an ssh client, or set ssh: false and start ds-ring on every host with --node-rank"


# The engine sets these for each rank, and torch or DeepSpeed would believe those of a job around this one:
# of a rank that calls ds-ring, say. PET_X is torchrun's option --x.
NUMBERS_OF_RANKS = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "NODE_RANK", "GROUP_RANK",
    "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "CROSS_RANK", "CROSS_SIZE",
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_*", "PET_*", "DLTS_*", FOLDER_VARIABLE,
)  # fmt: skip


class Engine(ABC):
    """Start the ranks of a job. The defaults are those of a program that starts the ranks of one host.

    Attributes:
        unset: patterns of environment variables that it would read as options of its own, or as numbers of
            ranks; it does not get the caller's.
        starts_all_hosts: one call starts the ranks of all hosts; else it is called on each host.
        has_daemons: other hosts are reached by daemons of its own, not by ssh; a host that is gone is their
            matter.
    """

    unset: tuple[str, ...] = NUMBERS_OF_RANKS
    starts_all_hosts = False
    has_daemons = False

    @abstractmethod
    def invocation(self, job: Job) -> Invocation:
        """Return the call that starts the job: on the host `job.node_rank`, or on all hosts."""

    def reach(self, host: str, ssh_port: int | None, module: str) -> tuple[list[str], str]:
        """Return the command line that runs a module on a host, and advice where its program is missing."""
        return ssh_command(host, ssh_port, module), _SSH_ADVICE

    def problems(self, cluster: Cluster) -> list[Problem]:
        """Return what this engine cannot do of a YAML whose keys are right by themselves."""
        return []

    def batch_script(self, cluster: Cluster, config: Path, extra_args: tuple[str, ...]) -> str | None:
        """Return a script for the engine's queue that launches the YAML at `config`; None without a queue."""
        return None


ENGINES: dict[str, Engine] = {}  # by the word that the cluster YAML has for it


def ssh_command(host: str, ssh_port: int | None, module: str = "ds_ring_launcher.run.agent") -> list[str]:
    """Return the command line that starts an agent, or another module, on a host."""
    port = [] if ssh_port is None else ["-p", str(ssh_port)]
    # Without a terminal no password can be typed; a missing host is noticed in a minute.
    options = ["BatchMode=yes", "ServerAliveInterval=15", "ServerAliveCountMax=4"]
    words = [word for option in options for word in ("-o", option)]
    return ["ssh", "-T", *port, *words, host, shlex.join(module_command(module))]
