"""`ds-ring launch`: from a cluster YAML to a run."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from .parsers import Commands, add_command

_EXAMPLE = """\
examples:
  ds-ring launch configs/quickstart.yaml                   train on this machine
  ds-ring launch configs/quickstart.yaml --dry-run         print the command as a shell script, start nothing
  ds-ring launch configs/quickstart.yaml -- --steps 300    more arguments for the script
  ds-ring launch cluster.yaml --node-rank 1                this is host 1 of a YAML with ssh: false
"""


def add(commands: Commands) -> None:
    """Declare the command."""
    launch = add_command(
        commands,
        "launch",
        help="start the script that a cluster YAML names, on the hosts that it names",
        description="Start a script on one or more hosts with an engine that exists already.",
        usage="ds-ring launch [-h] [--dry-run] [--node-rank N] CONFIG.yaml [-- SCRIPT_ARGS ...]",
        epilog=_EXAMPLE,
    )
    launch.add_argument("config", metavar="CONFIG.yaml", type=Path, help="the cluster YAML")
    launch.add_argument("--dry-run", action="store_true", help="print the command as a script, start nothing")
    launch.add_argument(
        "--node-rank", type=int, metavar="N", help="with ssh: false: which host this is, from 0"
    )
    launch.set_defaults(run=run)


def run(options: argparse.Namespace, extra_args: tuple[str, ...]) -> int:
    """Start the script and wait for it; its exit status."""
    from ds_ring_launcher import checks, engines, process
    from ds_ring_launcher.cluster_file import read_cluster
    from ds_ring_launcher.job import Job

    cluster = read_cluster(options.config)
    node_rank = checks.resolve_node_rank(cluster, options.node_rank)
    checks.require_inputs(cluster)
    port = checks.resolve_port(cluster, node_rank)
    caller = dict(os.environ)

    if options.dry_run:
        folder = Path(tempfile.gettempdir()) / f"ds-ring-{port}"
        print(engines.build(Job(cluster, node_rank, port, folder, caller, extra_args)).as_shell())
        return 0

    with tempfile.TemporaryDirectory(prefix="ds-ring-") as name:
        invocation = engines.build(Job(cluster, node_rank, port, Path(name), caller, extra_args))
        for program, advice in invocation.programs.items():
            checks.require_program(program, invocation.environment["PATH"], advice)
        hosts = "this machine" if cluster.is_local else ", ".join(host.name for host in cluster.hosts)
        what = f"{cluster.world_size} processes on {hosts} by {cluster.engine}, master port {port}"
        print(f"ds-ring: {what}", file=sys.stderr, flush=True)
        return process.run(invocation, caller, str(cluster.script))
