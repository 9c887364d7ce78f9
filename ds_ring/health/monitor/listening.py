"""Open the monitor's ports, and make room for its connections."""

from __future__ import annotations

import resource
import socket

STRANGERS = 256  # connections that have not shaken hands, besides one for each rank
OTHER_FILES = 32  # descriptors of the process itself
BACKLOG = 4096  # newcomers in the kernel's queue
LOOPBACK = "127.0.0.1"
PORTS = 20  # tries


def raise_file_limit(world_size: int) -> int:
    """Raise this process's limit of open files; return the number of strangers that there is room for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * world_size + STRANGERS + OTHER_FILES
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    limit = max(limit, soft) if soft != resource.RLIM_INFINITY else wanted
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    strangers = limit - world_size - OTHER_FILES
    if strangers < 16:
        raise OSError(
            f"expected a limit of at least {world_size + OTHER_FILES + 16} open files for a process that"
            f" keeps a connection to each of {world_size} ranks, got a hard limit of {hard}; raise it on the"
            f" host of rank 0 (ulimit -Hn {wanted}, or LimitNOFILE= of the service that starts the job)"
        )
    return min(strangers, world_size + STRANGERS)


def listen_at(host: str) -> list[socket.socket]:
    """Open one port at one address of this host, and at loopback."""
    # Ranks of this host come by loopback, which works while the network does not. An empty `host` is every
    # address, of both families where there are both.
    if not host and socket.has_dualstack_ipv6():
        return [socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for _ in range(PORTS):
        listener = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        if not host or host == LOOPBACK:
            return [listener]
        try:
            port = listener.getsockname()[1]
            return [listener, socket.create_server((LOOPBACK, port), backlog=BACKLOG)]
        except OSError:  # another process has that port of loopback
            listener.close()
    raise OSError(f"expected a port that is free at {host} and {LOOPBACK}, got none in {PORTS} tries")
