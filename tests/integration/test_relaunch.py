"""`ds-ring launch` with `relaunch`: real engines, and a script of plain Python that counts steps and fails.

Importing torch would be nearly all of the time; test_run_status.py has real training.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from ds_ring_launcher.run.relaunch import HOSTS_MISSING
from ds_ring_launcher.run.run_folder import PREEMPTED, RunFolder
from tests.clock import wait_until
from tests.dist.launch_rounds import play_rounds
from tests.integration.test_launch import (
    DS_RING,
    ENGINES,
    LOCAL,
    MPIRUN,
    Workplace,
    by_ssh,
    workplace,  # noqa: F401  a fixture
)

# Counts steps in `latest`, as a script with a checkpoint each step would; then does what its arguments say.
COUNT = """
import argparse, json, os, pathlib, signal, sys, time, types
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--deepspeed", action="store_true")
parser.add_argument("--deepspeed_config")
parser.add_argument("--fault", default="")
parser.add_argument("--steps", type=int, default=6)
options = parser.parse_args()
rank, folder = int(os.environ["RANK"]), pathlib.Path(__file__).parent
size = json.loads(pathlib.Path(options.deepspeed_config).read_text())["sequence_parallel_size"]
latest = folder / "checkpoints" / "latest"
latest.parent.mkdir(exist_ok=True)
step = int(latest.read_text()) if latest.exists() else 0
report = types.ModuleType("report")
report.step_under_way = lambda: step + 1
sys.modules["ds_ring.measure.run_report"] = report
(folder / f"rank-{rank}-of-{os.environ['WORLD_SIZE']}.json").write_text(str(size))
told = []
if options.fault == "preempted":
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    (folder / f"ready-{rank}").touch()

def strike():
    if options.fault == "bug":
        raise ZeroDivisionError("on purpose")
    try:
        (folder / "armed").unlink()
    except FileNotFoundError:
        return
    print("strikes now", flush=True)
    if options.fault == "gone":
        (folder / "gone-node-1").touch()
    os.kill(os.getpid(), signal.SIGSTOP if options.fault == "stop" else signal.SIGKILL)

while step < options.steps:
    if rank == 1 and step == 3 and options.fault:
        strike()
    if told:
        sys.exit(75)
    time.sleep(0.05 if options.fault != "preempted" else 0.2)
    step += 1
    if rank == 0 and step <= 3 or not list(folder.glob("armed")):
        part = latest.with_name(f"latest.{rank}")
        part.write_text(str(step))
        part.rename(latest)
