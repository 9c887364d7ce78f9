"""The harness itself: results come back, and whatever a rank does, a report comes and nobody is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from ds_ring.errors import RingShapeError
from tests.dist import harness
from tests.dist.harness import (
    RankPool,
    RanksFailed,
    catch_failure,
    catch_refusal,
    catch_refusals,
    check_texts,
    run_ranks,
    run_ranks_collect,
)

Pools = Callable[[int], RankPool]


def sum_of_ranks(rank: int, world_size: int, scale: float, shift: float = 0.0) -> dict[str, Any]:
    total = torch.full((3,), rank * scale + shift)
    dist.all_reduce(total)
    return {"rank": rank, "world": world_size, "total": total, "big": torch.full((1 << 18,), float(rank))}


class Whereabouts(NamedTuple):
    pid: int
    torch_threads: int
    environment: list[str]


def where_am_i(rank: int, world_size: int) -> Whereabouts:
    environment = [os.environ[name] for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "RANK")]
    return Whereabouts(os.getpid(), torch.get_num_threads(), environment)


def raises_on(rank: int, world_size: int, guilty: tuple[int, ...]) -> int:
    if rank in guilty:
        raise RingShapeError(f"rank {rank} expected 4 heads, got 3; pass 4")
    return rank


def raises_while_others_wait(rank: int, world_size: int) -> None:
    if rank == 1:
        raise RingShapeError("one of three left")
    dist.barrier()


def exits(rank: int, world_size: int, how: str) -> int:
    if rank == 1:
        print("printed before the end")
        if how == "os._exit":
            os._exit(3)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    return rank


def hangs(rank: int, world_size: int, how: str) -> int:
    if rank == 1:
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "gloo":
            dist.recv(torch.zeros(1), src=0)
        a_place_worth_naming()
    return rank


def a_place_worth_naming() -> None:
    threading.Event().wait()


def returns_what_does_not_pickle(rank: int, world_size: int) -> object:
    return threading.Lock()


def makes_groups(rank: int, world_size: int) -> int:
    dist.new_group(list(range(world_size)))
    return len(dist.distributed_c10d._world.pg_map)


def draws(rank: int, world_size: int) -> torch.Tensor:
    return torch.rand(2)


def does_not_start(rank: int, world_size: int, folder: str, pipe: object) -> None:
    raise OSError(f"no interface for rank {rank}")


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.day("1", "4")
def test_results_come_back_by_rank(rank_pool: Pools, world_size: int) -> None:
    results = rank_pool(world_size).run(sum_of_ranks, 2.0, shift=1.0)
    expected = 2.0 * sum(range(world_size)) + world_size
    assert [result["rank"] for result in results] == list(range(world_size))
    for rank, result in enumerate(results):
        assert result["world"] == world_size
        torch.testing.assert_close(result["total"], torch.full((3,), expected))
        torch.testing.assert_close(result["big"], torch.full((1 << 18,), float(rank)))


def test_a_pool_keeps_its_processes_and_its_ranks_have_one_thread(rank_pool: Pools) -> None:
    first, second = rank_pool(2).run(where_am_i), rank_pool(2).run(where_am_i)
    assert first == second
    assert len({item.pid for item in first}) == 2
    assert [item.torch_threads for item in first] == [1, 1]
    assert [item.environment for item in first] == [["1", "lo", "0"], ["1", "lo", "1"]]


def test_a_call_starts_from_the_same_seed_and_without_old_groups(rank_pool: Pools) -> None:
    pool = rank_pool(2)
    first, second = pool.run(draws), pool.run(draws)
    assert torch.equal(first[0], second[0]) and torch.equal(first[0], first[1])
    assert pool.run(makes_groups) == [2, 2]
    assert pool.run(makes_groups) == [2, 2]


def test_every_failing_rank_is_in_the_report() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(raises_on, 3, (0, 2))
    report = str(caught.value)
    assert "raises_on on 3 ranks" in report and "2 of 3 ranks failed" in report
    for rank in (0, 2):
        assert f"--- rank {rank} raised RingShapeError" in report
        assert f"rank {rank} expected 4 heads, got 3; pass 4" in report
    assert "--- rank 1" not in report
    assert "in raises_on" in report  # a traceback, not the message alone
    assert [outcome.status for outcome in caught.value.outcomes] == ["raised", "returned", "raised"]


def test_a_failing_rank_does_not_cost_the_whole_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "_GRACE_SECONDS", 1.0)
    started = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(raises_while_others_wait, 3, timeout_s=60)
    assert time.monotonic() - started < 20
    assert "one of three left" in str(caught.value)
    assert {outcome.status for outcome in caught.value.outcomes} == {"raised", "hung"}


def test_collect_gives_type_message_and_time_of_each_rank(rank_pool: Pools) -> None:
    outcomes = rank_pool(3).collect(raises_on, (1, 2))
    assert [outcome.status for outcome in outcomes] == ["returned", "raised", "raised"]
    assert [outcome.rank for outcome in outcomes] == [0, 1, 2]
    assert outcomes[0].value == 0
    assert outcomes[2].error_type == "RingShapeError"
    assert {"RingError", "ValueError", "Exception"} <= set(outcomes[2].error_types)
    assert outcomes[2].message == "rank 2 expected 4 heads, got 3; pass 4"
    assert "in raises_on" in outcomes[2].report
    assert 0 <= outcomes[2].seconds < 1
    assert rank_pool(3).run(raises_on, ()) == [0, 1, 2]  # on a fresh pool


@pytest.mark.parametrize(("how", "code"), [("os._exit", 3), ("kill", -signal.SIGKILL)])
def test_a_rank_that_ends_is_reported_with_code_and_output(how: str, code: int) -> None:
    started = time.monotonic()
    outcomes = run_ranks_collect(exits, 2, how, timeout_s=30)
    assert time.monotonic() - started < 15
    assert [outcome.status for outcome in outcomes] == ["returned", "exited"]
    assert outcomes[1].message == f"exit code {int(code)}"
    assert "printed before the end" in outcomes[1].report


@pytest.mark.day("gloo-in recv")
@pytest.mark.parametrize(
    ("how", "piece"),
    [("wait", "a_place_worth_naming"), ("gloo", "in recv"), ("stop", "no stack: the process is T (stopped)")],
)
def test_a_rank_that_hangs_is_reported_with_its_stack(how: str, piece: str) -> None:
    pool = RankPool(2)
    assert pool.run(draws) is not None
    pids = pool.pids
    started = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        pool.run(hangs, how, timeout_s=1.0)
    assert 1.0 <= time.monotonic() - started < 6
    assert "rank 1 hung after" in str(caught.value)
    assert piece in str(caught.value)
    assert "--- rank 0" not in str(caught.value)
    assert not any(map(is_alive, pids))
    assert pool.run(draws) is not None  # on a fresh pool
    pool.close()


def test_no_child_is_left_behind() -> None:
    with RankPool(3) as pool:
        pool.run(draws)
        pids = pool.pids
        assert len(pids) == 3 and all(map(is_alive, pids))
    assert not any(map(is_alive, pids))
    assert pool.pids == []


def test_a_pool_that_does_not_start_says_so_and_leaves_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.dist.harness.serve", does_not_start)
    pool = RankPool(2)
    with pytest.raises(RanksFailed, match="a pool of 2 ranks did not start") as caught:
        pool.run(draws)
    assert "exited exit code 1" in str(caught.value)
    assert pool.pids == []
    monkeypatch.undo()
    assert len(pool.run(draws)) == 2
    pool.close()


def spoil(rank: int, world_size: int) -> None:
    os.environ["SPOILT"] = "yes"


def is_spoilt(rank: int, world_size: int) -> bool:
    return "SPOILT" in os.environ


def lacks(rank: int, world_size: int, ranks: tuple[int, ...]) -> int:
    if rank in ranks:
        pytest.skip(f"rank {rank} has no fp16")
    return rank


THREE_TESTS = """
from tests.dist.test_harness import is_spoilt, lacks, spoil

