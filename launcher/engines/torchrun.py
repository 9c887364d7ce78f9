"""Call torchrun on one host.

For a job of this machine alone this module is torchrun: its agent keeps the store by which ranks meet, and
torch's would listen on every interface.
"""

from __future__ import annotations

import math
from typing import Any

from ..run.job import Invocation, Job, module_command
from .engine import NUMBERS_OF_RANKS, Engine

_ON_LOOPBACK = "ds_ring_launcher.engines.torchrun"


class Torchrun(Engine):
    """Start the ranks of one host by torchrun."""

    unset = (*NUMBERS_OF_RANKS, "PYTHON_EXEC", "TORCH_ELASTIC_*")

    def invocation(self, job: Job) -> Invocation:
        """Return the call of torchrun on one host, by its module."""
        cluster = job.cluster
        slots = cluster.hosts[job.node_rank].slots
        # By its module: the program `torchrun` on PATH may be another environment's.
        argv = module_command(_ON_LOOPBACK if cluster.is_local else "torch.distributed.run")
        argv += [f"--nnodes={len(cluster.hosts)}", f"--nproc-per-node={slots}"]
        argv += [f"--node-rank={job.node_rank}", f"--master-addr={job.master_address}"]
        argv += [f"--master-port={job.port}", "--max-restarts=0"]  # who starts again is relaunch.py
        argv += [*cluster.engine_args, *job.rank_command]
        # after a SIGTERM of its own, before SIGKILL: 30 s by default
        seconds = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(math.ceil(cluster.grace_seconds) + 1)}
        environment = job.with_own_programs({**seconds, **job.environment})
        return Invocation(argv, environment, private=job.private, unset=self.unset)


def main() -> None:
    """Be torchrun, with a store that listens on loopback where the master's address is one."""
    from torch.distributed import run
    from torch.distributed.elastic.rendezvous import static_tcp_rendezvous as rendezvous

    from ds_ring.health.rendezvous import loopback_listener

    name = "TCPStore"
    store = getattr(rendezvous, name)

    def made(host: str, port: int, world_size: int, is_master: bool, timeout: Any, **more: Any) -> Any:
        more |= loopback_listener(host, port) if is_master else {}
        return store(host, port, world_size, is_master, timeout, **more)

    setattr(rendezvous, name, made)
    run.main()


if __name__ == "__main__":
    main()
