"""Two hosts that are reached by ssh, and a login node: namespaces, OpenSSH's own server on each host.

Owns the servers, their keys and the login node's cables; the hosts' own cable is `namespaces.py`'s.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.dist.namespaces import Hosts, run

ADDRESSES = ("10.231.0.1", "10.231.0.2")
_LOGIN = "10.231.0.3"
_READY_SECONDS = 10.0
_SEARCH_PATH = f"/usr/sbin:{os.environ.get('PATH', os.defpath)}"
_SERVER = """\
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
StrictModes no
UsePAM no
PidFile none
SetEnv {variable}
"""
_CLIENT = """\
IdentityFile {folder}/user
IdentitiesOnly yes
UserKnownHostsFile {folder}/known
StrictHostKeyChecking accept-new
LogLevel ERROR
"""


def why_no_sshd() -> str:
    """Why there can be no servers here; empty if there can."""
    missing = [
        name for name in ("sshd", "ssh", "ssh-keygen") if shutil.which(name, path=_SEARCH_PATH) is None
    ]
    return f"needs {', '.join(missing)} (Debian's openssh-server)" if missing else ""


class SshHosts(Hosts):
    """Two namespaces with a server each, and a third one from which both are reached.

    Attributes:
        programs: a folder for the front of PATH, whose `ssh` knows the hosts and has their key.
    """

    def __init__(self, folder: Path, variable: str) -> None:
        super().__init__()
        self.login = self.names[0][:-1] + "l"
        self.programs, self._folder, self._variable = folder / "bin", folder, variable

    def __enter__(self) -> SshHosts:
        super().__enter__()
        try:
            self._lay_cables()
            self._write_files()
            server = shutil.which("sshd", path=_SEARCH_PATH)
            Path("/run/sshd").mkdir(exist_ok=True)  # it does not start without
            for name in self.names:
                command = [
                    "ip", "netns", "exec", name, server, "-D", "-e", "-f", str(self._folder / "server"),
                ]  # fmt: skip
                with open(self._folder / f"{name}.log", "w") as log:
                    self._processes.append(subprocess.Popen(command, stdout=log, stderr=log, text=True))
            self._wait()
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """End what runs on the hosts, and remove them."""
        super().close()
        subprocess.run(["ip", "netns", "del", self.login], capture_output=True)

    def _lay_cables(self) -> None:
        run("ip", "netns", "add", self.login)
        run("ip", "-n", self.login, "link", "set", "lo", "up")
        for number, (name, address) in enumerate(zip(self.names, ADDRESSES, strict=True)):
            here, there = f"host{number}", "login"
            run(
                "ip",
                "-n",
                self.login,
                "link",
                "add",
                here,
                "type",
                "veth",
                "peer",
                "name",
                there,
                "netns",
                name,
            )
            run("ip", "-n", self.login, "addr", "add", f"{_LOGIN}/32", "dev", here)
            run("ip", "-n", self.login, "link", "set", here, "up")
            run("ip", "-n", name, "link", "set", there, "up")
            run("ip", "-n", self.login, "route", "add", f"{address}/32", "dev", here, "src", _LOGIN)
            run("ip", "-n", name, "route", "add", f"{_LOGIN}/32", "dev", there, "src", address)

    def _write_files(self) -> None:
        for key in ("host", "user"):
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self._folder / key))
        (self._folder / "server").write_text(_SERVER.format(folder=self._folder, variable=self._variable))
        (self._folder / "client").write_text(_CLIENT.format(folder=self._folder))
        self.programs.mkdir()
        program = self.programs / "ssh"
        program.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self._folder}/client "$@"\n')
        program.chmod(stat.S_IRWXU)

    def _wait(self) -> None:
        deadline = time.monotonic() + _READY_SECONDS
        for address in ADDRESSES:
            command = ["ip", "netns", "exec", self.login, str(self.programs / "ssh"), address, "true"]
            while subprocess.run(command, capture_output=True).returncode:
                if time.monotonic() > deadline:
                    logs = "".join((self._folder / f"{name}.log").read_text() for name in self.names)
                    raise OSError(f"{address} does not answer by ssh: {logs[-500:]}")
                time.sleep(0.05)


@contextmanager
def ssh_hosts(variable: str) -> Iterator[SshHosts]:
    """Two hosts with a login node; what ssh starts there has a variable, NAME=VALUE. Removed at the end."""
    with tempfile.TemporaryDirectory(prefix="ssh-") as folder, SshHosts(Path(folder), variable) as hosts:
        yield hosts