def test_leaves_its_ranks_spoilt_and_passes(rank_pool):
    rank_pool(2).run(spoil)
    assert rank_pool(2).run(is_spoilt) == [True, True]

def test_fails_by_its_own_assertion(rank_pool):
    assert rank_pool(2).run(is_spoilt) == [False, False]

def test_passes_alone_and_here(rank_pool):
    assert rank_pool(2).run(is_spoilt) == [False, False]

def test_lacks_something(rank_pool):
    rank_pool(2).run(lacks, (0, 1))
"""


@pytest.mark.night
def test_ranks_of_a_failed_test_are_not_used_again(tmp_path: Path) -> None:
    (tmp_path / "test_three.py").write_text(THREE_TESTS)
    root = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "tests.dist.conftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert "1 failed, 2 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
    assert "SKIPPED [1]" in done.stdout and "rank 0 has no fp16" in done.stdout


def test_what_does_not_pickle_is_an_error_and_no_hang(rank_pool: Pools) -> None:
    with pytest.raises(TypeError, match="top level of a module"):
        rank_pool(2).run(lambda rank, world_size: rank)
    with pytest.raises(RanksFailed, match="cannot pickle"):
        rank_pool(2).run(returns_what_does_not_pickle)


@pytest.mark.parametrize("texts", [{}, {"a": "RingError: left"}, {"a": "RingError: right", "b": ""}])
def test_texts_without_a_name_or_its_words_are_found(texts: dict[str, str]) -> None:
    right = catch_refusals({"a": lambda: raises_on(0, 1, (0,))})
    check_texts([right], {"a": "RingShapeError: rank 0 expected 4 heads"})
    with pytest.raises(AssertionError):
        check_texts([right, texts], {"a": "RingShapeError: rank 0 expected 4 heads"})
    assert catch_failure(raises_on, 0, 1, ())[:3] == ("", ("NoneType", "object"), "None")
    assert catch_failure(int, "x").error == "ValueError" and catch_refusal(int) == ""


def leave_threads_behind(rank: int, world_size: int, count: int) -> None:
    for _ in range(count):
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()


def test_ranks_with_many_threads_are_replaced() -> None:
    with RankPool(2) as pool:
        pool.run(leave_threads_behind, 1)
        first = pool.pids
        pool.run(leave_threads_behind, 80)
        assert pool.pids == first
        assert pool.run(leave_threads_behind, 0) == [None, None]
        assert not set(pool.pids) & set(first)
