"""Call torchrun on one host.

This module is torchrun. For a job of this machine alone its agent keeps the store by which ranks meet, and
torch's would listen on every interface. Where ds-ring names the rank that failed, torchrun's own report of it
(forty lines, after the rank's) is left out.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..run.job import Invocation, Job, module_command
from ..run.process import say
from ..run.run_folder import FOLDER_VARIABLE, write_exit
from .engine import NUMBERS_OF_RANKS, Engine

_MODULE, _BRIEF = "ds_ring_launcher.engines.torchrun", "--brief"


class Torchrun(Engine):
    """Start the ranks of one host by torchrun."""

    unset = (*NUMBERS_OF_RANKS, "PYTHON_EXEC", "TORCH_ELASTIC_*")

    def invocation(self, job: Job) -> Invocation:
        """Return the call of torchrun on one host, by its module."""
        cluster = job.cluster
        slots = cluster.hosts[job.node_rank].slots
        # By its module: the program `torchrun` on PATH may be another environment's.
        argv = module_command(_MODULE) + [_BRIEF] * (job.names_culprit and not job.verbose)
        argv += [f"--nnodes={len(cluster.hosts)}", f"--nproc-per-node={slots}"]
        argv += [f"--node-rank={job.node_rank}", f"--master-addr={job.master_address}"]
        argv += [f"--master-port={job.port}", "--max-restarts=0"]  # who starts again is relaunch.py
        argv += [*cluster.engine_args, *job.rank_command]
        # after a SIGTERM of its own, before SIGKILL: 30 s by default
        seconds = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(math.ceil(cluster.grace_seconds) + 1)}
        environment = job.with_own_programs({**seconds, **job.environment})
        return Invocation(argv, environment, private=job.private, unset=self.unset)


def main(arguments: list[str]) -> None:
    """Be torchrun, with a store that listens on loopback where the master's address is one.

    With --brief it has no report of its own of ranks that failed.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import static_tcp_rendezvous as rendezvous

    from ds_ring.health.rendezvous import make_loopback_listener

    name = "TCPStore"
    store = getattr(rendezvous, name)

    def made(host: str, port: int, world_size: int, is_master: bool, timeout: Any, **options: Any) -> Any:
        options |= make_loopback_listener(host, port) if is_master else {}
        return store(host, port, world_size, is_master, timeout, **options)

    setattr(rendezvous, name, made)
    if arguments[:1] != [_BRIEF]:
        run.main(arguments)
        return
    logging.getLogger("torch.distributed.elastic.multiprocessing").setLevel(logging.CRITICAL)
    try:
        run.main(arguments[1:])
    except ChildFailedError as error:
        _report({rank: failure.exitcode for rank, failure in error.failures.items()})
        sys.exit(1)


def _report(exit_codes: Mapping[int, int]) -> None:
    """Say which signals ended ranks; without one, write down how ranks ended that have not done so."""
    signals = {rank: -code for rank, code in exit_codes.items() if code < 0 and code != -signal.SIGTERM}
    for rank, number in signals.items():  # torchrun's own is SIGTERM
        say(f"rank {rank} was ended by {signal.Signals(number).name}")
    folder = Path(os.environ.get(FOLDER_VARIABLE, "."))
    if signals or FOLDER_VARIABLE not in os.environ or any(folder.glob("rank-*.log")):  # rank.py's ranks
        return
    for rank, code in exit_codes.items():
        if code > 0 and not (folder / f"rank-{rank}.fault.json").exists():
            write_exit(folder, rank, code)


if __name__ == "__main__":
    main(sys.argv[1:])
