"""`ds-ring launch` with the real engines: ranks meet, status and signals pass through, nobody stays behind.

The rank script is plain Python where no process group is needed: importing torch would be most of the time.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml

from ds_ring_launcher.cluster.checks import choose_free_port
from tests.clock import wait_until
from tests.documents import SMALL_RUN, changed

DEADLINE_SECONDS = 120
DS_RING = [sys.executable, "-m", "ds_ring_launcher.cli", "launch"]

# Writes what it sees to rank-N.json beside itself; then does what its arguments say.
REPORT = """
import argparse, json, os, pathlib, signal, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--deepspeed", action="store_true")
parser.add_argument("--deepspeed_config")
parser.add_argument("--fail-on", type=int, default=-1)
parser.add_argument("--sleep", action="store_true")
parser.add_argument("--handler-seconds", type=float)
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
if options.handler_seconds:
    def handle(number, frame):
        time.sleep(options.handler_seconds * (1 + rank))
        path.with_suffix(".handled").write_text("")
        print(f"rank {rank} handled", flush=True)
        sys.exit(5)
    signal.signal(signal.SIGTERM, handle)
    path.with_suffix(".ready").write_text("")
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
        wait_until(lambda: len(list(self.folder.glob("rank-*.json"))) >= count, DEADLINE_SECONDS)

    def left_behind(self) -> list[psutil.Process]:
        results = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("DS_RING_TEST_MARK") == self.mark and process.is_running():
                    results.append(process)
            except psutil.Error:
                continue
        return results


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


NEEDS = pytest.mark.needs("mpirun")
MPIRUN = pytest.param("mpirun", marks=NEEDS)
ENGINES = ["deepspeed", "torchrun", MPIRUN]


@pytest.mark.parametrize(
    ("engine", "script"),
    [
        ("deepspeed", MEET),
        ("torchrun", MEET),
        pytest.param("mpirun", MEET, marks=NEEDS),
        pytest.param("mpirun", REPORT, marks=NEEDS),
    ],
    ids=["deepspeed", "torchrun", "mpirun", "mpirun-report"],
)
@pytest.mark.day("mpirun-report")  # by day they meet in test_environment_crosses_to_other_hosts
def test_ranks_meet(workplace: Workplace, engine: str, script: str) -> None:
    path = workplace.write(f"engine: {engine}\n{LOCAL}environment: {{GREETING: it's 2 words}}\n", script)
    status, output = workplace.launch(path, "--", "--fail-on", "5")
    assert status == 0, output
    for rank in (0, 1):
        assert f"rank {rank} {'sums 3' if script == MEET else 'reports'}" in output
        environment, options = workplace.report(rank)["environment"], workplace.report(rank)["options"]
        assert environment["GREETING"] == "it's 2 words"
        assert (environment["DS_ACCELERATOR"], environment["OMP_NUM_THREADS"]) == ("cpu", "1")
        assert (environment["LOCAL_RANK"], environment["WORLD_SIZE"]) == (str(rank), "2")
        assert environment["MASTER_PORT"] != "29500"
        assert options["deepspeed"] is True
        assert options["deepspeed_config"] == str(workplace.folder / "ds.json")
        assert options["fail_on"] == 5


# torchrun ends with 1 whatever the rank said
@pytest.mark.parametrize(
    ("engine", "expected"), [("deepspeed", 17), ("torchrun", 1), pytest.param("mpirun", 17, marks=NEEDS)]
)
@pytest.mark.day("mpirun-17")
def test_failing_rank_ends_the_run(workplace: Workplace, engine: str, expected: int) -> None:
    path = workplace.write(f"engine: {engine}\n{LOCAL}")
    status, output = workplace.launch(path, "--", "--fail-on", "1", "--sleep")
    assert status == expected, output
    assert not workplace.left_behind()


