"""A Slurm of two nodes on one machine: Debian's own daemons, a slurmd in each of two network namespaces.

Owns the daemons and their folder. Jobs are submitted with `SlurmCluster.command`, from the first host; all
of it is ended with the cluster.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from tests.dist import namespaces
from tests.dist.namespaces import Hosts, two_hosts

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
NODES = ("10.231.0.1", "10.231.0.2")  # names, too: one cluster YAML serves every engine
SLOTS = 2
_READY_SECONDS = 20.0
_PATH = f"/usr/sbin:{os.environ.get('PATH', os.defpath)}"
_CONF = """\
ClusterName=ring
SlurmctldHost={name}({nodes[0]})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
KillWait=5
MinJobAge=300
SchedulerParameters=sched_interval=2,bf_interval=2
NodeName={nodes[0]} NodeAddr={nodes[0]} CPUs={slots}
NodeName={nodes[1]} NodeAddr={nodes[1]} CPUs={slots}
NodeName=gpu[0-7] NodeAddr={nodes[1]} Port=7000 CPUs=8 State=DOWN
TopologyPlugin=topology/tree
PartitionName=all Nodes={nodes[0]},{nodes[1]} Default=YES State=UP MaxTime=INFINITE
"""
# gpu0 to gpu7 are not there; Slurm knows their switches all the same.
_TOPOLOGY = """\
SwitchName=leaf0 Nodes=gpu[0,3,5-6],{nodes[0]}
SwitchName=leaf1 Nodes=gpu[1-2,4,7],{nodes[1]}
SwitchName=spine Switches=leaf[0-1]
"""


@cache
def why_not() -> str:
    """Why there can be no Slurm here; empty if there can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
    if missing:
        return f"needs {', '.join(missing)} (Debian's slurmctld, slurmd, slurm-client and munge)"
    if namespaces.why_not():
        return namespaces.why_not()
    try:
        with two_hosts() as hosts, slurm_on(hosts):
            return ""
    except OSError as error:
        return f"Slurm does not start here: {error}"


class SlurmCluster:
    """Daemons on two hosts, whose nodes have two processors each."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self._hosts, self.folder = hosts, folder
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _PATH}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the daemons, and wait until both nodes are idle.

        Raises:
            OSError: they are not, after 20 s.
        """
        folder = self.folder
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir()
        name = socket.gethostname().split(".")[0]
        text = _CONF.format(name=name, nodes=NODES, folder=folder, slots=SLOTS)
        (folder / "slurm.conf").write_text(text)
        (folder / "topology.conf").write_text(_TOPOLOGY.format(nodes=NODES))
        (folder / "munge.key").write_bytes(os.urandom(64))
        (folder / "munge.key").chmod(0o400)
        files = [
            f"--{what}={folder}/munge.{what.split('-')[0]}" for what in ("socket", "key-file", "pid-file")
        ]
        files += [f"--{what}={folder}/munge.{what.split('-')[0]}" for what in ("log-file", "seed-file")]
        self._daemon("munged", "--foreground", "--force", *files)
        self._daemon(*self._on(0), "slurmctld", "-D", "-c")
        for number, node in enumerate(NODES):
            self._daemon(*self._on(number), "slurmd", "-D", "-N", node)
        deadline = time.monotonic() + _READY_SECONDS
        while (said := self.ask("sinfo", "--noheader", "-p", "all", "-o", "%D %T")) != f"{len(NODES)} idle":
            if time.monotonic() > deadline:
                raise OSError(f"the nodes are not idle: {said!r}; {self._last_words()}")
            time.sleep(0.1)

    def command(self, *command: str) -> list[str]:
        """Return a command line that runs a command on the first host, outside of any job."""
        return [*self._on(0), *command]

    def allocate(self) -> str:
        """Take both nodes for a job without a process; return its number."""
        said = self.ask("salloc", f"--nodes={len(NODES)}", "--exclusive", "--no-shell")
        return said.rsplit(maxsplit=1)[-1]

    def ask(self, *command: str) -> str:
        """Return what a command of Slurm prints, errors included."""
        done = subprocess.run(
            self.command(*command), env={**os.environ, **self.environment}, capture_output=True, text=True,
            timeout=30,
        )  # fmt: skip
        return (done.stdout + done.stderr).strip()

    def close(self) -> None:
        """End all jobs, the daemons, and whatever they have started."""
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()
        for host in range(len(NODES)):  # slurmd's children outlive it
            self._hosts.signal(host, signal.SIGKILL)

    def _on(self, host: int) -> list[str]:
        # Not `ip netns exec`, which hides /sys/fs/cgroup; slurmd wants to see it.
        return ["nsenter", f"--net=/run/netns/{self._hosts.names[host]}"]

    def _daemon(self, *command: str) -> None:
        with open(self.folder / "daemons.log", "ab") as log:
            self._daemons.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, **self.environment},
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )

    def _last_words(self) -> str:
        lines = (self.folder / "daemons.log").read_text(errors="replace").splitlines()
        return " / ".join([line for line in lines if "error" in line][-3:])


@contextmanager
def slurm_on(hosts: Hosts) -> Iterator[SlurmCluster]:
    """A Slurm on two hosts, ended at the end."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        cluster = SlurmCluster(hosts, Path(folder))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.close()
