"""Start the ranks of all hosts by Slurm's srun, and write the sbatch script in which that is done.

This module also runs in each rank, where it sets the rank's numbers from Slurm's variables. All else comes
from the environment, which srun hands over by itself: no value is on a command line. A host that fails is
Slurm's to notice: it ends the job and puts it back into the queue, and the script begins again with the
newest checkpoint.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..run.job import Invocation, Job, module_command
from ..run.run_folder import PREEMPTED
from .engine import NUMBERS_OF_RANKS, Engine

if TYPE_CHECKING:
    from ..cluster.cluster import Cluster

_FROM_SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
_OPTIONS = (
    "EXPORT_ENV", "LABELIO", "STDINMODE", "STDOUTMODE", "STDERRMODE", "WORKING_DIR", "WAIT", "NO_KILL",
    "TASK_PROLOG", "TASK_EPILOG", "PROLOG", "EPILOG", "OVERCOMMIT", "TIMELIMIT", "EXCLUSIVE", "OVERLAP",
    "MULTI_PROG", "HINT", "MEM_BIND", "OPEN_MODE", "SRUN_REDUCE_TASK_EXIT",
)  # fmt: skip
_PLAIN = ("--mpi=none", "--cpu-bind=none", "--unbuffered")  # nothing of MPI's, nothing held back
_SIGNAL_SECONDS = 120  # before the time limit, unless grace_seconds needs more
_SRUN_ADVICE = (
    "call ds-ring inside a Slurm allocation; `ds-ring launch CLUSTER.yaml --sbatch` prints a script for one"
)


class Slurm(Engine):
    """Start the ranks of all hosts by srun, in an allocation of Slurm's."""

    starts_all_hosts = True
    has_daemons = True  # they end a job that loses a host
    # options of srun that no allocation sets for its own sake
    unset = (*NUMBERS_OF_RANKS, *(f"SLURM_{name}" for name in _OPTIONS))

    def invocation(self, job: Job) -> Invocation:
        """Return the call of srun for all hosts, in the order of the YAML."""
        cluster = job.cluster
        tasks = job.folder / "tasks"
        files = {tasks: "".join(f"{host.name}\n" * host.slots for host in cluster.hosts)}
        # "arbitrary" places task k on line k of SLURM_HOSTFILE: rank 0 is on the YAML's first host.
        argv = ["srun", f"--nodes={len(cluster.hosts)}", f"--ntasks={cluster.world_size}"]
        argv += ["--distribution=arbitrary", "--kill-on-bad-exit=1", *_PLAIN, *cluster.engine_args]
        argv += [*module_command("ds_ring_launcher.engines.slurm"), *job.rank_command]
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
            programs={"srun": _SRUN_ADVICE},
            private=job.private,
            unset=self.unset,
            # srun hands it on to all tasks; its own SIGTERM leaves them no time. Without a run_folder nothing
            # there makes a SIGTERM of it (run/rank.py).
            end_signal=None if job.attempt_folder is None else signal.SIGUSR1,
        )

    def reach(self, host: str, ssh_port: int | None, module: str) -> tuple[list[str], str]:
        """Return the srun that runs a module on one host of the allocation, next to the job there."""
        argv = ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap", "--quiet", *_PLAIN]
        return [*argv, *module_command(module)], _SRUN_ADVICE

    def batch_script(self, cluster: Cluster, config: Path, extra_args: tuple[str, ...]) -> str | None:
        """Return a script for sbatch that runs `ds-ring launch` on the YAML at `config` in its allocation."""
        seconds = max(_SIGNAL_SECONDS, round(cluster.grace_seconds) + 60)
        most = max(host.slots for host in cluster.hosts)
        # a % in it would be a pattern of Slurm's
        run = "" if cluster.run_folder is None else f"{cluster.run_folder}/".replace("%", "%%")
        log = f"{run}slurm-%j.log"
        lines = [
            "#!/bin/bash",
            f"#SBATCH --job-name={re.sub(r'[^A-Za-z0-9._-]', '_', cluster.script.stem)}",
            f"#SBATCH --nodes={len(cluster.hosts)}",
            f"#SBATCH --nodelist={','.join(host.name for host in cluster.hosts)}",
            f"#SBATCH --ntasks-per-node={most}",
            *([f"#SBATCH --gpus-per-node={most}"] if cluster.device == "cuda" else []),
            "#SBATCH --exclusive",
            "#SBATCH --requeue",
            "#SBATCH --open-mode=append",
            f"#SBATCH --output={_quoted(log)}",
            f"#SBATCH --signal=B:USR1@{seconds}",
            "# Your cluster may ask for: sbatch --time=... --partition=... --account=... --mem=0 THIS_SCRIPT",
            "",
        ]
        command = [*module_command("ds_ring_launcher.cli"), "launch", str(config.absolute())]
        command += ["--", *extra_args] if extra_args else []
        return "\n".join([*lines, _BODY.format(command=shlex.join(command), preempted=PREEMPTED)])


def _quoted(word: str) -> str:
    """Return a word of an #SBATCH line, which sbatch reads as a shell does, but for comments."""
    if re.fullmatch(r"[A-Za-z0-9_@%+=:,./-]+", word):
        return word
    return '"' + re.sub(r'(["\\])', r"\\\1", word) + '"'


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
# {preempted}: all ranks saved and left on request. Slurm starts this script again.
if [ "$status" -eq {preempted} ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


def read_rank_numbers(around: Mapping[str, str]) -> dict[str, str]:
    """Return what the script's environment has of Slurm's place for this task.

    Raises:
        SystemExit: it was not started by srun.
    """
    missing = [name for name in _FROM_SLURM.values() if name not in around]
    if missing:
        sys.exit(f"engines.slurm: expected to be started by Slurm's srun, which sets {missing[0]}")
    numbers = {name: around[source] for name, source in _FROM_SLURM.items()}
    # "8(x64)", or "2(x3),1": the nodes with as many tasks follow one another.
    counts: list[str] = []
    for part in around.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        tasks, _, times = part.partition("(x")
        counts += [tasks] * int(times.rstrip(")") or 1)
    node = int(around.get("SLURM_NODEID", "0"))
    if node < len(counts) and counts[node].isdecimal():
        numbers["LOCAL_SIZE"] = counts[node]
    return numbers


def main(argv: list[str]) -> None:
    """Run `argv`, a script or -m and a module with their arguments, in this process."""
    os.environ.update(read_rank_numbers(os.environ))
    os.execv(sys.executable, [sys.executable, "-u", *argv])


if __name__ == "__main__":
    main(sys.argv[1:])
