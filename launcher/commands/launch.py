"""Start a run from a cluster YAML: `ds-ring launch`."""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from .parsers import Commands, add_command

if TYPE_CHECKING:
    from ds_ring_launcher.invocation import Invocation
    from ds_ring_launcher.job import Job

_HELP = "start the script that a cluster YAML names, on the hosts that it names"
_DESCRIPTION = "Start a script on one or more hosts with an engine that exists already."
_USAGE = "ds-ring launch [-h] [--dry-run] [--node-rank N] CONFIG.yaml [-- SCRIPT_ARGS ...]"
_EXAMPLE = """\
examples:
  ds-ring launch configs/quickstart.yaml                   train on this machine
  ds-ring launch configs/quickstart.yaml --dry-run         print the command as a shell script, start nothing
  ds-ring launch configs/quickstart.yaml -- --steps 300    more arguments for the script
  ds-ring launch cluster.yaml --node-rank 1                this is host 1 of a YAML with ssh: false
"""


def add(commands: Commands) -> None:
    """Add the command."""
    launch = add_command(commands, "launch", run, _HELP, _DESCRIPTION, _EXAMPLE, usage=_USAGE)
    launch.add_argument("config", metavar="CONFIG.yaml", type=Path, help="the cluster YAML")
    launch.add_argument("--dry-run", action="store_true", help="print the command as a script, start nothing")
    launch.add_argument(
        "--node-rank", type=int, metavar="N", help="with ssh: false: which host this is, from 0"
    )


def run(options: argparse.Namespace, extra_args: tuple[str, ...]) -> int:
    """Start the script, wait for it and return its exit status."""
    from ds_ring_launcher import checks, secret
    from ds_ring_launcher.cluster_file import read_cluster
    from ds_ring_launcher.job import Job

    cluster = read_cluster(options.config)
    node_rank = checks.resolve_node_rank(cluster, options.node_rank)
    checks.require_inputs(cluster)
    port = checks.resolve_port(cluster, node_rank)
    caller = dict(os.environ)
    told = secret.secret_for(cluster)

    if options.dry_run:
        # Named and not made: the script that is printed makes it.
        folder = Path(tempfile.gettempdir()) / f"ds-ring-{port}"
        _print(Job(cluster, node_rank, port, folder, caller, extra_args, told))
        return 0

    with tempfile.TemporaryDirectory(prefix="ds-ring-") as name:
        return _start(Job(cluster, node_rank, port, Path(name), caller, extra_args, told))


def _on_each_host(job: Job) -> dict[str, Invocation]:
    """Return what an agent on each host is told to run."""
    from ds_ring_launcher import agent, engines, remote

    variables = remote.carried(job.caller_environment)
    there = replace(job, folder=agent.FOLDER, caller_environment=variables)
    made = [engines.build(replace(there, node_rank=rank)) for rank in range(len(job.cluster.hosts))]
    return {
        host.name: replace(one, environment={**variables, **one.environment})
        for host, one in zip(job.cluster.hosts, made, strict=True)
    }


def _print(job: Job) -> None:
    """Print what would be run, as shell scripts."""
    from ds_ring_launcher import engines

    if not job.cluster.starts_agents:
        print(engines.build(job).as_shell())
        return
    for rank, host in enumerate(job.cluster.hosts):
        print(f"# on {host.name}, reached by ssh; beside this, one new DS_RING_SECRET for all hosts")
        print(f"{engines.build(replace(job, node_rank=rank, secret=None)).as_shell()}\n")


def _start(job: Job) -> int:
    from ds_ring_launcher import checks, engines, process, remote

    cluster = job.cluster
    hosts = "this machine" if cluster.is_local else ", ".join(host.name for host in cluster.hosts)
    said = f"{cluster.world_size} processes on {hosts} by {cluster.engine}, master port {job.port}"
    search_path = job.caller_environment.get("PATH", os.defpath)
    if cluster.starts_agents:
        checks.require_program("ssh", search_path, remote.SSH_ADVICE)
        invocations = _on_each_host(job)
        process.say(said)
        return remote.run(invocations, cluster.ssh_port, str(cluster.script))
    invocation = engines.build(job)
    for program, advice in invocation.programs.items():
        checks.require_program(program, invocation.environment["PATH"], advice)
    process.say(said)
    return process.run(invocation, job.caller_environment, str(cluster.script))
