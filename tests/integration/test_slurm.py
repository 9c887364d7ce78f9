"""The engine slurm: its scripts as text, parsed by bash, and run with a stand-in for srun and scontrol."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest

from ds_ring_launcher.slurm_rank import environment_of
from tests.integration.test_launch import DS_RING, REPORT, Workplace, workplace  # noqa: F401  a fixture

# Starts a task for each line of SLURM_HOSTFILE, here, with the variables that srun gives it.
FAKE_SRUN = """#!/bin/bash
printf '%s\\n' "$@" > {folder}/srun.arguments
while [[ $1 == -* ]]; do shift; done
mapfile -t hosts < "$SLURM_HOSTFILE"
export SLURM_NTASKS=${{#hosts[@]}} SLURM_STEP_TASKS_PER_NODE='2(x2)'
for task in "${{!hosts[@]}}"; do
  SLURM_PROCID=$task SLURM_LOCALID=$((task % 2)) SLURM_NODEID=$((task / 2)) "$@" &
done
trap 'kill -USR1 $(jobs -p)' USR1
for job in $(jobs -p); do wait "$job" || status=$?; done
wait
exit "${{status:-0}}"
"""


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(stat.S_IRWXU)


def hosts(count: int, slots: int) -> str:
    return "hosts: [" + ", ".join(f"{{name: node-{n}, slots: {slots}}}" for n in range(count)) + "]\n"


@pytest.mark.parametrize(("nodes", "slots"), [(2, 2), (64, 8)])
def test_the_sbatch_script(workplace: Workplace, nodes: int, slots: int) -> None:  # noqa: F811
    text = f"engine: slurm\n{hosts(nodes, slots)}run_folder: run\ngrace_seconds: 100\n"
    path = workplace.write(text, world_size=slots)
    status, script = workplace.launch(path, "--sbatch", "--", "--steps", "3")
    assert status == 0, script
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", script, re.MULTILINE))
    assert directives["nodes"] == str(nodes) and directives["ntasks-per-node"] == str(slots)
    assert directives["nodelist"].split(",") == [f"node-{n}" for n in range(nodes)]
    assert directives["signal"] == "B:USR1@160" and "requeue" in directives
    assert directives["output"] == f"{workplace.folder}/run/slurm-%j.log"
    assert f"launch {path} -- --steps 3 &" in script


@pytest.mark.parametrize(("nodes", "slots"), [(2, 2), (64, 8)])
def test_the_srun_script(workplace: Workplace, nodes: int, slots: int) -> None:  # noqa: F811
    secret = "environment: {TOKEN: my-token}\nrun_folder: run\n"
    path = workplace.write(f"engine: slurm\n{hosts(nodes, slots)}{secret}", world_size=slots)
    status, script = workplace.launch(path, "--dry-run")
    assert status == 0, script
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    assert f"--nodes={nodes} --ntasks={nodes * slots} --distribution=arbitrary" in script
    tasks = script.split("<<'EOF'\n")[1].split("EOF")[0].split()
    assert tasks == [f"node-{n}" for n in range(nodes) for _ in range(slots)]
    assert f"mkdir -p {workplace.folder}/run/attempt-1\n" in script and "-m ds_ring_launcher.rank" in script
    assert "my-token" not in script and "export MASTER_ADDR=node-0" in script


def test_ranks_get_their_place_from_slurm(workplace: Workplace) -> None:  # noqa: F811
    program(workplace.folder, "srun", FAKE_SRUN.format(folder=workplace.folder))
    path = workplace.write(f"engine: slurm\n{hosts(2, 2)}environment: {{TOKEN: my-token}}\n", REPORT, 4)
    caller = {"PATH": f"{workplace.folder}{os.pathsep}{os.environ['PATH']}"}
    status, output = workplace.finish(workplace.start([*DS_RING, str(path)], **caller))
    assert status == 0, output
    assert "my-token" not in (workplace.folder / "srun.arguments").read_text()
    for rank in range(4):
        found = workplace.report(rank)["environment"]
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "TOKEN")
        assert [found[name] for name in names] == [str(rank), "4", str(rank % 2), "2", "node-0", "my-token"]
        assert len(found["DS_RING_SECRET"]) == 64


def test_without_srun_it_says_what_to_do(workplace: Workplace) -> None:  # noqa: F811
    status, output = workplace.launch(workplace.write(f"engine: slurm\n{hosts(2, 1)}"))
    assert status == 2 and "expected the program srun on PATH" in output and "--sbatch" in output


@pytest.mark.parametrize(("leaves", "requeued"), [(75, True), (1, False)])
def test_a_preempted_job_is_put_back_into_the_queue(
    workplace: Workplace,  # noqa: F811
    leaves: int,
    requeued: bool,
) -> None:
    path = workplace.write(f"engine: slurm\n{hosts(2, 1)}")
    _, script = workplace.launch(path, "--sbatch")
    told = f"bash -c 'trap \"sleep 0.3; exit {leaves}\" USR1; touch ready; while :; do sleep 0.05; done' &"
    script = re.sub(r"^.* launch .* &$", lambda _: told, script, flags=re.MULTILINE)
    assert told in script
    program(workplace.folder, "scontrol", f'#!/bin/bash\necho "$@" > {workplace.folder}/requeued\n')
    caller = {"PATH": f"{workplace.folder}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": "42"}
    started = workplace.start(["bash", "-c", script], **caller)
    deadline = time.monotonic() + 20
    while not (workplace.folder / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    started.send_signal(signal.SIGUSR1)
    status, output = workplace.finish(started)
    assert status == leaves, output
    told_scontrol = workplace.folder / "requeued"
    assert told_scontrol.exists() == requeued
    assert not requeued or told_scontrol.read_text() == "requeue 42\n"


@pytest.mark.parametrize(
    ("counts", "node", "expected"), [("8(x64)", 63, "8"), ("2(x3),1", 3, "1"), ("4", 0, "4"), ("", 0, None)]
)
def test_ranks_of_a_node(counts: str, node: int, expected: str | None) -> None:
    around = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}
    found = environment_of(around | {"SLURM_STEP_TASKS_PER_NODE": counts, "SLURM_NODEID": str(node)})
    assert found.get("LOCAL_SIZE") == expected
