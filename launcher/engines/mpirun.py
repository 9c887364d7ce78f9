"""Call Open MPI's mpirun, which starts the ranks of all hosts; mpi_rank.py runs in each of them."""

from __future__ import annotations

import os
import signal
import sys

from ds_ring.errors import RingConfigError

from ..run.job import Invocation, Job

_MPIRUN_ADVICE = "pip install 'ds_ring[mpi]' brings Open MPI"
# mpirun forwards this signal to all ranks on all hosts, where mpi_rank.py takes it for SIGTERM. At SIGTERM
# itself mpirun ends the ranks, and leaves them a second.
_END_SIGNAL = signal.SIGUSR2


def mpirun(job: Job) -> Invocation:
    """Return the call of Open MPI's mpirun for all hosts; mpi4py is not needed: ranks talk through torch."""
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
    for name in sorted(environment):  # the values are taken from its own environment
        argv += ["-x", name]
    argv += [*cluster.engine_args, sys.executable, "-m", "ds_ring_launcher.engines.mpi_rank"]
    argv += [*(["-m"] if job.rank_module else []), *job.rank_module, *job.script_command]
    return Invocation(
        argv,
        job.with_own_programs(environment),
        programs={"mpirun": _MPIRUN_ADVICE},
        private=job.private,
        end_signal=_END_SIGNAL,
    )
