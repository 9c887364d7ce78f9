"""Start a run from a cluster YAML: `ds-ring launch`."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from .parsers import Commands, add_command

if TYPE_CHECKING:
    from ..cluster.cluster import Cluster
    from ..run.job import Job

_HELP = "start the script that a cluster YAML names, on the hosts that it names"
_DESCRIPTION = "Start a script on one or more hosts with an engine that exists already."
_USAGE = (
    "ds-ring launch [-h] [--dry-run] [--sbatch] [--verbose] [--node-rank N] CONFIG.yaml [-- SCRIPT_ARGS ...]"
)
_EXAMPLE = """\
examples:
  ds-ring launch configs/quickstart.yaml                   train on this machine
  ds-ring launch configs/quickstart.yaml --dry-run         print the command as a shell script, start nothing
  ds-ring launch configs/quickstart.yaml -- --steps 300    more arguments for the script
  ds-ring launch cluster.yaml --sbatch > job.sh            a script for Slurm, if the YAML has engine: slurm
  ds-ring launch cluster.yaml --node-rank 1                this is host 1 of a YAML with ssh: false
"""


def add(commands: Commands) -> None:
    """Add the command."""
    launch = add_command(commands, "launch", run, _HELP, _DESCRIPTION, _EXAMPLE, usage=_USAGE)
    launch.add_argument("config", metavar="CONFIG.yaml", type=Path, help="the cluster YAML")
    launch.add_argument("--dry-run", action="store_true", help="print the command as a script, start nothing")
    launch.add_argument(
        "--sbatch",
        action="store_true",
        help="engine slurm: print a script for sbatch, and make the run_folder that its log goes to",
    )
    launch.add_argument("--verbose", action="store_true", help="what the engine prints of its own, too")
    launch.add_argument(
        "--node-rank", type=int, metavar="N", help="with ssh: false: which host this is, from 0"
    )


def run(options: argparse.Namespace, extra_args: tuple[str, ...]) -> int:
    """Start the script, wait for it and return its exit status."""
    from ..cluster import checks
    from ..cluster.cluster_file import read_cluster
    from ..run import process, relaunch
    from ..run.job import FOLDER, Job, open_standard_streams, raise_file_limit
    from ..run.start import start

    cluster = read_cluster(options.config)
    node_rank = checks.resolve_node_rank(cluster, options.node_rank)
    checks.require_inputs(cluster)
    port = checks.resolve_port(cluster, node_rank)
    if options.sbatch:
        return _print_sbatch(cluster, options.config, extra_args)
    caller = dict(os.environ)
    told = checks.secret_for(cluster)

    if options.dry_run:
        attempt = None if cluster.run_folder is None else cluster.run_folder / "attempt-1"
        _print(Job(cluster, node_rank, port, FOLDER, caller, extra_args, told, attempt))
        return 0

    raise_file_limit()
    open_standard_streams()
    job = Job(cluster, node_rank, port, FOLDER, caller, extra_args, told, verbose=options.verbose)
    if cluster.run_folder is not None:
        return relaunch.run(job)
    with process.signals_noted() as signals:
        return start(job, signals)


def _print_sbatch(cluster: Cluster, config: Path, extra_args: tuple[str, ...]) -> int:
    from ds_ring.errors import RingConfigError

    script = cluster.starter.batch_script(cluster, config, extra_args)
    if script is None:
        raise RingConfigError(f"--sbatch: expected engine: slurm in the YAML, got {cluster.engine}; set it")
    if cluster.run_folder is not None:  # Slurm fails a job whose log has no folder, without a word
        cluster.run_folder.mkdir(parents=True, exist_ok=True)
    print(script, end="")
    return 0


def _print(job: Job) -> None:
    """Print what would be run, as shell scripts."""
    engine = job.cluster.starter
    if not job.cluster.starts_agents:
        print(engine.invocation(job).as_shell())
        return
    for rank, host in enumerate(job.cluster.hosts):
        print(f"# on {host.name}, reached by ssh; beside this, one new DS_RING_SECRET for all hosts")
        print(f"{engine.invocation(replace(job, node_rank=rank, secret=None)).as_shell()}\n")
