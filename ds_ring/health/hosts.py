"""Find the addresses by which ranks of several hosts reach the monitor."""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING

from ds_ring.compat import require
from ds_ring.health.joining import LOOPBACK

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


def find_listening_hosts(store: Store) -> list[str]:
    """Choose where the monitor of several hosts listens: at the address that ranks know this host by.

    Args:
        store: of the process group; a TCPStore knows the name that every rank reached its host by.

    Returns:
        One address of this host, and loopback for the ranks on it; or [""], every address, where none is
        known that all ranks reach.
    """
    while (inner := getattr(store, "underlying_store", None)) is not None:  # of torch's PrefixStore
        store = inner
    name = getattr(store, "host", "")
    try:
        addresses = dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(name, None)) if name else {}
    except OSError:
        addresses = {}
    reachable = (
        address
        for address in addresses
        if not ipaddress.ip_address(address).is_loopback and _is_own_address(address)
    )
    address = next(reachable, "")
    return [address, LOOPBACK] if address else [""]


def find_addresses() -> list[str]:
    psutil = require("psutil", "a ring over several hosts, whose store does not know this host's name,")
    families = (socket.AF_INET, socket.AF_INET6)
    return [a.address for of in psutil.net_if_addrs().values() for a in of if a.family in families]


def _is_own_address(address: str) -> bool:
    """Return whether an interface of this host has the address: no other one can be bound."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
