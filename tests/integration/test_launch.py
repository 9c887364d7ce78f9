"""`ds-ring launch` with the real engines: ranks meet, status and signals pass through, nobody stays behind.

The rank script is plain Python where no process group is needed: importing torch would be most of the time.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from ds_ring_launcher.ports import choose_free_port

DEADLINE_SECONDS = 120
DS_RING = [sys.executable, "-m", "ds_ring_launcher.cli", "launch"]

# Writes what it sees to rank-N.json beside itself; then does what its arguments say.
REPORT = """
import argparse, json, os, pathlib, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--deepspeed", action="store_true")
parser.add_argument("--deepspeed_config")
parser.add_argument("--fail-on", type=int, default=-1)
parser.add_argument("--sleep", action="store_true")
options = parser.parse_args()
rank = int(os.environ["RANK"])
seen = {"pid": os.getpid(), "options": vars(options), "environment": dict(os.environ)}
path = pathlib.Path(__file__).with_name(f"rank-{rank}.json")
path.with_suffix(".part").write_text(json.dumps(seen))
path.with_suffix(".part").rename(path)
print(f"rank {rank} reports", flush=True)
if rank == options.fail_on:
    while len(list(path.parent.glob("rank-*.json"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.05)
    sys.exit(17)
if options.sleep:
    time.sleep(600)
"""

# Sums the ranks over gloo, through the address and port that the launcher chose.
MEET = (
    REPORT
    + """
import torch
torch.distributed.init_process_group("gloo")
total = torch.tensor([rank + 1])
torch.distributed.all_reduce(total)
print(f"rank {rank} sums {total.item()}", flush=True)
torch.distributed.destroy_process_group()
"""
)

LOCAL = "hosts: local\nslots: 2\n"


@dataclass
class Workplace:
    """A folder with one YAML, and a mark that every process started from it bears."""

    folder: Path
    mark: str

    def write(self, text: str, script: str = REPORT, world_size: int = 2) -> Path:
        (self.folder / "train.py").write_text(script)
        section = {"sequence_parallel_size": world_size, "ring_attention": {"ring_size": world_size}}
        (self.folder / "ds.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, **section}))
        path = self.folder / "cluster.yaml"
        path.write_text(f"device: cpu\nscript: train.py\ndeepspeed_config: ds.json\n{text}")
        return path

    def start(self, command: list[str], **environment: str) -> subprocess.Popen[str]:
        variables = {**os.environ, "DS_RING_TEST_MARK": self.mark, **environment}
        return subprocess.Popen(
            command,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
        )

    def finish(self, started: subprocess.Popen[str]) -> tuple[int, str]:
        output, _ = started.communicate(timeout=DEADLINE_SECONDS)
        return started.returncode, output

    def launch(self, path: Path, *arguments: str) -> tuple[int, str]:
        return self.finish(self.start([*DS_RING, str(path), *arguments]))

    def report(self, rank: int) -> dict[str, dict[str, str]]:
        return json.loads((self.folder / f"rank-{rank}.json").read_text())

    def wait_for_reports(self, count: int) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while len(list(self.folder.glob("rank-*.json"))) < count:
            assert time.monotonic() < deadline, f"{count} ranks did not start within {DEADLINE_SECONDS} s"
            time.sleep(0.1)

    def left_behind(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("DS_RING_TEST_MARK") == self.mark and process.is_running():
                    found.append(process)
            except psutil.Error:
                continue
        return found


@pytest.fixture
def workplace(tmp_path: Path) -> Iterator[Workplace]:
    """Whatever the test does, its processes are ended; and having to end any is a failure."""
    place = Workplace(tmp_path, uuid.uuid4().hex)
    yield place
    left = place.left_behind()
    for process in left:
        process.kill()
    assert not left, f"left behind: {left}"


@pytest.fixture
def unused_port() -> int:
    return choose_free_port()


def require_engine(engine: str) -> None:
    own = Path(sys.executable).parent
    if engine == "mpirun" and shutil.which("mpirun", path=f"{own}{os.pathsep}{os.environ['PATH']}") is None:
        pytest.skip("no mpirun here: pip install 'ds_ring[mpi]' brings it")


@pytest.mark.parametrize("engine", ["deepspeed", "torchrun", "mpirun"])
def test_ranks_meet(workplace: Workplace, engine: str) -> None:
    require_engine(engine)
    path = workplace.write(f"engine: {engine}\n{LOCAL}environment: {{GREETING: it's 2 words}}\n", MEET)
    status, output = workplace.launch(path, "--", "--fail-on", "5")
    assert status == 0, output
    assert "rank 0 sums 3" in output and "rank 1 sums 3" in output
    for rank in (0, 1):
        environment, options = workplace.report(rank)["environment"], workplace.report(rank)["options"]
        assert environment["GREETING"] == "it's 2 words"
        assert (environment["DS_ACCELERATOR"], environment["OMP_NUM_THREADS"]) == ("cpu", "1")
        assert (environment["LOCAL_RANK"], environment["WORLD_SIZE"]) == (str(rank), "2")
        assert environment["MASTER_PORT"] != "29500"
        assert options["deepspeed"] is True
        assert options["deepspeed_config"] == str(workplace.folder / "ds.json")
        assert options["fail_on"] == 5


@pytest.mark.parametrize(("engine", "expected"), [("deepspeed", 17), ("torchrun", 1), ("mpirun", 17)])
def test_failing_rank_ends_the_run(workplace: Workplace, engine: str, expected: int) -> None:
    require_engine(engine)  # torchrun ends with 1 whatever the rank said
    path = workplace.write(f"engine: {engine}\n{LOCAL}")
    status, output = workplace.launch(path, "--", "--fail-on", "1", "--sleep")
    assert status == expected, output
    assert not workplace.left_behind()


@pytest.mark.parametrize("engine", ["deepspeed", "torchrun", "mpirun"])
def test_sigterm_ends_the_run(workplace: Workplace, engine: str) -> None:
    require_engine(engine)
    started = workplace.start([*DS_RING, str(workplace.write(f"engine: {engine}\n{LOCAL}")), "--", "--sleep"])
    workplace.wait_for_reports(2)
    started.send_signal(signal.SIGTERM)
    status, output = workplace.finish(started)
    assert status == 128 + signal.SIGTERM, output
    assert "got SIGTERM; ending all processes of this run" in output
    assert not workplace.left_behind()


@pytest.mark.parametrize("engine", ["deepspeed", "torchrun"])
def test_two_nodes_without_ssh(workplace: Workplace, engine: str, unused_port: int) -> None:
    hosts = "hosts: [{name: node-0, slots: 1}, {name: node-1, slots: 1}]\nssh: false\n"
    master = f"master_address: 127.0.0.1\nmaster_port: {unused_port}\n"
    path = workplace.write(f"engine: {engine}\n{hosts}{master}", MEET)
    nodes = [workplace.start([*DS_RING, str(path), "--node-rank", str(rank)]) for rank in (0, 1)]
    for rank, (status, output) in enumerate([workplace.finish(node) for node in nodes]):
        assert status == 0, output
        assert f"rank {rank} sums 3" in output


def test_dry_run_is_the_run(workplace: Workplace) -> None:
    path = workplace.write(LOCAL + "environment: {GREETING: it's 2 words}\n")
    planned = workplace.start([*DS_RING, str(path), "--dry-run"], TMPDIR=str(workplace.folder))
    status, script = workplace.finish(planned)
    assert status == 0, script
    assert not list(workplace.folder.glob("rank-*.json"))
    status, output = workplace.finish(workplace.start(["bash", "-c", script]))
    assert status == 0, output
    assert workplace.report(1)["environment"]["GREETING"] == "it's 2 words"


def test_visible_devices_reach_the_ranks(workplace: Workplace) -> None:
    path = workplace.write(LOCAL + "environment: {DS_ACCELERATOR: cpu}\n")
    path.write_text(path.read_text().replace("device: cpu", "device: auto"))
    status, output = workplace.finish(
        workplace.start([*DS_RING, str(path)], CUDA_VISIBLE_DEVICES="3,5", OMP_NUM_THREADS="1")
    )
    assert status == 0, output
    assert [workplace.report(rank)["environment"]["CUDA_VISIBLE_DEVICES"] for rank in (0, 1)] == [
        "3,5",
        "3,5",
    ]


# Stands in for pdsh: runs the command once for each host, here, in an environment that holds nothing else.
FAKE_PDSH = """#!{python}
import os, subprocess, sys
arguments = sys.argv[1:]
hosts = arguments[arguments.index("-w") + 1].split(",")
command = " ".join(arguments[arguments.index("-w") + 2 :])
kept = ("PATH", "HOME", "PYTHONPATH", "DS_RING_TEST_MARK")
clean = {{name: os.environ[name] for name in kept if name in os.environ}}
runs = [
    subprocess.Popen(["bash", "-c", command.replace("%n", str(index)).replace("%h", host)], env=clean)
    for index, host in enumerate(hosts)
]
sys.exit(max(run.wait() for run in runs))
"""
FAKE_SSH = "#!/bin/sh\necho 127.0.0.1\n"


def test_environment_crosses_to_other_hosts(workplace: Workplace) -> None:
    programs = workplace.folder / "programs"
    programs.mkdir()
    for name, text in {"pdsh": FAKE_PDSH.format(python=sys.executable), "ssh": FAKE_SSH}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(stat.S_IRWXU)
    hosts = "hosts: [{name: node-0, slots: 1}, {name: node-1, slots: 1}]\n"
    path = workplace.write(hosts + "environment: {GREETING: 'eth0,=lo:1'}\n", MEET)
    started = workplace.start([*DS_RING, str(path)], PATH=f"{programs}{os.pathsep}{os.environ['PATH']}")
    status, output = workplace.finish(started)
    assert status == 0, output
    assert "rank 0 sums 3" in output and "rank 1 sums 3" in output
    for rank in (0, 1):
        environment = workplace.report(rank)["environment"]
        assert environment["GREETING"] == "eth0,=lo:1"
        assert (environment["DS_ACCELERATOR"], environment["OMP_NUM_THREADS"]) == ("cpu", "1")
        assert "DS_ENV_FILE" not in environment  # it really went the way of the file


# Stands in for ssh under mpirun: drops the options and the host, and runs the rest here.
FAKE_AGENT = """#!/bin/bash
while [[ $1 == -* ]]; do [[ $1 == -p ]] && shift; shift; done
shift
kept=(PATH="$PATH" HOME="$HOME" PYTHONPATH="$PYTHONPATH" DS_RING_TEST_MARK="$DS_RING_TEST_MARK")
exec env -i "${kept[@]}" bash -c "$*"
"""


def test_mpirun_starts_other_hosts(workplace: Workplace) -> None:
    require_engine("mpirun")
    agent = workplace.folder / "agent"
    agent.write_text(FAKE_AGENT)
    agent.chmod(stat.S_IRWXU)
    hosts = "hosts: [{name: node-0, slots: 1}, {name: node-1, slots: 1}]\nssh_port: 2222\n"
    master = f"master_address: 127.0.0.1\nengine_args: [--prtemca, plm_ssh_agent, {agent}]\n"
    path = workplace.write(f"engine: mpirun\n{hosts}{master}environment: {{GREETING: it's 2 words}}\n", MEET)
    status, output = workplace.launch(path)
    assert status == 0, output
    assert "rank 0 sums 3" in output and "rank 1 sums 3" in output
    assert workplace.report(1)["environment"]["GREETING"] == "it's 2 words"
