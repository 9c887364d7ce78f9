"""`ds-ring doctor` on two hosts that one call reaches: by ssh from a login node, and under Slurm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_ring_launcher.doctor.findings import OK, WRONG
from tests.dist.namespaces import two_hosts
from tests.dist.slurm_cluster import NODES, slurm_on
from tests.dist.ssh_hosts import ssh_hosts
from tests.integration.test_doctor import write

HOSTS = [{"name": node, "slots": 1} for node in NODES]
RING = {"sequence_parallel_size": 2}


def doctor(
    prefix: list[str], environment: dict[str, str], path: Path, *more: str
) -> tuple[int, dict[str, dict[str, Any]]]:
    command = [*prefix, sys.executable, "-m", "ds_ring_launcher.cli", "doctor", str(path), "--json", *more]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env={**os.environ, **environment}
    )
    assert done.stdout, done.stderr
    return done.returncode, {one["what"]: one for one in json.loads(done.stdout)["findings"]}


@pytest.mark.parametrize("case", ["healthy", "slow cable", "gone"])
@pytest.mark.needs("sshd")
@pytest.mark.alone
@pytest.mark.night
@pytest.mark.night
def test_hosts_that_ssh_reaches(tmp_path: Path, case: str) -> None:
    """All is well where hosts' own names are loopback's: with a run_folder ranks choose the interface."""
    path = write(tmp_path, hosts=HOSTS, run_folder="run", top=RING)
    with ssh_hosts("OMP_NUM_THREADS=1") as hosts:
        prefix = ["ip", "netns", "exec", hosts.login]
        environment = {"PATH": f"{hosts.programs}{os.pathsep}{os.environ['PATH']}"}
        if case == "slow cable":
            hosts.limit(100)
        if case == "gone":
            hosts.signal(1, signal.SIGKILL)
        status, found = doctor(prefix, environment, path)
    if case == "healthy":
        assert status == 0 and {one["state"] for one in found.values()} == {OK}, found
    elif case == "slow cable":
        assert status == 1 and "slow link rank" in found["links"]["says"], found
    else:
        assert status == 1 and found["hosts"]["state"] == WRONG, found
        assert f"{NODES[1]}: ssh ended with status 255" in found["hosts"]["says"], found


@pytest.mark.needs("slurm")
@pytest.mark.alone
@pytest.mark.night
def test_hosts_of_an_allocation(tmp_path: Path) -> None:
    path = write(tmp_path, engine="slurm", hosts=HOSTS, run_folder="run", top=RING)
    with two_hosts() as hosts, slurm_on(hosts) as slurm:
        environment = {**slurm.environment, "SLURM_JOB_ID": slurm.allocate()}
        status, found = doctor(slurm.command(), environment, path)
        assert status == 0 and {one["state"] for one in found.values()} == {OK}, found
