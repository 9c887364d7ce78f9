"""Find out which hosts of a cluster can take part now: they answer, and they reach the host of rank 0.

Asks all hosts at once, through ssh or the engine's daemons (probe.py answers there). The first host that
answers is the master's; one that answers and does not reach it, because a cable is cut or an interface is
wrong, takes no part.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ds_ring.errors import RingError

from ..cluster.checks import require_program
from ..cluster.cluster import Cluster, Host
from .job import module_command
from .probe import MARK

_LAST_WORDS_SECONDS = 1.0
HOSTS_MISSING = 69  # sysexits.h's EX_UNAVAILABLE


class HostsMissing(RingError, RuntimeError):
    """Hosts of the YAML do not answer, or do not reach the master; the message names each, and why."""

    exit_status = HOSTS_MISSING


@dataclass(frozen=True)
class HostPresence:
    """List the hosts that take part, in the YAML's order, and why the others do not.

    Attributes:
        hosts: the first one is the master's.
        missing: host name -> one line.
        interfaces: host name -> the address by which it reaches the master, and that address's interface.
    """

    hosts: tuple[Host, ...]
    missing: dict[str, str] = field(default_factory=dict)
    interfaces: dict[str, tuple[str, str]] = field(default_factory=dict)


def ask_hosts(cluster: Cluster, seconds: float) -> HostPresence:
    """Return which hosts answer, and reach the first one that does.

    Args:
        cluster: whose hosts one call reaches.
        seconds: for all answers together.

    Raises:
        RingConfigError: the program that reaches hosts is not on PATH.
    """
    deadline = time.monotonic() + seconds
    hosts_asked = {
        host.name: AskedHost(cluster, host.name, "ds_ring_launcher.run.probe") for host in cluster.hosts
    }
    try:
        greetings = {name: asked_host.answer(deadline) for name, asked_host in hosts_asked.items()}
        missing = {
            name: hosts_asked[name].silence(seconds) for name, answer in greetings.items() if answer is None
        }
        present = [host for host in cluster.hosts if host.name not in missing]
        if not present:
            return HostPresence((), missing)
        master, interfaces = present[0].name, dict[str, tuple[str, str]]()
        address, port = get_master_address(cluster, master), (greetings[master] or {})["port"]
        most = max(min(5.0, seconds), 1.0)
        for host in present:
            hosts_asked[host.name].ask({"address": address, "port": port, "seconds": most})
        deadline = time.monotonic() + most + 2.0
        for host in present:
            answer = hosts_asked[host.name].answer(deadline) or {"reached": False, "why": "no answer"}
            if answer["reached"]:
                interfaces[host.name] = (answer["address"], answer["interface"])
            elif host.name != master:  # its own name may mean nothing to itself
                missing[host.name] = f"does not reach {master} at {address}: {answer['why']}"
        return HostPresence(tuple(host for host in present if host.name not in missing), missing, interfaces)
    finally:
        for asked_host in hosts_asked.values():
            asked_host.end()


def get_master_address(cluster: Cluster, name: str) -> str:
    """Return where rank 0 listens if the host `name` runs it; master_address is that of the first host."""
    first = cluster.hosts[0].name
    return cluster.master_address or first if name == first else name


class AskedHost:
    """Talk to a module on one host, which answers a line of JSON by another one.

    Args:
        cluster: how its hosts are reached.
        host: of its list.
        module: what runs there.
        here: the host is this machine, and needs nothing that reaches it.

    Raises:
        RingConfigError: what reaches hosts is not on PATH.
    """

    def __init__(self, cluster: Cluster, host: str, module: str, here: bool = False) -> None:
        command, advice = cluster.starter.reach(host, cluster.ssh_port, module)
        command = module_command(module) if here else command
        self._by = command[0]
        require_program(self._by, os.environ.get("PATH", os.defpath), advice)
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  closed by `end`
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            text=True, start_new_session=True,
        )  # fmt: skip
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def ask(self, question: dict[str, Any]) -> None:
        """Send a question; a missing host does not answer."""
        assert self._process.stdin is not None
        with suppress(OSError):
            print(json.dumps(question), file=self._process.stdin, flush=True)

    def answer(self, deadline: float) -> dict[str, Any] | None:
        """Return the next answer; None at the end of the output, or at the deadline."""
        while True:
            try:
                line = self._lines.get(timeout=max(deadline - time.monotonic(), 0.01))
                if not line:
                    return None
                # output of that host's shell comes before it, on the same line, too
                reply = json.loads(line.partition(MARK)[2])
            except queue.Empty:
                return None
            except ValueError:
                continue
            if isinstance(reply, dict):
                return reply

    def silence(self, seconds: float) -> str:
        """Return why there was no answer."""
        if not self._reader.is_alive():  # the end of its output comes a moment before its own
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_LAST_WORDS_SECONDS)
        status = self._process.poll()
        if status is None:
            return f"no lines within {seconds:g} s"
        self._errors.seek(0)
        lines = self._errors.read().splitlines() or ["it said nothing"]
        return f"{self._by} ended with status {status}: {lines[-1].strip()}"

    def end(self, patience_s: float = 0.0) -> None:
        """End it: by the end of its input, and after so many seconds by a signal."""
        assert self._process.stdin is not None
        with suppress(OSError):  # the last question could not be sent
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=patience_s)
        self._process.kill()
        self._process.wait()
        self._errors.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")
