"""Order the hosts of a job so that neighbours in the ring share a switch, as Slurm knows its network.

Owns the order alone. Ranks of one host are neighbours already, since they follow one another.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping, Sequence

from ..run.process import say
from .cluster import Cluster, Host

_SWITCH = re.compile(
    r"^SwitchName=(?P<name>\S+) Level=(?P<level>\d+) .*?\bNodes=(?P<nodes>\S+)", re.MULTILINE
)
_SECONDS = 30


def placed(cluster: Cluster, environment: Mapping[str, str]) -> Cluster:
    """Return the cluster with its hosts in the order of their switches, where Slurm knows those.

    The first host stays the first one: it is the master.
    """
    if cluster.engine != "slurm" or "SLURM_JOB_ID" not in environment or len(cluster.hosts) < 3:
        return cluster
    hosts = by_switch(cluster.hosts, switches_of(_scontrol("topology"), _names_in))
    if hosts == cluster.hosts:
        return cluster
    say(f"hosts in the order of Slurm's switches: {', '.join(host.name for host in hosts)}")
    return cluster.model_copy(update={"hosts": hosts})


def by_switch(hosts: Sequence[Host], switches: Mapping[str, Sequence[str]]) -> tuple[Host, ...]:
    """Return hosts of one switch side by side, else as they were.

    Args:
        hosts: in the order of the YAML.
        switches: host name -> its switches, from the top of the tree down to its leaf.
    """
    first: dict[tuple[str, ...], int] = {}  # a switch stands where its first host did
    ways = [tuple(switches.get(host.name, ())) for host in hosts]
    for index, way in enumerate(ways):
        for depth in range(1, len(way) + 1):
            first.setdefault(way[:depth], index)

    def place(index: int) -> tuple[int, ...]:
        way = ways[index]
        return (*(first[way[:depth]] for depth in range(1, len(way) + 1)), index)

    return tuple(hosts[index] for index in sorted(range(len(hosts)), key=place))


def switches_of(told: str, names_in: Callable[[str], Sequence[str]]) -> dict[str, list[str]]:
    """Return each host's switches, top first, of what `scontrol show topology` prints.

    Args:
        told: a line for each switch; none where Slurm has no topology.
        names_in: returns the names of a host list such as gpu[0-3].
    """
    found: dict[str, list[str]] = {}
    for switch in sorted(_SWITCH.finditer(told), key=lambda one: -int(one["level"])):
        for name in names_in(switch["nodes"]):
            found.setdefault(name, []).append(switch["name"])
    return found


def _names_in(nodes: str) -> list[str]:
    return _scontrol("hostnames", nodes).split()


def _scontrol(*what: str) -> str:
    """Return what it prints; nothing where it has nothing to show, or is not there."""
    try:
        done = subprocess.run(["scontrol", "show", *what], capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
