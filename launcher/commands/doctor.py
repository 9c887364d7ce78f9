"""Examine hosts, network and ring before a run: `ds-ring doctor`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from .parsers import Commands, add_command, add_json, print_json, refuse_extra

if TYPE_CHECKING:
    from ..doctor.findings import Finding
    from ..run.job import Job

_HELP = "examine hosts, network and ring before a run, and name what is wrong"
_DESCRIPTION = "Examine every host of a cluster YAML, then run a small ring on it that proves that it is one."
_EXAMPLE = """\
examples:
  ds-ring doctor                                 this machine, with a ring of two
  ds-ring doctor cluster.yaml                    all hosts of a YAML, and a ring of all its ranks
  ds-ring doctor cluster.yaml --node-rank 1      with ssh: false: call it on every host at the same time
  ds-ring doctor cluster.yaml --no-ring --json   hosts alone, for a script

exit status: 0 nothing is wrong, 1 something is (its line says what, and what to do), 2 wrong input
"""
HOST_SECONDS, DEFAULT_SECONDS = 20.0, 300.0


def add(commands: Commands) -> None:
    """Add the command."""
    doctor = add_command(commands, "doctor", run, _HELP, _DESCRIPTION, _EXAMPLE)
    doctor.add_argument("config", metavar="CONFIG.yaml", type=Path, nargs="?", help="the cluster YAML")
    doctor.add_argument(
        "--node-rank", type=int, metavar="N", help="with ssh: false: which host this is, from 0"
    )
    doctor.add_argument(
        "--host-seconds", type=float, default=HOST_SECONDS, metavar="S", help="a host's time to answer (20)"
    )
    doctor.add_argument("--no-ring", action="store_true", help="examine hosts only, start no ranks")
    doctor.add_argument(
        "--seconds", type=float, default=DEFAULT_SECONDS, metavar="S", help="the ring's deadline (300)"
    )
    add_json(doctor)


def run(options: argparse.Namespace, extra_args: tuple[str, ...]) -> int:
    """Print a table of findings; return 1 where something is wrong."""
    from ..cluster import checks
    from ..cluster.cluster_file import read_cluster
    from ..doctor import hosts as doctor_hosts
    from ..doctor.findings import WRONG, judge_hosts, own_machine, ring_findings
    from ..run.job import Job

    refuse_extra("doctor", extra_args)
    with tempfile.TemporaryDirectory(prefix="ds-ring-") as name:
        folder = Path(name)
        cluster = read_cluster(options.config or own_machine(folder))
        node_rank = checks.resolve_node_rank(cluster, options.node_rank)
        port = cluster.master_port or checks.resolve_port(cluster, node_rank)
        job = Job(cluster, node_rank, port, folder, dict(os.environ))
        findings = judge_hosts(cluster, doctor_hosts.ask(job, options.host_seconds))
        if not options.no_ring:
            findings += ring_findings(job, findings, options.seconds)
    _show(findings, job, options.json)
    return int(any(finding.state == WRONG for finding in findings))


def _show(findings: list[Finding], job: Job, as_json: bool) -> None:
    if as_json:
        print_json({"findings": [finding._asdict() for finding in findings]})
        return
    from rich.table import Table

    from ..run.process import counted
    from ..tables import console

    cluster = job.cluster
    hosts = "this machine" if cluster.is_local else counted(len(cluster.hosts), "host", "hosts")
    ranks = counted(cluster.world_size, "rank", "ranks")
    table = Table(title=f"{ranks} on {hosts} by {cluster.engine}")
    for column in ("what", "state", "says"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        table.add_row(*finding)
    console().print(table)
    sys.stdout.flush()