@pytest.mark.night
@pytest.mark.parametrize("verbose", [False, True])
def test_the_last_line_names_who_failed_in_place_of_torchruns_forty(
    workplace: Workplace, verbose: bool
) -> None:
    path = workplace.write(f"engine: torchrun\n{LOCAL}")
    status, output = workplace.launch(path, *["--verbose"] * verbose, "--", "--fail-on", "1", "--sleep")
    assert status == 1 and ("ChildFailedError" in output) == verbose, output
    last = output.splitlines()[-1]
    assert (last.startswith("ds-ring: error: ") and len(output.splitlines()) < 8) or verbose, output
    if not verbose:
        assert "rank 1 on localhost left with status 17 while others were at work" in last


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.night
def test_an_error_on_a_ring_is_named_last_and_a_normal_run_is_quiet(
    workplace: Workplace, engine: str
) -> None:
    script = (Path(__file__).resolve().parents[1] / "dist/relaunch_train.py").read_text()
    path = workplace.write(f"engine: {engine}\n{LOCAL}", script)
    config = json.loads((workplace.folder / "ds.json").read_text())
    config |= {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}}
    (workplace.folder / "ds.json").write_text(json.dumps(config))
    options = ["--", "--output", str(workplace.folder), "--steps", "3", "--step-seconds", "0"]
    status, output = workplace.launch(path, *options)
    assert status == 0, output
    assert [line for line in output.splitlines() if "INFO" in line or "shm_comm" in line] == []
    status, output = workplace.launch(path, *options, "--steps", "9", "--fault", "bug", "--fault-step", "5")
    assert status, output
    expected = "rank 1 on localhost raised ZeroDivisionError in step 5: on purpose"
    assert output.splitlines()[-1] == f"ds-ring: error: {expected}", output


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.day("torchrun")
def test_sigterm_ends_the_run(workplace: Workplace, engine: str) -> None:
    started = workplace.start([*DS_RING, str(workplace.write(f"engine: {engine}\n{LOCAL}")), "--", "--sleep"])
    workplace.wait_for_reports(2)
    started.send_signal(signal.SIGTERM)
    status, output = workplace.finish(started)
    assert status == 128 + signal.SIGTERM, output
    assert "got SIGTERM; ending all processes of this run" in output
    assert not workplace.left_behind()


@pytest.mark.parametrize(
    ("engine", "script"),
    [("deepspeed", MEET), ("torchrun", MEET), ("torchrun", REPORT)],
    ids=["deepspeed", "torchrun", "torchrun-report"],
)
@pytest.mark.night  # by day the agents of two hosts meet in test_one_lost_host_ends_the_others
def test_two_nodes_without_ssh(workplace: Workplace, engine: str, script: str, unused_port: int) -> None:
    hosts = "hosts: [{name: node-0, slots: 1}, {name: node-1, slots: 1}]\nssh: false\n"
    master = f"master_address: 127.0.0.1\nmaster_port: {unused_port}\n"
    path = workplace.write(f"engine: {engine}\n{hosts}{master}", script)
    nodes = [workplace.start([*DS_RING, str(path), "--node-rank", str(rank)]) for rank in (0, 1)]
    for rank, (status, output) in enumerate([workplace.finish(node) for node in nodes]):
        assert status == 0, output
        assert f"rank {rank} {'sums 3' if script == MEET else 'reports'}" in output
        seen = workplace.report(rank)["environment"]
        assert (seen["RANK"], seen["LOCAL_RANK"], seen["WORLD_SIZE"]) == (str(rank), "0", "2")
        assert (seen["MASTER_ADDR"], seen["MASTER_PORT"]) == ("127.0.0.1", str(unused_port))


