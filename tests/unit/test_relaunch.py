"""Relaunch as arithmetic: who failed, whether there is another attempt, which ring is next."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_ring.errors import RingConfigError
from ds_ring_launcher.cluster.cluster import Host, Relaunch
from ds_ring_launcher.cluster.cluster_file import read_cluster
from ds_ring_launcher.run.culprit import find_culprit
from ds_ring_launcher.run.job import Job
from ds_ring_launcher.run.presence import HostPresence, HostsMissing
from ds_ring_launcher.run.rank import describe_fault
from ds_ring_launcher.run.relaunch import (
    Outcome,
    _RelaunchedRun,
    convert,
    count_saved_ranks,
    decide,
    hosts_for,
    read_outcome,
    ring_for,
)
from ds_ring_launcher.run.run_folder import (
    PREEMPTED,
    TOLD_TO_END,
    RankFault,
    RunFolder,
    write_exit,
    write_fault,
)
from ds_ring_launcher.run.run_records import newest_checkpoint, read_exits, read_faults

POLICY = Relaunch(checkpoints="c", max_attempts=3, backoff_seconds=1, backoff_most_seconds=3)
HOSTS = (Host(name="node-0", slots=2), Host(name="node-1", slots=2))
BUG = RankFault(3, 10.0, 7, "error", "ZeroDivisionError", "on purpose", ("t.py:1", "t.py:9"), "Traceback ...")


def config(sequence: int = 4, micro: int = 2, **section: Any) -> dict[str, Any]:
    sizes = {"train_micro_batch_size_per_gpu": micro, "sequence_parallel_size": sequence}
    return {**sizes, "ring_attention": section}


def outcome(
    tmp_path: Path, attempt: int, *faults: RankFault, progressed: bool = False, status: int = 1
) -> Outcome:
    folder = tmp_path / f"attempt-{attempt}"
    folder.mkdir()
    for fault in faults:
        write_fault(folder, fault)
    return read_outcome(attempt, folder, HOSTS, status, None, progressed)


def test_a_bug_ends_it_the_second_time(tmp_path: Path) -> None:
    first, second = (outcome(tmp_path, n, BUG, progressed=n == 1) for n in (1, 2))
    assert decide([first], POLICY).again
    decision = decide([first, second], POLICY)
    assert not decision.again and "the same error in the same step as attempt 1" in decision.why
    assert decision.status == 1


@pytest.mark.parametrize("change", [{"step": 8}, {"frames": ("t.py:1", "t.py:10")}, {"type": "KeyError"}])
def test_another_error_or_step_is_not_the_same_bug(tmp_path: Path, change: dict[str, Any]) -> None:
    other = outcome(tmp_path, 2, replace(BUG, **change))
    assert decide([outcome(tmp_path, 1, BUG), other], POLICY).again


@pytest.mark.parametrize("kind", ["lost", "storage"])
def test_what_may_pass_is_tried_until_the_attempts_are_used_up(tmp_path: Path, kind: str) -> None:
    history, waits = [], []
    for attempt in range(1, 4):
        history.append(outcome(tmp_path, attempt, replace(BUG, kind=kind, blames=1)))
        waits.append(decide(history, POLICY).wait_seconds if decide(history, POLICY).again else None)
    assert waits == [1.0, 2.0, None]
    assert "3 attempts in a row" in decide(history, POLICY).why


def test_attempts_count_from_the_last_newer_checkpoint(tmp_path: Path) -> None:
    lost = replace(BUG, kind="lost", blames=1)
    history = [outcome(tmp_path, n, lost, progressed=n in (3, 6)) for n in range(1, 8)]
    assert decide(history[:6], POLICY).wait_seconds == 1.0
    assert decide(history, POLICY).wait_seconds == 2.0  # the sixth counts as one, the seventh as two


def test_a_preempted_attempt_has_not_failed(tmp_path: Path) -> None:
    folder = tmp_path / "attempt-1"
    folder.mkdir()
    for rank in range(4):
        write_exit(folder, rank, PREEMPTED)
    by_itself = read_outcome(1, folder, HOSTS, 1, None, True)
    assert by_itself.verdict == "preempted" and by_itself.culprit is None
    assert decide([by_itself], POLICY).again
    told = read_outcome(1, folder, HOSTS, 128 + 15, 15, True)
    assert (decide([told], POLICY).again, decide([told], POLICY).status) == (False, PREEMPTED)
    assert decide([by_itself], None).status == PREEMPTED == os.EX_TEMPFAIL
    saved_nothing = [read_outcome(attempt, folder, HOSTS, 1, None, False) for attempt in range(1, 4)]
    assert decide(saved_nothing[:2], POLICY).again and not decide(saved_nothing, POLICY).again
    for path in folder.iterdir():
        path.unlink()
    interrupted = read_outcome(1, folder, HOSTS, 143, 15, False)
    assert (decide([interrupted], POLICY).status, interrupted.verdict) == (128 + 15, "interrupted")


def test_the_culprit_is_who_failed_by_itself_then_who_is_named_then_who_is_silent(tmp_path: Path) -> None:
    lost = RankFault(0, 1.0, 5, "lost", "RingPeerError", "it is gone", (), "", blames=2)
    for rank in range(4):
        (tmp_path / f"rank-{rank}.log").touch()
    write_exit(tmp_path, 0, TOLD_TO_END)
    write_exit(tmp_path, 1, TOLD_TO_END)
    write_exit(tmp_path, 3, TOLD_TO_END)
    silent = find_culprit(tmp_path, HOSTS, 1)
    assert (silent.kind, silent.rank, silent.host) == ("lost", 2, "node-1")
    write_fault(tmp_path, lost)
    named = find_culprit(tmp_path, HOSTS, 1)
    assert (named.rank, named.host) == (2, "node-1") and "in step 5" in named.what
    assert named.what.endswith(", says rank 0")  # it was "say ranks 0"
    alone = tmp_path / "alone"
    alone.mkdir()
    write_fault(alone, replace(lost, blames=None))
    nobody = find_culprit(alone, HOSTS, 1)
    assert (nobody.kind, nobody.rank, nobody.what) == ("lost", None, "ranks lost each other: it is gone")
    write_fault(tmp_path, replace(lost, rank=1))
    assert find_culprit(tmp_path, HOSTS, 1).what.endswith(", say ranks 0, 1")
    write_fault(tmp_path, BUG)
    own = find_culprit(tmp_path, HOSTS, 1)
    assert (own.kind, own.rank, own.fault) == ("error", 3, BUG)
    assert own.what == "rank 3 on node-1 raised ZeroDivisionError in step 7: on purpose"


def test_what_an_exception_says_of_itself() -> None:
    from ds_ring.errors import RingCheckpointError, RingPeerError

    def raised(error: BaseException) -> RankFault:
        try:
            raise error
        except BaseException as caught:
            return describe_fault(caught, 1, 4)

    bug = raised(KeyError("x"))
    assert (bug.kind, bug.step, bug.rank) == ("error", 4, 1) and bug.frames[-1].startswith(__file__)
    assert "KeyError: 'x'" in bug.traceback
    peer = raised(RingPeerError(1, 2, 3, "its connection ended"))
    assert (peer.kind, peer.blames) == ("lost", 3)
    world = raised(RingPeerError(1, 2, 0, "rank 5 of the world: its connection ended"))
    assert world.blames == 5
    assert raised(RuntimeError("nccl: Connection reset by peer, No space left on device")).kind == "error"
    assert raised(RingCheckpointError("full")).kind == "storage"
    assert raised(OSError(28, "No space left on device")).kind == "storage"
    assert raised(OSError(2, "No such file")).kind == "error"


def test_an_error_of_a_rank_without_a_run_folder_is_described_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ds_ring.data.run_folder import FOLDER_VARIABLE, record_fault
    from ds_ring.errors import RingPeerError

    record_fault(1, ValueError("nobody asks"), 3)  # no launcher has named a folder
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    record_fault(0, RingPeerError(0, None, 1, "it ended with ValueError: broken data"), 4)
    assert find_culprit(tmp_path, HOSTS, 1).rank == 1
    record_fault(1, ValueError("broken data"), 4)
    record_fault(1, ValueError("another"), 5)  # the first description stays
    assert (
        find_culprit(tmp_path, HOSTS, 1).what == "rank 1 on node-0 raised ValueError in step 4: broken data"
    )


def test_what_compiled_code_raised_is_told_by_where_it_was_called() -> None:
    import torch

    from ds_ring.errors import RingPeerError

    def caught(call: Any) -> RankFault:
        try:
            call()
        except BaseException as error:
            return describe_fault(error, 1, 4)
        raise AssertionError

    def wrapped() -> None:
        try:
            raise RingPeerError(1, 2, 3, "its connection ended")
        except RingPeerError as error:
            raise ValueError("training failed") from error

    calls: dict[str, Any] = {"__name__": "torch.distributed.distributed_c10d", "torch": torch}
    exec(
        "def collective():\n    torch.ones(2).view(3)", calls
    )  # as gloo does, it raises a RuntimeError in C++
    in_collective, in_script = caught(calls["collective"]), caught(lambda: torch.ones(2).view(3))
    assert (in_collective.kind, in_collective.raised) == ("lost", False)
    assert (in_script.kind, in_script.raised) == ("error", False)
    assert caught(lambda: torch.save(torch.ones(1 << 20), "/dev/full")).kind == "storage"
    assert (caught(wrapped).kind, caught(wrapped).blames) == ("lost", 3)


def at(path: Path, seconds: float) -> None:
    os.utime(path, (seconds, seconds))


@pytest.mark.parametrize("killed_first", [True, False])
def test_the_first_to_end_is_the_culprit(tmp_path: Path, killed_first: bool) -> None:
    """Rank 1 was killed; before or after that rank 0 raised, in compiled code or by itself."""
    for rank in range(4):
        (tmp_path / f"rank-{rank}.log").touch()
        (tmp_path / f"rank-{rank}.stopped").touch()
        at(tmp_path / f"rank-{rank}.stopped", 1000.0)
    for raised in (True, False):
        fault = replace(BUG, rank=0, raised=raised, message="nccl: Connection reset by peer")
        write_fault(tmp_path, fault)
        at(tmp_path / "rank-0.fault.json", 1001.0 if killed_first else 999.0)
        found = find_culprit(tmp_path, HOSTS, 1)
        assert (found.kind, found.rank) == (("lost", 1) if killed_first else ("error", 0))
        assert found.signature is None or not killed_first


def test_a_rank_that_left_in_the_middle_is_named_with_its_status(tmp_path: Path) -> None:
    for number, status in enumerate((0, 17)):
        folder = tmp_path / str(number)
        folder.mkdir()
        for rank in range(2):
            (folder / f"rank-{rank}.log").touch()
        write_exit(folder, 1, status, step=3)
        at(folder / "rank-1.exit.json", 1000.0)
        for blames in (1, None):  # by ds_ring's monitor; by gloo, which names nobody
            fault = replace(BUG, rank=0, kind="lost", type="RingPeerError", blames=blames)
            write_fault(folder, fault)
            found = find_culprit(folder, HOSTS[:1], 1)
            assert found.what == f"rank 1 on node-0 left with status {status} while others were at work"
            assert (found.kind, found.signature) == ("left", ("left", 1) if status == 0 else None)
    history = [Outcome(n, 1, None, False, False, find_culprit(tmp_path / "0", HOSTS[:1], 1)) for n in (1, 2)]
    assert decide(history[:1], POLICY).again and not decide(history, POLICY).again


@pytest.mark.parametrize(
    ("given", "planned", "ranks", "smallest", "expected"),
    [
        (config(4), 4, 2, 1, (2, 2, 2, 1)),  # ring 4 to 2, one replica before and after
        (config(4), 4, 3, 1, (2, 2, 2, 1)),  # 3 does not divide 4
        (config(4), 4, 2, 2, (2, 2, 2, 1)),  # the smallest itself is
        (config(4), 4, 2, 4, None),  # a ring below the smallest is not taken
        (config(4), 8, 7, 1, (4, 4, 2, 2)),  # the ring stays whole, with half of the replicas
        (config(4, 3), 12, 8, 1, (4, 4, 3, 3)),  # 9 samples do not divide by 2
        (config(4, ring_size=2, ulysses_size=2), 4, 2, 1, (2, 2, 2, 1)),  # Ulysses 2 x ring 1
        (config(8, ring_size=8), 8, 6, 1, (4, 4, 2, 1)),
    ],
)
def test_the_next_ring_keeps_the_samples_of_a_step(
    given: dict[str, Any], planned: int, ranks: int, smallest: int, expected: tuple[int, ...] | None
) -> None:
    before = json.dumps(given)
    ring = ring_for(given, planned, ranks, smallest)
    found = None
    if ring is not None:
        made = ring.config
        steps = made.get("gradient_accumulation_steps", 1)
        found = (ring.world_size, ring.sequence_size, made["train_micro_batch_size_per_gpu"], steps)
        replicas, planned_replicas = (
            ring.world_size // ring.sequence_size,
            planned // given["sequence_parallel_size"],
        )
        assert found[2] * steps * replicas == given["train_micro_batch_size_per_gpu"] * planned_replicas
    assert found == expected
    assert json.dumps(given) == before


def test_a_host_that_is_gone_leaves_a_smaller_ring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(config(4)))
    (tmp_path / "cluster.yaml").write_text(
        "hosts: [{name: node-0, slots: 2}, {name: node-1, slots: 2}]\nscript: train.py\n"
        "deepspeed_config: ds.json\nrun_folder: run\nmaster_port: 23456\n"
        "relaunch: {checkpoints: saved, smallest_ring_size: 2}\n"
    )
    cluster = read_cluster(tmp_path / "cluster.yaml")
    run = _RelaunchedRun(Job(cluster, 0, 23456, tmp_path, {}, secret="old"), [], "token")
    run.number = run.folder.start_attempt("token")
    only = HostPresence(cluster.hosts[1:], {"node-0": "gone"})
    with pytest.raises(HostsMissing, match=r"got 1 that did not: node-0: gone; start them"):
        run._job_for(only)  # of the first attempt
    run.history.append(Outcome(1, 1, None, False, False, None))
    job = run._job_for(only)
    assert job.cluster.hosts == cluster.hosts[1:] and job.cluster.master_address == "node-1"
    assert json.loads(job.cluster.deepspeed_config.read_text())["sequence_parallel_size"] == 2
    assert (job.port, job.attempt_folder) == (23456, run.folder.attempt(1)) and job.secret != "old"
    said = capsys.readouterr().err
    assert "going on without node-0: gone" in said
    assert "2 ranks are left; 2 of them to a sequence" in said
    few = HostPresence((Host(name="node-1", slots=1),), {"node-0": "gone"})
    with pytest.raises(RingConfigError, match=r"expected a ring of 2 ranks or more on 1 slots, got .*none"):
        run._job_for(few)
    capsys.readouterr()
    run._report(outcome(tmp_path, 9, BUG), decide([Outcome(9, 1, None, False, False, None)], None))
    said = capsys.readouterr().err
    assert said.startswith(
        f"{BUG.traceback}ds-ring: attempt 1 failed: rank 3 on node-1 raised ZeroDivisionError"
    )
    assert said.endswith("ds-ring: error: no other attempt: the YAML has no relaunch\n")


def test_the_last_hosts_lose_their_slots() -> None:
    assert hosts_for(HOSTS, 3) == (HOSTS[0], Host(name="node-1", slots=1))
    assert hosts_for(HOSTS, 2) == (HOSTS[0],)


def test_the_run_folder(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    assert (run.start_attempt(), run.start_attempt()) == (1, 2)
    run.record("start", 2, hosts={"node-0": 2})
    with open(run.path / "attempts.jsonl", "a") as file:
        file.write('{"event": "e')  # cut short by a crash
    assert [event["event"] for event in run.events()] == ["start"]
    write_fault(run.attempt(2), BUG)
    assert read_faults(run.attempt(2)) == [BUG] and read_exits(run.attempt(2)) == {}


def test_the_newest_checkpoint_and_its_ranks(tmp_path: Path) -> None:
    assert newest_checkpoint(None) is None and newest_checkpoint(tmp_path) is None
    (tmp_path / "latest").write_text("global_step4\n")
    (tmp_path / "global_step4").mkdir()
    (tmp_path / "global_step4" / "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt").touch()
    found = newest_checkpoint(tmp_path)
    assert found is not None and found[0] == "global_step4"
    assert count_saved_ranks(tmp_path / "global_step4") == 4


def test_a_checkpoint_that_any_number_of_ranks_loads_is_not_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ds_ring.checkpoint import manifest, resize

    monkeypatch.setattr(manifest, "verify_checkpoint", lambda *_: None)
    monkeypatch.setattr(resize, "resize_checkpoint", lambda folder, tag, attempt: f"{tag} for others")
    (tmp_path / "latest").write_text("global_step4")
    (tmp_path / "global_step4").mkdir()
    assert convert(tmp_path, 2, tmp_path) == "global_step4"  # ZeRO 0
    (tmp_path / "global_step4" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").touch()
    assert convert(tmp_path, 2, tmp_path) == "global_step4"
    assert convert(tmp_path, 4, tmp_path) == "global_step4 for others"


def test_a_checkpoint_that_is_not_whole_gives_way_to_the_one_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(tmp_path, 2, tmp_path) is None
    for step in (2, 4):
        (tmp_path / f"global_step{step}").mkdir()
    (tmp_path / "latest").write_text("global_step4")
    assert convert(tmp_path, 2, tmp_path) is None
    assert "global_step4: not whole, trying the one before: " in capsys.readouterr().err
