"""Start the ranks of all hosts by Open MPI's mpirun.

This module also runs in each rank, where it names the rank as DeepSpeed scripts expect it and starts the
script. Without it DeepSpeed asks mpi4py, and overwrites MASTER_ADDR and MASTER_PORT with guesses of its own
(29500). It needs no MPI library: Open MPI puts each process's numbers into the environment.

mpirun kills all ranks a second after the first one that ends badly, or after its own SIGTERM. The launcher
sends it SIGUSR2 instead, which mpirun forwards to every rank on all hosts. Here that becomes one SIGTERM to
the script, and this process ends well afterwards, so that no rank's handler is cut off.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import FrameType

from ..run.environment_file import read_environment
from ..run.job import ENVIRONMENT_FILE, Invocation, Job, module_command
from ..run.parent import end_with_parent
from .engine import NUMBERS_OF_RANKS, Engine

_FROM_OPEN_MPI = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
_PLACEMENT = (
    "rmaps_*", "hwloc_*", "*default_hostfile", "*rankfile", "*enable_recovery", "*max_restarts",
    "*_output_filename", "*_oversubscribe",
)  # fmt: skip
_END_SIGNAL = signal.SIGUSR2
_PASSED_ON = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, _END_SIGNAL})
_MPIRUN_ADVICE = "pip install 'ds_ring[mpi]' brings Open MPI"


# [Note: secrets on the wire] Open MPI hands `-x NAME` to its daemons of other hosts in clear. What is private
# is written into a file of each host by ssh instead, and each rank reads it (environment_file.py).
class Mpirun(Engine):
    """Start the ranks of all hosts by Open MPI's mpirun; a process of this module runs in each rank."""

    starts_all_hosts = True
    # where ranks are placed, bound and started again, and those of an mpirun around this one; which network
    # is used (btl, oob) and how hosts are reached (plm) is a site's to say
    unset = (
        *NUMBERS_OF_RANKS, "OMPI_COMM_WORLD_*", "OMPI_UNIVERSE_SIZE", "PMIX_RANK", "PMIX_NAMESPACE",
        "PMIX_SERVER_*", *(f"{name}_MCA_{part}" for name in ("OMPI", "PRTE") for part in _PLACEMENT),
    )  # fmt: skip

    def invocation(self, job: Job) -> Invocation:
        """Return the call of mpirun for all hosts; mpi4py is not needed: ranks talk through torch."""
        from ds_ring.errors import RingConfigError

        cluster = job.cluster
        if not cluster.is_local and not cluster.ssh:
            raise RingConfigError("expected ssh: true with mpirun, got false; it starts all hosts itself")
        environment = {**job.environment, "MASTER_ADDR": job.master_address, "MASTER_PORT": str(job.port)}
        by_file: dict[str, str] = {}
        if not cluster.is_local:
            names = [name for name in environment if name in job.private]
            by_file = job.carried | {name: environment.pop(name) for name in names}
        hosts = ",".join(f"{host.name}:{host.slots}" for host in cluster.hosts)
        # Bound to one core each, ranks of more than one thread would share one core.
        argv = ["mpirun", "-n", str(cluster.world_size), "--host", hosts, "--bind-to", "none"]
        if os.geteuid() == 0:  # containers run as root, which mpirun refuses by default
            argv += ["--allow-run-as-root"]
        if cluster.ssh_port is not None:
            argv += ["--prtemca", "plm_ssh_args", f"-p {cluster.ssh_port}"]
        for name in (*sorted(environment), *([ENVIRONMENT_FILE] if by_file else [])):
            argv += ["-x", name]  # the values are taken from its own environment
        argv += [*cluster.engine_args, *module_command("ds_ring_launcher.engines.mpirun"), *job.rank_command]
        return Invocation(
            argv,
            job.with_own_programs(environment),
            programs={"mpirun": _MPIRUN_ADVICE},
            private=job.private,
            by_file=by_file,
            unset=self.unset,
            end_signal=_END_SIGNAL,
        )


def main(argv: list[str]) -> int:
    """Run the script `argv[0]` with the rest as its arguments; return its status (0 if ended by request)."""
    missing = [name for name in _FROM_OPEN_MPI.values() if name not in os.environ]
    if missing:
        sys.exit(f"engines.mpirun: expected to be started by Open MPI's mpirun, which sets {missing[0]}")
    end_with_parent()  # mpirun, or its daemon here, may be killed itself
    environment = dict(os.environ)
    if ENVIRONMENT_FILE in environment:
        environment |= read_environment(environment.pop(ENVIRONMENT_FILE))
    environment |= {name: os.environ[source] for name, source in _FROM_OPEN_MPI.items()}
    told_to_end = False

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal told_to_end
        if not told_to_end:
            told_to_end = number == _END_SIGNAL
            script.send_signal(signal.SIGTERM if told_to_end else number)

    # Blocked until there is a script to pass them on to.
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    script = subprocess.Popen([sys.executable, "-u", *argv], env=environment, preexec_fn=_as_rank)
    for number in _PASSED_ON:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    status = script.wait()
    if told_to_end:
        return 0
    if status < 0:  # the same end, so that mpirun reports the signal
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def _as_rank() -> None:
    """End with the process above, which mpirun kills; hear its signals only, and every one of them."""
    end_with_parent()
    os.setpgid(0, 0)  # mpirun signals whole process groups
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