@pytest.mark.parametrize("engine", ["deepspeed", MPIRUN])
@pytest.mark.day("mpirun")
def test_dry_run_is_the_run(workplace: Workplace, engine: str) -> None:
    """With a device that is found, whose visible numbers reach the ranks."""
    variables = "environment: {GREETING: it's 2 words, DS_ACCELERATOR: cpu}\n"
    path = workplace.write(f"engine: {engine}\n{LOCAL}{variables}")
    path.write_text(path.read_text().replace("device: cpu", "device: auto"))
    devices = {"CUDA_VISIBLE_DEVICES": "3,5", "OMP_NUM_THREADS": "1"}
    values = {"GREETING": "it's 2 words", "DS_ACCELERATOR": "cpu"}  # a script holds none of environment
    planned = workplace.start([*DS_RING, str(path), "--dry-run"], TMPDIR=str(workplace.folder), **devices)
    status, script = workplace.finish(planned)
    assert status == 0, script
    assert not list(workplace.folder.glob("rank-*.json"))
    status, output = workplace.finish(workplace.start(["bash", "-c", script], **values, **devices))
    assert status == 0, output
    for rank in (0, 1):
        seen = workplace.report(rank)["environment"]
        assert (seen["GREETING"], seen["CUDA_VISIBLE_DEVICES"]) == ("it's 2 words", "3,5")
        assert len(seen["DS_RING_SECRET"]) == 64
    del values["GREETING"]
    status, output = workplace.finish(workplace.start(["bash", "-c", script], **values, **devices))
    assert status != 0 and "GREETING: export it first" in output


RECIPES = Path(__file__).resolve().parents[2] / "configs/recipes"
# how a dry run says where the ranks are: one host's slots, a host of eight, a task of Slurm's
RANKS_OF_A_RECIPE = {8: ("slots=8", 1), 64: ("--nproc-per-node=8 ", 8), 512: ("\nnode-", 512)}


@pytest.mark.parametrize("world_size", RANKS_OF_A_RECIPE)
@pytest.mark.day("512")
def test_a_recipe_starts_all_its_ranks(workplace: Workplace, world_size: int) -> None:
    recipe = RECIPES / f"{world_size}_gpus.yaml"
    status, script = workplace.launch(recipe, "--dry-run")
    assert status == 0, script
    says, times = RANKS_OF_A_RECIPE[world_size]
    assert script.count(says) == times
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