"""

RUN = "run_folder: run\nrelaunch: {checkpoints: checkpoints, backoff_seconds: 0.1}\n"


def events(place: Workplace) -> list[tuple[str, int]]:
    return [(event["event"], event["attempt"]) for event in RunFolder(place.folder / "run").events()]


def launch(place: Workplace, yaml: str, fault: str) -> tuple[int, str]:
    (place.folder / "armed").touch()
    return place.launch(place.write(yaml + RUN, COUNT), "--", "--fault", fault)


@pytest.mark.situation("launcher", "a rank is killed")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.day("mpirun")  # which starts without torch
def test_a_killed_rank_is_named_and_the_job_goes_on(workplace: Workplace, engine: str) -> None:  # noqa: F811
    status, output = launch(workplace, f"engine: {engine}\n{LOCAL}", "kill")
    assert status == 0, output
    assert "attempt 1 failed: rank 1 on localhost was lost" in output, output
    assert events(workplace) == [("start", 1), ("fault", 1), ("end", 1), ("start", 2), ("end", 2)]
    first, last = (
        RunFolder(workplace.folder / "run").events()[0],
        RunFolder(workplace.folder / "run").events()[-2],
    )
    assert first["checkpoint"] is None and last["checkpoint"] is not None
    assert "strikes now" in (workplace.folder / "run/attempt-1/rank-1.log").read_text()
    assert "strikes now" in output


@pytest.mark.night
@pytest.mark.situation("launcher", 'an error of one\'s own whose text has "nccl"')
@pytest.mark.needs("mpirun")
def test_a_bug_ends_it_after_two_attempts_with_its_traceback_first(workplace: Workplace) -> None:  # noqa: F811
    status, output = launch(workplace, f"engine: mpirun\n{LOCAL}", "bug")
    assert status == 1
    assert [event for event in events(workplace) if event[0] == "start"] == [("start", 1), ("start", 2)]
    last = output[output.rindex("Traceback (most recent call last)") :].splitlines()
    assert "train.py" in last[1] and "ds-ring" not in "".join(last[:6])
    assert any(line == "ZeroDivisionError: on purpose" for line in last)
    assert last[-2].startswith(
        "ds-ring: attempt 2 failed: rank 1 on localhost raised ZeroDivisionError in step 4"
    )
    assert last[-1].startswith(
        "ds-ring: error: no other attempt: the same error in the same step as attempt 1"
    )


@pytest.mark.situation("launcher", "the job is preempted")
@pytest.mark.needs("mpirun")  # which starts without torch
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.day("15")
def test_a_preempted_job_ends_with_75(workplace: Workplace, number: signal.Signals) -> None:  # noqa: F811
    path = workplace.write(f"engine: mpirun\n{LOCAL}{RUN}", COUNT)
    started = workplace.start([*DS_RING, str(path), "--", "--fault", "preempted", "--steps", "1000"])
    wait_until(lambda: len(list(workplace.folder.glob("ready-*"))) == 2)
    started.send_signal(number)
    status, output = workplace.finish(started)
    assert status == PREEMPTED, output
    assert RunFolder(workplace.folder / "run").events()[-1]["verdict"] == "preempted"


@pytest.mark.night
@pytest.mark.situation("launcher", "two launches of one YAML")
@pytest.mark.needs("mpirun")
@pytest.mark.parametrize("rounds", [1, 10])
def test_of_two_launches_of_a_run_one_is_refused(tmp_path: Path, rounds: int) -> None:
    assert play_rounds(tmp_path, rounds) == [""] * rounds


FAKE_SSH = """#!/bin/bash
while [[ $1 == -* ]]; do [[ $1 == -[po] ]] && shift; shift; done
host=$1; shift
echo "welcome to $host"; printf "{{}} and a line without an end: "
[[ -e {folder}/gone-$host ]] && {{ echo "ssh: connect to host $host: No route to host" >&2; exit 255; }}
kept=(PATH="$PATH" HOME="$HOME" PYTHONPATH="$PYTHONPATH" DS_RING_TEST_MARK="$DS_RING_TEST_MARK")
exec env -i "${{kept[@]}}" bash -c "$*"
"""


def on_two_hosts(place: Workplace, engine: str = "torchrun") -> tuple[str, dict[str, str]]:
    return by_ssh(place, engine, FAKE_SSH.format(folder=place.folder))


@pytest.mark.night
@pytest.mark.parametrize("engine", ["torchrun", MPIRUN])
def test_a_host_that_is_gone_leaves_a_smaller_ring(workplace: Workplace, engine: str) -> None:  # noqa: F811
    yaml, caller = on_two_hosts(workplace, engine)
    (workplace.folder / "armed").touch()
    path = workplace.write(yaml + RUN, COUNT)
    status, output = workplace.finish(
        workplace.start([*DS_RING, str(path), "--", "--fault", "gone"], **caller)
    )
    assert status == 0, output
    assert "going on without node-1: ssh ended with status 255: ssh: connect to host node-1" in output
    assert "attempt 1 failed: rank 1 on node-1 was lost" in output, output
    assert events(workplace) == [("start", 1), ("fault", 1), ("end", 1), ("start", 2), ("end", 2)]
    assert "strikes now" in (workplace.folder / "run/attempt-1/rank-1.log").read_text()
    start = RunFolder(workplace.folder / "run").events()[3]
    assert (start["event"], start["hosts"], start["sequence_parallel_size"]) == ("start", {"node-0": 1}, 1)
    assert (workplace.folder / "rank-1-of-2.json").read_text() == "2"
    assert (workplace.folder / "rank-0-of-1.json").read_text() == "1"


@pytest.mark.night
@pytest.mark.needs("mpirun")
def test_a_ring_below_the_smallest_is_not_taken(workplace: Workplace) -> None:  # noqa: F811
    yaml, caller = on_two_hosts(workplace, "mpirun")
    (workplace.folder / "armed").touch()
    policy = RUN.replace(
        "backoff_seconds: 0.1", "backoff_seconds: 0.1, smallest_ring_size: 2, max_attempts: 2"
    )
    path = workplace.write(yaml + policy, COUNT)
    status, output = workplace.finish(
        workplace.start([*DS_RING, str(path), "--", "--fault", "gone"], **caller)
    )
    assert status == HOSTS_MISSING, output
    assert "relaunch: expected a ring of 2 ranks or more on 1 slots" in output, output


@pytest.mark.needs("mpirun")
def test_a_host_that_takes_no_environment_is_named(workplace: Workplace) -> None:  # noqa: F811
    yaml, caller = on_two_hosts(workplace, "mpirun")
    ssh = workplace.folder / "programs/ssh"
    refusal = '[[ "$*" == *environment_file* && "$*" == *node-1* ]] && exit 255\n'
    ssh.write_text(ssh.read_text().replace("#!/bin/bash\n", f"#!/bin/bash\n{refusal}"))
    status, output = workplace.finish(
        workplace.start([*DS_RING, str(workplace.write(yaml + RUN, COUNT))], **caller)
    )
    assert status == HOSTS_MISSING, output
    assert "the environment to pass ssh, got node-1: ssh ended with status 255" in output, output


def test_a_host_that_never_came_is_named(workplace: Workplace) -> None:  # noqa: F811
    yaml, caller = on_two_hosts(workplace)
    (workplace.folder / "gone-node-1").touch()
    path = workplace.write(yaml + RUN, COUNT)
    status, output = workplace.finish(workplace.start([*DS_RING, str(path)], **caller))
    assert status == HOSTS_MISSING, output
    assert "hosts: expected all 2 to answer" in output and "node-1: ssh ended with status 255" in output
