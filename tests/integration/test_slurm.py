"""The engine slurm: its scripts as text, and run by a Slurm of two nodes that the tests start themselves."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
from collections.abc import Iterator

import pytest

from ds_ring_launcher.engines.slurm import Slurm, read_rank_numbers
from ds_ring_launcher.run.run_folder import RunFolder
from tests.clock import wait_until
from tests.dist.namespaces import two_hosts
from tests.dist.slurm_cluster import NODES, SlurmCluster, slurm_on
from tests.integration.test_launch import (
    DS_RING,
    REPORT,
    Workplace,
    command_lines,
    workplace,  # noqa: F401  a fixture
)
from tests.integration.test_relaunch import COUNT, RUN


def hosts(count: int, slots: int) -> str:
    return "hosts: [" + ", ".join(f"{{name: node-{n}, slots: {slots}}}" for n in range(count)) + "]\n"


@pytest.mark.parametrize(("nodes", "slots"), [(2, 2), (64, 8)])
@pytest.mark.day("64-8")
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
@pytest.mark.day("64-8")
def test_the_srun_script(workplace: Workplace, nodes: int, slots: int) -> None:  # noqa: F811
    secret = "environment: {TOKEN: my-token}\nrun_folder: run\n"
    path = workplace.write(f"engine: slurm\n{hosts(nodes, slots)}{secret}", world_size=slots)
    status, script = workplace.launch(path, "--dry-run")
    assert status == 0, script
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    assert f"--nodes={nodes} --ntasks={nodes * slots} --distribution=arbitrary" in script
    tasks = script.split("<<'EOF'\n")[1].split("EOF")[0].split()
    assert tasks == [f"node-{n}" for n in range(nodes) for _ in range(slots)]
    assert f"mkdir -p {workplace.folder}/run/attempt-1\n" in script
    assert "launcher/run/rank_script.py" in script
    assert "my-token" not in script and "export MASTER_ADDR=node-0" in script


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    with two_hosts() as both, slurm_on(both) as cluster:
        yield cluster


NODE_LINES = "hosts: [" + ", ".join(f"{{name: {node}, slots: 2}}" for node in NODES) + "]\n"


@pytest.mark.needs("slurm")
@pytest.mark.night
def test_ranks_get_their_place_from_slurm(workplace: Workplace, slurm: SlurmCluster) -> None:  # noqa: F811
    path = workplace.write(f"engine: slurm\n{NODE_LINES}environment: {{TOKEN: my-token}}\n", REPORT, 4)
    job = slurm.allocate()
    caller = {**slurm.environment, "SLURM_JOB_ID": job}
    started = workplace.start(slurm.command(*DS_RING, str(path), "--", "--sleep"), **caller)
    workplace.wait_for_reports(4)
    assert "my-token" not in command_lines()
    for rank in range(4):
        found = workplace.report(rank)["environment"]
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "SLURMD_NODENAME", "TOKEN")
        node = NODES[rank // 2]
        assert [found[name] for name in names] == [
            str(rank), "4", str(rank % 2), "2", NODES[0], node, "my-token",
        ]  # fmt: skip
        assert len(found["DS_RING_SECRET"]) == 64
    started.send_signal(signal.SIGTERM)
    status, output = workplace.finish(started)
    assert status == 128 + signal.SIGTERM, output
    slurm.ask("scancel", job)


def test_without_srun_it_says_what_to_do(workplace: Workplace) -> None:  # noqa: F811
    path = workplace.write(f"engine: slurm\n{hosts(2, 1)}")
    status, output = workplace.finish(workplace.start([*DS_RING, str(path)], PATH=str(workplace.folder)))
    assert status == 2 and "expected the program srun on PATH" in output and "--sbatch" in output


@pytest.mark.needs("slurm")
@pytest.mark.night
def test_a_preempted_job_goes_back_into_the_queue_and_ends(
    workplace: Workplace,  # noqa: F811
    slurm: SlurmCluster,
) -> None:
    path = workplace.write(f"engine: slurm\n{NODE_LINES}{RUN}", COUNT, 4)
    _, script = workplace.launch(path, "--sbatch", "--", "--fault", "preempted", "--steps", "12")
    (workplace.folder / "job").write_text(script)
    job = slurm.ask(
        "sbatch", f"--export=ALL,DS_RING_TEST_MARK={workplace.mark}", str(workplace.folder / "job")
    )
    job = job.removeprefix("Submitted batch job ")
    wait_until(lambda: len(list(workplace.folder.glob("ready-*"))) == 4)
    slurm.ask("scancel", "--batch", "--signal=USR1", job)  # what --signal=B:USR1@... sends ahead of time
    wait_until(lambda: shows(slurm, job, "JobState=PENDING", "Restarts=1"))
    assert RunFolder(workplace.folder / "run").events()[-1]["verdict"] == "preempted"
    # Slurm would wait for two minutes. Not before the job is pending: it sets the time only then; nor in
    # the same second: a credential of the second in which the last one was revoked is revoked, too.
    slurm.ask("scontrol", "update", f"JobId={job}", "StartTime=now+3seconds")
    wait_until(lambda: shows(slurm, job, "JobState=COMPLETED"))
    events = RunFolder(workplace.folder / "run").events()
    assert [(one["event"], one["attempt"]) for one in events] == [
        ("start", 1), ("end", 1), ("start", 2), ("end", 2)
    ]  # fmt: skip
    assert events[2]["checkpoint"] is not None and events[3]["status"] == 0
    assert (workplace.folder / "checkpoints/latest").read_text() == "12"


def shows(slurm: SlurmCluster, job: str, *words: str) -> bool:
    said = slurm.ask("scontrol", "show", "job", job)
    assert "JobState=FAILED" not in said, said
    return all(word in said for word in words)


@pytest.mark.parametrize(
    ("counts", "node", "expected"), [("8(x64)", 63, "8"), ("2(x3),1", 3, "1"), ("4", 0, "4"), ("", 0, None)]
)
def test_ranks_of_a_node(counts: str, node: int, expected: str | None) -> None:
    around = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}
    found = read_rank_numbers(around | {"SLURM_STEP_TASKS_PER_NODE": counts, "SLURM_NODEID": str(node)})
    assert found.get("LOCAL_SIZE") == expected


def test_a_rank_that_slurm_did_not_start_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"expected to be started by Slurm's srun, which sets SLURM_NTASKS"):
        read_rank_numbers({"SLURM_PROCID": "0", "SLURM_LOCALID": "0"})


def test_a_host_of_the_allocation_is_reached_beside_the_job() -> None:
    command, advice = Slurm().reach("node-3", None, "a.module")
    assert command[0] == "srun" and {"--nodelist=node-3", "--overlap", "--nodes=1"} <= {*command}
    assert command[-1] == "a.module" and "inside a Slurm allocation" in advice


def test_names_of_any_letters_are_one_word_of_the_sbatch_script(workplace: Workplace) -> None:  # noqa: F811
    text = f'engine: slurm\n{hosts(2, 1)}run_folder: "it\'s a run # of 100%"\n'
    path = workplace.write(text)
    odd = path.with_name("a 'cluster'; true.yaml")
    odd.write_text(path.read_text().replace("train.py", "'my train #1.py'"))
    (workplace.folder / "my train #1.py").touch()
    status, script = workplace.launch(odd, "--sbatch", "--", "--text", "it's")
    assert status == 0, script
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    assert "#SBATCH --job-name=my_train__1\n" in script
    assert f'#SBATCH --output="{workplace.folder}/it\'s a run # of 100%%/slurm-%j.log"\n' in script
    command = next(line for line in script.splitlines() if "ds_ring_launcher.cli" in line)
    assert shlex.split(command)[-5:] == [str(odd), "--", "--text", "it's", "&"]