@pytest.mark.night
def test_the_pods_of_the_jobset_are_one_ring(workplace: Workplace, unused_port: int) -> None:
    """Two pods of one CPU rank by the manifest's own command; its first figures say how many there are."""
    manifest = yaml.safe_load((RECIPES / "kubernetes_jobset.yaml").read_text())
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    container = job["template"]["spec"]["containers"][0]
    assert f"--nnodes={job['completions']} --nproc-per-node=8" in container["args"][0]
    instead = {
        "--nnodes=4 --nproc-per-node=8": "--nnodes=2 --nproc-per-node=1",
        "ds-ring-ranks-0-0.ds-ring": "127.0.0.1",
        "29511": str(unused_port),
        "/job/train.py": str(RECIPES.parents[1] / "launcher/demo/train_lm.py"),
        "/job/ds_config.json": f"{RECIPES.parent}/quickstart.json --output {workplace.folder} {SMALL_RUN}",
    }
    command = changed(container["args"][0], instead)
    variables = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    variables |= {"DS_RING_SECRET": "ab" * 32, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    pods = [
        workplace.start([*container["command"], command], JOB_COMPLETION_INDEX=str(index), **variables)
        for index in range(2)
    ]
    for status, output in [workplace.finish(pod) for pod in pods]:
        assert status == 0, output
    assert json.loads((workplace.folder / "log.json").read_text())["comparison"]["exact"] is True


# Stands in for ssh, ours and mpirun's: drops the options and the host, and runs the rest here, in an
# environment that holds nothing else.
FAKE_SSH = """#!/bin/bash
while [[ $1 == -* ]]; do [[ $1 == -[po] ]] && shift; shift; done
shift
kept=(PATH="$PATH" HOME="$HOME" PYTHONPATH="$PYTHONPATH" DS_RING_TEST_MARK="$DS_RING_TEST_MARK")
exec env -i "${kept[@]}" bash -c "$*"
"""


def by_ssh(workplace: Workplace, engine: str, ssh: str = FAKE_SSH) -> tuple[str, dict[str, str]]:
    """The part of a YAML that names two hosts, and the environment in which a fake ssh reaches them."""
    programs = workplace.folder / "programs"
    programs.mkdir()
    (programs / "ssh").write_text(ssh)
    (programs / "ssh").chmod(stat.S_IRWXU)
    hosts = "hosts: [{name: node-0, slots: 1}, {name: node-1, slots: 1}]\nmaster_address: 127.0.0.1\n"
    return f"engine: {engine}\n{hosts}", {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.night
@pytest.mark.parametrize("engine", ENGINES)
def test_environment_crosses_to_other_hosts(workplace: Workplace, engine: str) -> None:
    hosts, caller = by_ssh(workplace, engine)
    path = workplace.write(hosts + "environment: {GREETING: it's 2 words}\n", MEET)
    status, output = workplace.finish(workplace.start([*DS_RING, str(path)], **caller))
    assert status == 0, output
    assert "rank 0 sums 3" in output and "rank 1 sums 3" in output
    seen = [workplace.report(rank)["environment"] for rank in (0, 1)]
    for environment in seen:
        assert environment["GREETING"] == "it's 2 words"
        assert (environment["DS_ACCELERATOR"], environment["OMP_NUM_THREADS"]) == ("cpu", "1")
    assert seen[0]["DS_RING_SECRET"] == seen[1]["DS_RING_SECRET"] and len(seen[0]["DS_RING_SECRET"]) == 64


def command_lines() -> str:
    """All that stands on command lines of this machine now."""
    results = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            results.append(path.read_text(errors="replace"))
        except OSError:
            continue
    return "\n".join(results)


@pytest.mark.night
@pytest.mark.parametrize("reach", ["local", "ssh"])
@pytest.mark.parametrize("engine", ENGINES)
def test_kill_9_of_the_launcher_ends_the_job(workplace: Workplace, engine: str, reach: str) -> None:
    """On other hosts too; meanwhile no value of environment stands on a command line or in the output."""
    hosts, caller = by_ssh(workplace, engine) if reach == "ssh" else (f"engine: {engine}\n{LOCAL}", {})
    value = f"token-{workplace.mark}"
    names = "TOKEN", "NCCL_TOKEN"  # DeepSpeed logs every variable of NCCL's at its usual level
    variables = ", ".join(f"{name}: {value}" for name in names)
    path = workplace.write(f"{hosts}environment: {{{variables}}}\n")
    started = workplace.start([*DS_RING, str(path), "--", "--sleep"], **caller)
    workplace.wait_for_reports(2)
    lines = command_lines()
    seen = [workplace.report(rank)["environment"] for rank in (0, 1)]
    assert str(workplace.folder / "train.py") in lines
    assert not [name for name in names if any(entry[name] != value for entry in seen)]
    assert value not in lines and seen[0]["DS_RING_SECRET"] not in lines
    started.kill()
    status, output = workplace.finish(started)  # its output ends when the last process that holds it does
    assert status == -signal.SIGKILL and value not in output and seen[0]["DS_RING_SECRET"] not in output
    wait_until(lambda: not workplace.left_behind(), 25.0)


@pytest.mark.night
@pytest.mark.parametrize("reach", ["local", "ssh"])
@NEEDS
def test_sigterm_leaves_time_to_a_handler_under_mpirun(workplace: Workplace, reach: str) -> None:
    """mpirun's own SIGKILL comes after a second, and at once where the first rank's handler ends."""
    hosts, caller = by_ssh(workplace, "mpirun") if reach == "ssh" else (f"engine: mpirun\n{LOCAL}", {})
    path = workplace.write(hosts)
    started = workplace.start([*DS_RING, str(path), "--", "--handler-seconds", "2", "--sleep"], **caller)
    wait_until(lambda: len(list(workplace.folder.glob("rank-*.ready"))) == 2, DEADLINE_SECONDS)
    started.send_signal(signal.SIGTERM)
    status, output = workplace.finish(started)
    assert status == 128 + signal.SIGTERM, output
    assert "rank 0 handled" in output and "rank 1 handled" in output  # after 2 s and after 4 s
    assert len(list(workplace.folder.glob("rank-*.handled"))) == 2


@pytest.mark.night
def test_one_lost_host_ends_the_others(workplace: Workplace) -> None:
    hosts, caller = by_ssh(workplace, "torchrun")
    started = workplace.start([*DS_RING, str(workplace.write(hosts)), "--", "--sleep"], **caller)
    workplace.wait_for_reports(2)
    agents = [
        process
        for process in psutil.Process(started.pid).children(recursive=True)
        if process.cmdline()[-1:] == ["ds_ring_launcher.run.agent"]
    ]
    assert len(agents) == 2
    agents[1].kill()
    status, output = workplace.finish(started)
    assert status == 128 + signal.SIGKILL, output
    assert "error: node-1: ssh ended with status -9" in output
    wait_until(lambda: not workplace.left_behind(), 25.0)


SHADOWS = ("queue", "psutil", "signal", "fnmatch")  # a file; `torch` and `deepspeed` as folders


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("run_folder", ["", "run_folder: run\n"], ids=["plain", "run_folder"])
@pytest.mark.day("run_folder-mpirun")
def test_modules_of_the_working_folder_take_no_others_place(
    workplace: Workplace, engine: str, run_folder: str
) -> None:
    path = workplace.write(f"engine: {engine}\n{LOCAL}{run_folder}")
    elsewhere = workplace.folder / "elsewhere"
    elsewhere.mkdir()
    for name in SHADOWS:
        (elsewhere / f"{name}.py").write_text("raise SystemExit('shadowed')\n")
    for name in ("torch", "deepspeed"):
        (elsewhere / name).mkdir()
        (elsewhere / name / "__init__.py").write_text("raise SystemExit('shadowed')\n")
    command = [*DS_RING[:1], "-P", *DS_RING[1:], str(path)]
    started = workplace.start(["sh", "-c", 'cd elsewhere && exec "$@"', "sh", *command])
    status, output = workplace.finish(started)
    assert status == 0 and "shadowed" not in output, output
    for rank in range(2):
        assert "PYTHONSAFEPATH" not in workplace.report(rank)["environment"]


@NEEDS
def test_an_environment_of_another_job_is_left_out(workplace: Workplace) -> None:
    path = workplace.write(f"engine: mpirun\n{LOCAL}")
    odd = {"RANK": "7", "WORLD_SIZE": "9", "PET_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    status, output = workplace.finish(workplace.start([*DS_RING, str(path)], **odd))
    assert status == 0 and "left out of the engine's environment: PET_MAX_RESTARTS, RANK" in output, output
    seen = [workplace.report(rank)["environment"] for rank in range(2)]
    assert [(entry["RANK"], entry["WORLD_SIZE"]) for entry in seen] == [("0", "2"), ("1", "2")]
    assert not {"PET_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE"} & (set(seen[0]) | set(seen[1]))


@pytest.mark.night
def test_torchrun_does_not_start_a_rank_again(workplace: Workplace) -> None:
    script = (
        "import pathlib, sys\nwith open(pathlib.Path(__file__).with_name('starts'), 'a') as f: f.write('x')\n"
    )
    path = workplace.write(f"engine: torchrun\n{LOCAL}", script + "sys.exit(3)\n")
    status, output = workplace.finish(workplace.start([*DS_RING, str(path)], PET_MAX_RESTARTS="3"))
    assert status != 0 and len((workplace.folder / "starts").read_text()) <= 2, output


@pytest.mark.night
@pytest.mark.parametrize("run_folder", ["", "run_folder: run\n"], ids=["plain", "run_folder"])
@NEEDS
def test_closed_streams_end_no_rank(workplace: Workplace, run_folder: str) -> None:
    path = workplace.write(f"engine: mpirun\n{LOCAL}{run_folder}")
    closed = 'exec "$@" <&- >&- 2>&-'
    started = workplace.start(["bash", "-c", closed, "bash", *DS_RING, str(path)])
    assert workplace.finish(started)[0] == 0
    assert workplace.report(1)["environment"]["RANK"] == "1"
    if run_folder:
        assert "rank 1 reports" in (workplace.folder / "run/attempt-1/rank-1.log").read_text()
        assert (workplace.folder / "run/attempt-1/rank-1.stopped").exists()


@pytest.mark.night
@pytest.mark.parametrize("run_folder", ["", "run_folder: run\n"], ids=["plain", "run_folder"])
@NEEDS
def test_a_run_in_which_no_rank_made_a_ring_says_so(workplace: Workplace, run_folder: str) -> None:
    status, output = workplace.launch(workplace.write(f"engine: mpirun\n{LOCAL}{run_folder}"))
    assert status == 0 and output.count("no rank has made a ring") == 1, output
    built = REPORT + "(pathlib.Path(os.environ['DS_RING_RUN_FOLDER']) / f'rank-{rank}.ring').touch()\n"
    status, output = workplace.launch(workplace.write(f"engine: mpirun\n{LOCAL}{run_folder}", built))
    assert status == 0 and "no rank has made a ring" not in output, output


@pytest.mark.night  # DeepSpeed's launcher needs a file of the launcher's, and takes seconds to start
def test_a_tmp_that_is_cleaned_meanwhile_ends_no_relaunch(workplace: Workplace) -> None:
    place = workplace.folder / "tmp"
    place.mkdir()
    script = f"""
import os, pathlib, shutil, sys, time
again = pathlib.Path(__file__).with_name("again")
if os.environ["RANK"] == "0" and not again.exists():
    for path in pathlib.Path({str(place)!r}).iterdir():
        shutil.rmtree(path, ignore_errors=True)
    again.touch()
    raise ValueError("once")
time.sleep(1)
"""
    text = f"engine: deepspeed\n{LOCAL}run_folder: run\nrelaunch: {{checkpoints: c, backoff_seconds: 0.1}}\n"
    path = workplace.write(text, script)
    status, output = workplace.finish(workplace.start([*DS_RING, str(path)], TMPDIR=str(place)))
    assert status == 0 and "attempt 1 failed: rank 0 on localhost raised ValueError" in output, output
    assert not list(place.glob("ds-ring-*"))


@pytest.mark.night
@pytest.mark.parametrize("engine", ["torchrun", "deepspeed"])
def test_ranks_meet_at_an_address_of_ip_version_6(workplace: Workplace, engine: str) -> None:
    status, output = workplace.launch(
        workplace.write(f'engine: {engine}\n{LOCAL}master_address: "::1"\n', MEET)
    )
    assert status == 0 and "rank 1 sums 3" in output, output


STORE = (
    REPORT
    + """
import psutil, torch
if os.environ["MAKES"] == "torch":
    torch.distributed.init_process_group("gloo")
else:
    from ds_ring.engines.deepspeed.initialize import init_distributed
    init_distributed()
torch.distributed.barrier()
port = int(os.environ["MASTER_PORT"])
listening = [one.laddr for one in psutil.net_connections() if one.status == "LISTEN"]
found = {one.ip for one in listening if one.port == port}
print(f"rank {rank} sees {sorted(found)}", flush=True)
torch.distributed.barrier()
"""
)


@pytest.mark.parametrize(("engine", "makes"), [("torchrun", "torch"), ("deepspeed", "ds_ring")])
@pytest.mark.night
def test_the_store_of_a_job_of_one_machine_listens_on_loopback_alone(
    workplace: Workplace, engine: str, makes: str
) -> None:
    path = workplace.write(f"engine: {engine}\n{LOCAL}environment: {{MAKES: {makes}}}\n", STORE)
    status, output = workplace.launch(path)
    assert status == 0 and "rank 0 sees ['127.0.0.1']" in output, output
