"""Call Slurm's srun for all ranks of a job, and write the sbatch script in which that is done.

Ranks get their place from Slurm (slurm_rank.py), all else from the environment, which srun hands over by
itself: no value stands on a command line. A host that fails is Slurm's to notice: it ends the job and puts it
back into the queue, and the script begins again with the newest checkpoint.
"""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path

from ..cluster.cluster import Cluster
from ..run.job import Invocation, Job
from ..run.run_folder import PREEMPTED

_PLACE_MODULE = "ds_ring_launcher.engines.slurm_rank"
_AS_THEY_ARE = ("--mpi=none", "--cpu-bind=none", "--unbuffered")  # nothing of MPI's, nothing held back
SIGNAL_SECONDS = 120  # before the time limit, unless grace_seconds needs more
SRUN_ADVICE = (
    "call ds-ring inside a Slurm allocation; `ds-ring launch CLUSTER.yaml --sbatch` prints a script for one"
)


def slurm(job: Job) -> Invocation:
    """Return the call of srun for all hosts, in the order of the YAML."""
    cluster = job.cluster
    tasks = job.folder / "tasks"
    files = {tasks: "".join(f"{host.name}\n" * host.slots for host in cluster.hosts)}
    # "arbitrary" places task k on line k of SLURM_HOSTFILE: rank 0 is on the YAML's first host.
    argv = [
        "srun",
        f"--nodes={len(cluster.hosts)}",
        f"--ntasks={cluster.world_size}",
        "--distribution=arbitrary",
    ]
    argv += [
        "--kill-on-bad-exit=1",
        *_AS_THEY_ARE,
        *cluster.engine_args,
        sys.executable,
        "-u",
        "-m",
        _PLACE_MODULE,
    ]
    argv += [*(["-m"] if job.rank_module else []), *job.rank_module, *job.script_command]
    environment = {
        **job.environment,
        "MASTER_ADDR": job.master_address,
        "MASTER_PORT": str(job.port),
        "SLURM_HOSTFILE": str(tasks),
    }
    return Invocation(
        argv,
        job.with_own_programs(environment),
        files,
        programs={"srun": SRUN_ADVICE},
        private=job.private,
        # srun hands it on to all tasks; its own SIGTERM leaves them no time. Without a run_folder nothing
        # there makes a SIGTERM of it (rank.py).
        end_signal=signal.SIGUSR1 if job.rank_module else None,
    )


def srun_command(host: str, module: str) -> list[str]:
    """Return the command line that runs a module on one host of the allocation, beside what runs there."""
    argv = ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap", "--quiet", *_AS_THEY_ARE]
    return [*argv, sys.executable, "-u", "-m", module]


def sbatch_script(cluster: Cluster, config: Path, extra_args: tuple[str, ...]) -> str:
    """Return a script for sbatch that runs `ds-ring launch` on the YAML at `config` in its allocation."""
    seconds = max(SIGNAL_SECONDS, round(cluster.grace_seconds) + 60)
    most = max(host.slots for host in cluster.hosts)
    log = f"{cluster.run_folder}/slurm-%j.log" if cluster.run_folder else "slurm-%j.log"
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={cluster.script.stem}",
        f"#SBATCH --nodes={len(cluster.hosts)}",
        f"#SBATCH --nodelist={','.join(host.name for host in cluster.hosts)}",
        f"#SBATCH --ntasks-per-node={most}",
        *([f"#SBATCH --gpus-per-node={most}"] if cluster.device == "cuda" else []),
        "#SBATCH --exclusive",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        f"#SBATCH --output={log}",
        f"#SBATCH --signal=B:USR1@{seconds}",
        "# Time, partition and account: sbatch --time=... --partition=... --account=... THIS_SCRIPT",
        "",
    ]
    command = [sys.executable, "-m", "ds_ring_launcher.cli", "launch", str(config.absolute())]
    command += ["--", *extra_args] if extra_args else []
    return "\n".join([*lines, _BODY.format(command=shlex.join(command), preempted=PREEMPTED)])


# bash runs a trap only between commands, and `wait` is the one that a signal interrupts.
_BODY = """\
{command} &
launcher=$!
trap 'kill -USR1 "$launcher"' USR1 TERM
while :; do
  wait "$launcher"
  status=$?
  kill -0 "$launcher" 2>/dev/null || break
done
# {preempted}: all ranks saved and left, as they were told to. Slurm starts this script again.
if [ "$status" -eq {preempted} ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""
