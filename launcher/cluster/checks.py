"""Check what must hold before anything is started: files, JSON, sizes, node rank, port, programs.

Looks at this machine only. What the YAML itself may say is cluster.py's.
"""

from __future__ import annotations

import shutil
import socket

from ds_ring.config.json_text import is_file
from ds_ring.config.section import RingConfig
from ds_ring.errors import RingConfigError

from . import ports
from .cluster import Cluster
from .yaml_file import missing_file


def require_inputs(cluster: Cluster) -> None:
    """Raise unless the script is there and the DeepSpeed JSON fits the number of processes."""
    if not is_file(cluster.script):
        raise RingConfigError(f"script: {missing_file(cluster.script, 'a Python file')}")
    RingConfig.from_deepspeed(cluster.deepspeed_config).validate_world(cluster.world_size)


def resolve_node_rank(cluster: Cluster, given: int | None) -> int:
    """Return which host of the list this is; 0 where one call starts all of them."""
    count = len(cluster.hosts)
    if cluster.is_local or cluster.reaches_out:
        if given is not None:
            what = "this machine alone" if cluster.is_local else "all hosts by ssh"
            raise RingConfigError(f"--node-rank: expected none, got {given}; the YAML starts {what}")
        return 0
    if given is None or not 0 <= given < count:
        got = "none" if given is None else str(given)
        names = ", ".join(f"{index} on {host.name}" for index, host in enumerate(cluster.hosts))
        raise RingConfigError(
            f"--node-rank: expected 0 to {count - 1}, got {got}; with ssh: false, use {names}"
        )
    return given


def resolve_port(cluster: Cluster, node_rank: int) -> int:
    """Return the YAML's port, known to be free where the master is this machine, or one that is free here."""
    if cluster.master_port is None:
        # With a master elsewhere this is only a good guess: nobody can ask its ports from here.
        return ports.choose_free_port()
    if _master_is_here(cluster, node_rank):
        ports.require_free(cluster.master_port)
    return cluster.master_port


def _master_is_here(cluster: Cluster, node_rank: int) -> bool:
    if cluster.reaches_out:
        # Names only: to look a host up may wait for a name service.
        own_names = {"localhost", "127.0.0.1", socket.gethostname(), socket.gethostname().split(".")[0]}
        return cluster.hosts[0].name in own_names
    return node_rank == 0


def require_program(name: str, search_path: str, advice: str) -> None:
    """Raise RingConfigError unless the program `name` is on `search_path`."""
    if shutil.which(name, path=search_path) is None:
        raise RingConfigError(f"expected the program {name} on PATH, got none; {advice}")
