"""Two hosts on one machine: network namespaces joined by a virtual cable, whose rate and life a test controls.

Owns the namespaces; what runs in them is started with `Hosts.start`. All traffic stays between the two.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import TracebackType

from tests.dist.rank_server import RANK_ENVIRONMENT
from tests.machine import run

ROOT = Path(__file__).resolve().parents[2]
PORT = 29400  # free: the namespaces are new
_numbers = itertools.count()


@cache
def why_not() -> str:
    """Why there can be no namespaces here; empty if there can."""
    if not (shutil.which("ip") and shutil.which("tc")):
        return "needs ip and tc (Debian's iproute2)"
    try:
        with two_hosts():
            return ""
    except OSError as error:
        return f"network namespaces are not allowed here: {error}"


class Hosts:
    """Namespaces, two or more; host n has the address 10.231.0.(n + 1). More than two share a bridge."""

    def __init__(self, count: int = 2) -> None:
        serial = f"{os.getpid()}x{next(_numbers)}"
        self.names = [f"ring{serial}{chr(ord('a') + number)}" for number in range(count)]
        self.devices = [f"ring{number}" for number in range(count)]
        self.switch = f"ring{serial}switch" if count > 2 else ""
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Hosts:
        try:
            for name in self.names:
                run("ip", "netns", "add", name)
            if self.switch:
                self._add_bridge()
            else:
                pair = ["type", "veth", "peer", "name", self.devices[1], "netns", self.names[1]]
                run("ip", "-n", self.names[0], "link", "add", self.devices[0], *pair)
            for number, (name, device) in enumerate(zip(self.names, self.devices, strict=True)):
                run("ip", "-n", name, "addr", "add", f"10.231.0.{number + 1}/24", "dev", device)
                run("ip", "-n", name, "link", "set", device, "up")
                run("ip", "-n", name, "link", "set", "lo", "up")
        except BaseException:
            self.close()
            raise
        return self

    def _add_bridge(self) -> None:
        run("ip", "netns", "add", self.switch)
        run("ip", "-n", self.switch, "link", "add", "bridge0", "type", "bridge")
        run("ip", "-n", self.switch, "link", "set", "bridge0", "up")
        for name, device in zip(self.names, self.devices, strict=True):
            pair = ["type", "veth", "peer", "name", device, "netns", self.switch]
            run("ip", "-n", name, "link", "add", device, *pair)
            run("ip", "-n", self.switch, "link", "set", device, "master", "bridge0", "up")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def limit(self, mbit: float) -> None:
        """The rate of the cable, in both directions, Mbit/s."""
        for name, device in zip(self.names, self.devices, strict=True):
            shape = ["tbf", "rate", f"{mbit}mbit", "burst", "128kb", "latency", "400ms"]
            run("tc", "-n", name, "qdisc", "replace", "dev", device, "root", *shape)

    def cut(self) -> None:
        """Pull the cable."""
        run("ip", "-n", self.names[0], "link", "set", self.devices[0], "down")

    def mend(self) -> None:
        """Put it back."""
        run("ip", "-n", self.names[0], "link", "set", self.devices[0], "up")

    def start(
        self, host: int, *arguments: str, log: Path, rank: int | None = None, world_size: int = 2
    ) -> subprocess.Popen[str]:
        """A Python process on a host, by default the only rank there; its output goes to a file."""
        environment = os.environ | RANK_ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
        environment |= {"GLOO_SOCKET_IFNAME": self.devices[host], "RANK": str(host if rank is None else rank)}
        environment |= {"MASTER_ADDR": "10.231.0.1", "MASTER_PORT": str(PORT), "LOCAL_RANK": "0"}
        environment |= {"WORLD_SIZE": str(world_size)}
        command = ["ip", "netns", "exec", self.names[host], sys.executable, *arguments]
        with open(log, "w") as file:
            process = subprocess.Popen(
                command, env=environment, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, text=True
            )
        self._processes.append(process)
        return process

    def signal(self, host: int, number: int) -> None:
        """Send a signal to everything that runs on a host."""
        listed = subprocess.run(["ip", "netns", "pids", self.names[host]], capture_output=True, text=True)
        for pid in listed.stdout.split():
            try:
                os.kill(int(pid), number)
            except ProcessLookupError:
                continue

    def close(self) -> None:
        """End all that runs here, and remove the namespaces."""
        for host in range(len(self.names)):
            self.signal(host, signal.SIGKILL)
        for process in self._processes:
            process.kill()
            process.wait()
        for name in (*self.names, *filter(None, [self.switch])):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Two hosts, removed at the end."""
    with Hosts() as hosts:
        yield hosts
