"""Answer for a host before a run is started there: its addresses, and whether it reaches the master.

Run on every host by presence.py, through ssh. Standard input and output carry one line of JSON at a time; it
ends with its input. Imports the standard library and psutil.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterable
from typing import Any

import psutil

LOOPBACK = "lo"
MARK = "ds-ring-answer: "


def main() -> None:
    """Listen on a free port and print it, then connect to the address of the next line."""
    # IPv6's wildcard takes IPv4 connections, too.
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=family == socket.AF_INET6) as server:
        answer({"host": os.uname().nodename, "port": server.getsockname()[1], "addresses": addresses()})
        for line in sys.stdin:
            question = json.loads(line)
            answer(_connect(question["address"], int(question["port"]), float(question["seconds"])))


def addresses() -> dict[str, list[str]]:
    """Return the addresses of this host's interfaces, loopback left out."""
    interfaces = {}
    for name, entries in psutil.net_if_addrs().items():
        mine = internet_addresses(entries)
        if mine and name != LOOPBACK:
            interfaces[name] = mine
    return interfaces


def internet_addresses(entries: Iterable[Any]) -> list[str]:
    """Return the IPv4 and IPv6 addresses among psutil's entries of an interface."""
    return [str(entry.address) for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]


def interface_to(address: str) -> str | None:
    """Return the interface by which this host would reach an address; None for loopback, or if it cannot."""
    try:
        _, name = way_to(address)
    except OSError:
        return None
    return None if name == LOOPBACK else name


def way_to(address: str) -> tuple[str, str]:
    """Return the own address and interface by which this host would reach an address.

    Raises:
        OSError: it cannot, or the name is not known.
    """
    family, kind, protocol, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as route:
        route.connect(target)  # of a datagram socket: looks the route up, sends nothing
        address_here = str(route.getsockname()[0])
    return address_here, _find_interface(address_here)


def _find_interface(address: str) -> str:
    return next((name for name, mine in addresses().items() if address in mine), LOOPBACK)


def _connect(address: str, port: int, seconds: float) -> dict[str, Any]:
    """Return by which own address and interface the master is reached, or why it is not."""
    try:
        with socket.create_connection((address, port), timeout=seconds) as connection:
            address_here = str(connection.getsockname()[0]).removeprefix("::ffff:")
    except OSError as error:
        return {"reached": False, "why": str(error.strerror or error)}
    return {"reached": True, "address": address_here, "interface": _find_interface(address_here)}


def answer(values: dict[str, Any]) -> None:
    """Print an answer to ds-ring on another host: marked, since a shell there may print lines of its own."""
    print(f"{MARK}{json.dumps(values)}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except (BrokenPipeError, KeyboardInterrupt):
        sys.exit(1)
