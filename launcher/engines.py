"""The table of engines: job -> command line of a launcher that exists already. One function per engine.

Starts nothing and writes nothing: process.py runs an `Invocation`, and `--dry-run` prints it. A new engine is
one function, one row of the table and one word in cluster.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from ds_ring.errors import RingConfigError

from .engine_deepspeed import deepspeed
from .job import Invocation, Job

_MPIRUN_ADVICE = "pip install 'ds_ring[mpi]' brings Open MPI"


def torchrun(job: Job) -> Invocation:
    """torchrun, by its module. It starts its own host only."""
    cluster = job.cluster
    if cluster.reaches_out:
        raise RingConfigError(
            f"expected ssh: false with engine torchrun, got {len(cluster.hosts)} hosts to start by ssh; "
            "torchrun starts its own host only: set ssh: false, or take engine deepspeed or mpirun"
        )
    slots = cluster.hosts[job.node_rank].slots
    argv = [sys.executable, "-m", "torch.distributed.run"]
    argv += [f"--nnodes={len(cluster.hosts)}", f"--nproc-per-node={slots}", f"--node-rank={job.node_rank}"]
    argv += [f"--master-addr={job.master_address}", f"--master-port={job.port}"]
    argv += [*cluster.engine_args, *job.script_command]
    return Invocation(argv, job.with_own_programs(job.environment))


def mpirun(job: Job) -> Invocation:
    """Open MPI's mpirun, as a starter of processes: ranks talk through torch, so mpi4py is not needed."""
    cluster = job.cluster
    if not cluster.is_local and not cluster.ssh:
        raise RingConfigError(
            "expected ssh: true with engine mpirun, got false; mpirun starts all hosts itself"
        )
    environment = {**job.environment, "MASTER_ADDR": job.master_address, "MASTER_PORT": str(job.port)}
    hosts = ",".join(f"{host.name}:{host.slots}" for host in cluster.hosts)
    # Bound to one core each, ranks of more than one thread would stand in each other's way.
    argv = ["mpirun", "-n", str(cluster.world_size), "--host", hosts, "--bind-to", "none"]
    argv += ["--allow-run-as-root"] if os.geteuid() == 0 else []  # it refuses root; containers run as root
    if cluster.ssh_port is not None:
        argv += ["--prtemca", "plm_ssh_args", f"-p {cluster.ssh_port}"]
    for name in sorted(environment):
        argv += ["-x", name]
    argv += [
        *cluster.engine_args,
        sys.executable,
        "-u",
        "-m",
        "ds_ring_launcher.mpi_rank",
        *job.script_command,
    ]
    return Invocation(argv, job.with_own_programs(environment), programs={"mpirun": _MPIRUN_ADVICE})


ENGINES: dict[str, Callable[[Job], Invocation]] = {
    "deepspeed": deepspeed,
    "torchrun": torchrun,
    "mpirun": mpirun,
}


def build(job: Job) -> Invocation:
    """The invocation of the engine that the cluster names."""
    return ENGINES[job.cluster.engine](job)
