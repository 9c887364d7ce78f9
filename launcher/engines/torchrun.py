"""Call torchrun on one host."""

from __future__ import annotations

import sys

from ..run.job import Invocation, Job
from .engine import Engine


class Torchrun(Engine):
    """Start the ranks of one host by torchrun."""

    def invocation(self, job: Job) -> Invocation:
        """Return the call of torchrun on one host, by its module."""
        cluster = job.cluster
        slots = cluster.hosts[job.node_rank].slots
        # By its module: the program `torchrun` on PATH may be another environment's.
        argv = [sys.executable, "-m", "torch.distributed.run"]
        argv += [f"--nnodes={len(cluster.hosts)}", f"--nproc-per-node={slots}"]
        argv += [f"--node-rank={job.node_rank}", f"--master-addr={job.master_address}"]
        argv += [f"--master-port={job.port}"]
        argv += [*cluster.engine_args, *job.rank_command()]
        return Invocation(argv, job.with_own_programs(job.environment), private=job.private)
