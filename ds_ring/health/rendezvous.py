"""Find the monitor process and join it, with nobody waiting for a rank that is dead.

Owns the start of the monitor, its address and the connection to it. How ranks look after each other until
then is `arrival.py`'s, at which address the monitor listens `host_addresses.py`'s, what a rank says once it
has joined `watch.py`'s.
"""

from __future__ import annotations

import json
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ds_ring.errors import RingConfigError, RingMeshError
from ds_ring.health.arrival import START_S, Arrival
from ds_ring.health.host_addresses import all_addresses, listening_hosts
from ds_ring.health.monitor import failure_detector, handshake
from ds_ring.health.store import Store
from ds_ring.health.watch import Watch

if TYPE_CHECKING:
    from ds_ring.health.first_collective import FirstCollective  # which imports torch

CONNECT_S = 2.0  # for one address of the monitor
HANDSHAKE_S = 5.0
JOIN_S = 60.0  # tries of all addresses together


# [Note: the secret]
# The handshake needs a secret that strangers do not know. A launcher hands one over (`secret`), and nothing
# that the store holds is of use to anybody. Without one rank 0 makes one and publishes it in the store: then
# whoever can read the store of the process group, which asks nobody for a password, can speak to the monitor.
class Address(NamedTuple):
    """Say where the monitor listens, and what holds for all ranks."""

    # port, hosts: hosts are tried in order
    port: int
    hosts: list[str]
    secret: str | None  # None where the launcher has handed one over
    heartbeat_timeout_s: float  # of rank 0, for all


def join(
    store: Store,
    rank: int,
    world_size: int,
    heartbeat_timeout_s: float,
    exit_after_s: float | None = None,
    secret: str | None = None,
    timeout_s: float = 1800.0,
    collective: FirstCollective | None = None,
) -> Watch:
    """Join the failure detector of this job; rank 0 starts it. All ranks must call it in the same order.

    Args:
        store: of the process group.
        rank, world_size: of the world.
        heartbeat_timeout_s: a rank that is silent for so long has failed; rank 0's holds.
        exit_after_s: of `Watch`.
        secret: what the launcher handed over, the same on all ranks; None without one.
        timeout_s: until every rank has come here.
        collective: of `Arrival`.

    Raises:
        PeerLost: a rank died, or did not come in time.
        RingConfigError: the secret is too short to be one.
        RingMeshError: the monitor did not start or cannot be reached, or not all ranks have a secret.
    """
    if secret is not None and len(secret.encode()) < handshake.SECRET_BYTES:
        raise RingConfigError(
            f"secret: expected at least {handshake.SECRET_BYTES} characters, got {len(secret)}; make one with"
            " `openssl rand -hex 32`, or let ds-ring launch make it"
        )
    name = f"ds_ring/watch/{store.add(f'ds_ring/watch/of/{rank}', 1)}"
    arrival = Arrival(store, name, rank, world_size, time.monotonic() + timeout_s, collective)
    arrival.announce()
    if rank == 0:
        arrival.wait_for_all()
        hosts = listening_hosts(store, arrival.presences())
        published = None if secret is not None else secrets.token_hex(32)
        port = start_monitor(hosts[0], world_size, heartbeat_timeout_s, secret or published or "")
        arrival.check()  # from here on the monitor would wait for the dead
        hosts = hosts[::-1] if hosts[0] else all_addresses()  # loopback first
        address = Address(port, hosts, published, heartbeat_timeout_s)
        store.set(f"{name}/monitor", json.dumps(address))
    else:
        address = Address(*json.loads(arrival.wait_for("monitor")))
    known = _secret_of(address, secret, rank)
    watch = Watch(rank, _connect(address, known, rank), 0, address.heartbeat_timeout_s, exit_after_s)
    arrival.end()
    return watch


def start_monitor(host: str, world_size: int, heartbeat_timeout_s: float, secret: str) -> int:
    """Start a monitor on this machine, as a process of its own that ends by itself; return its port.

    Args:
        host: the address to listen at; "" for every one.
        world_size, heartbeat_timeout_s, secret: of `join`.
    """
    command = [sys.executable, "-I", "-S", str(Path(failure_detector.__file__).parent)]
    settings = {"host": host, "world_size": world_size, "secret": secret}
    settings |= {"heartbeat_timeout_s": heartbeat_timeout_s}
    done = subprocess.run(
        command, input=json.dumps(settings) + "\n", capture_output=True, text=True, timeout=START_S
    )
    if done.returncode or not done.stdout.strip():
        raise RingMeshError(
            f"the monitor process did not start: expected a port, got exit code {done.returncode} and"
            f" {done.stderr.strip()[-500:]!r}; ds_ring must be able to start {sys.executable} on the host of"
            " rank 0"
        )
    return int(done.stdout)


def _secret_of(address: Address, mine: str | None, rank: int) -> bytes:
    """Return the job's secret; a rank that was given one speaks to nobody who has another."""
    if mine is not None and address.secret is None:
        return mine.encode()
    if mine is None and address.secret is not None:
        return address.secret.encode()
    has, other = ("none", "one") if mine is None else ("one", "none")
    raise RingMeshError(
        f"secret: expected every rank to get one from its launcher, or none, got {other} on rank 0 and {has}"
        f" on rank {rank}; start all hosts by one `ds-ring launch`, or set DS_RING_SECRET to one value on all"
    )


def _connect(address: Address, secret: bytes, rank: int) -> socket.socket:
    """Connect to the first host that answers as this job's monitor; try again while it may only be busy."""
    deadline, tried = time.monotonic() + JOIN_S, dict[str, str]()
    pause_s = 0.05
    while True:
        for host in dict.fromkeys(address.hosts):
            try:
                connection = socket.create_connection((host, address.port), timeout=CONNECT_S)
            except OSError as error:
                tried[host] = str(error)
                continue
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                handshake.authenticate(connection, secret, rank, HANDSHAKE_S)
                return connection
            except handshake.HandshakeError as error:
                tried[host] = f"another service: {error}"
            except OSError as error:
                tried[host] = str(error)
            connection.close()
        # Where every address refuses there is no monitor to wait for.
        refused = all("refused" in text or "another service" in text for text in tried.values())
        if refused or time.monotonic() > deadline:
            break
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 1.0)
    got = "; ".join(f"{host} ({text})" for host, text in tried.items())
    raise RingMeshError(
        f"the monitor process of rank 0 cannot be reached at port {address.port}: expected an answer from one"
        f" of its addresses, got {got}. Let the hosts of this job reach each other on all ports, as gloo and"
        " NCCL need it too"
    )
