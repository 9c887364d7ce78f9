"""Call torchrun on one host."""

from __future__ import annotations

import math

from ..run.job import Invocation, Job, module_command
from .engine import NUMBERS_OF_RANKS, Engine


class Torchrun(Engine):
    """Start the ranks of one host by torchrun."""

    unset = (*NUMBERS_OF_RANKS, "PYTHON_EXEC", "TORCH_ELASTIC_*")

    def invocation(self, job: Job) -> Invocation:
        """Return the call of torchrun on one host, by its module."""
        cluster = job.cluster
        slots = cluster.hosts[job.node_rank].slots
        # By its module: the program `torchrun` on PATH may be another environment's.
        argv = module_command("torch.distributed.run")
        argv += [f"--nnodes={len(cluster.hosts)}", f"--nproc-per-node={slots}"]
        argv += [f"--node-rank={job.node_rank}", f"--master-addr={job.master_address}"]
        argv += [f"--master-port={job.port}", "--max-restarts=0"]  # who starts again is relaunch.py
        argv += [*cluster.engine_args, *job.rank_command]
        # after a SIGTERM of its own, before SIGKILL: 30 s by default
        seconds = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(math.ceil(cluster.grace_seconds) + 1)}
        environment = job.with_own_programs({**seconds, **job.environment})
        return Invocation(argv, environment, private=job.private, unset=self.unset)
