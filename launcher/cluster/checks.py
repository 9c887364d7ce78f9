"""Check what must hold before anything is started: files, JSON, sizes, node rank, port, programs.

Looks at this machine only. What the YAML itself may say is cluster.py's.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import socket

from ds_ring.config.section import RingConfig
from ds_ring.errors import RingConfigError

from .cluster import Cluster
from .cluster_file import missing_file


def require_inputs(cluster: Cluster) -> None:
    """Raise unless the script is there and the DeepSpeed JSON fits the number of processes."""
    if not os.path.isfile(cluster.script):  # False for a name that no file can have, too
        raise RingConfigError(f"script: {missing_file(cluster.script, 'a Python file')}")
    RingConfig.from_deepspeed(cluster.deepspeed_config).validate_world(cluster.world_size)


def resolve_node_rank(cluster: Cluster, node_rank: int | None) -> int:
    """Return which host of the list this is; 0 where one call starts all of them."""
    count = len(cluster.hosts)
    if cluster.is_local or cluster.reaches_out:
        if node_rank is not None:
            what = "this machine alone" if cluster.is_local else "all hosts by ssh"
            raise RingConfigError(f"--node-rank: expected none, got {node_rank}; the YAML starts {what}")
        return 0
    if node_rank is None or not 0 <= node_rank < count:
        got = "none" if node_rank is None else str(node_rank)
        names = ", ".join(f"{index} on {host.name}" for index, host in enumerate(cluster.hosts))
        raise RingConfigError(f"--node-rank: expected 0 to {count - 1}, got {got}; without ssh, use {names}")
    return node_rank


def resolve_port(cluster: Cluster, node_rank: int) -> int:
    """Return the YAML's port, known to be free where the master is this machine, or one that is free here."""
    if cluster.master_port is None:
        # With a master elsewhere this is only a good guess: its ports cannot be checked from here.
        return choose_free_port()
    master_is_here = cluster.hosts[0].name in own_names() if cluster.reaches_out else node_rank == 0
    if master_is_here and not is_free(cluster.master_port):
        port = cluster.master_port
        raise RingConfigError.wrong(
            "master_port", f"{port} to be free", "a port in use", "end that run, or leave master_port out"
        )
    return cluster.master_port


def own_names() -> set[str]:
    """Return names of this machine. Names only: to look one up may wait for a name service."""
    name = socket.gethostname()
    return {"localhost", "127.0.0.1", "::1", name, name.split(".")[0]}


def require_program(name: str, search_path: str, advice: str) -> None:
    """Raise RingConfigError unless the program `name` is on `search_path`."""
    if shutil.which(name, path=search_path) is None:
        raise RingConfigError(f"expected the program {name} on PATH, got none; {advice}")


# Below the kernel's ephemeral range (32768 up), so that between our look and the engine's bind, seconds
# later, no outgoing connection and no bind to port 0 of another program takes it. DeepSpeed's and torchrun's
# default, 29500, is where everybody collides; it is left out.
_CANDIDATES = range(20000, 29500)
_ATTEMPTS = 200


def is_free(port: int) -> bool:
    """Return whether a server could listen on `port` now, on all interfaces as torch's store does."""
    for family in (socket.AF_INET, *([socket.AF_INET6] if socket.has_dualstack_ipv6() else [])):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one in TIME_WAIT can be listened on
            try:
                probe.bind(("", port))
                probe.listen(1)
            except OSError:
                return False
    return True


def choose_free_port() -> int:
    """Return a port that is free here, drawn at random so that two launches at once do not meet."""
    draw = random.SystemRandom()
    for _ in range(_ATTEMPTS):
        port = draw.choice(_CANDIDATES)
        if is_free(port):
            return port
    raise RingConfigError(
        f"expected a free port in {_CANDIDATES.start}-{_CANDIDATES.stop}, got none; set master_port"
    )


# The ranks of one launch authenticate their connections by a secret, new for each launch. It is an
# environment variable: inherited on this machine, sent to the standard input of an agent on another one. It
# never appears on a command line, in a file or in a log.


def secret_for(cluster: Cluster) -> str | None:
    """Return a new secret of 64 hex digits where one call starts all ranks, and otherwise None."""
    # Hosts that are started each by its own call have no channel on which to agree: who wants a secret there
    # exports the same DS_RING_SECRET on every host, and the ranks inherit it.
    # 32 bytes, so that it cannot be guessed from one answer of the handshake.
    return secrets.token_hex(32) if cluster.is_local or cluster.reaches_out else None
