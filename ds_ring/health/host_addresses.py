"""Find which hosts the ranks are on, and the address at which all of them reach rank 0's host.

Owns no socket: `rendezvous.py` asks, the monitor process listens.
"""

from __future__ import annotations

import ipaddress
import os
import platform
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from ds_ring.health.store import Store

LOOPBACK = "127.0.0.1"


class Presence(NamedTuple):
    """Say where a rank is."""

    host: str  # equal on ranks that share the network interfaces of one host
    processes: str  # equal on ranks that see each other's process ids
    pid: int  # of the rank


def presence() -> Presence:
    """Return where this process is."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network, processes = (os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "pid"))
        return Presence(f"{boot}/{network}", f"{boot}/{processes}", os.getpid())
    except OSError:  # not Linux
        return Presence(platform.node(), platform.node(), os.getpid())


def listening_hosts(store: Store, presences: Sequence[Presence]) -> list[str]:
    """Choose where the monitor listens: loopback for one host, else the address that ranks know this host by.

    Args:
        store: of the process group; a TCPStore knows the name that every rank reached its host by.
        presences: of all ranks.

    Returns:
        One address of this host, and loopback for the ranks on it; or [""], every address, where none is
        known that all ranks reach.
    """
    if len({one.host for one in presences}) == 1:
        return [LOOPBACK]
    while (inner := getattr(store, "underlying_store", None)) is not None:  # of torch's PrefixStore
        store = inner
    name = getattr(store, "host", "")
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(name, None)} if name else set()
    except OSError:
        found = set()
    own = [address for address in _own_addresses() if address in found]
    reachable = [address for address in own if not ipaddress.ip_address(address).is_loopback]
    return [reachable[0], LOOPBACK] if reachable else [""]


def all_addresses() -> list[str]:
    """Return what this host may be reached by from others; fe80 is of one cable only."""
    outside = [a for a in _own_addresses() if not a.startswith(("127.", "::1", "fe80"))]
    return [LOOPBACK, *outside, socket.gethostname()]


def _own_addresses() -> list[str]:
    families = (socket.AF_INET, socket.AF_INET6)
    return [a.address for of in psutil.net_if_addrs().values() for a in of if a.family in families]
