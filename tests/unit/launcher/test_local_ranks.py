"""Ranks of this machine that do not end well: by the deadline, without a word, or with their parent."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from ds_ring.errors import RingError, RingShapeError
from ds_ring.health.stuck_waits import keep_for_ever
from ds_ring_launcher.run.local_ranks import RanksError, _ended_by_signal, run_ranks


def leave_without_a_word() -> None:
    os._exit(3)


def refuse() -> None:
    raise RingShapeError("expected this, got that; do something")


def return_from_a_stuck_wait() -> str:
    keep_for_ever(
        object()
    )  # as a wait of torch does that a peer's failure has broken: the process ends with 1
    return "its report"


def test_what_a_rank_returned_is_read_though_a_peer_failed_in_its_work() -> None:
    assert run_ranks(return_from_a_stuck_wait, 2, (), threads=1, deadline_s=120) == ["its report"] * 2


@pytest.mark.parametrize(
    ("work", "ranks", "deadline_s", "words"),
    [
        (leave_without_a_word, 2, 0.01, "to end within 0.01 s, got 2 still at work"),
        (leave_without_a_word, 1, 120, "expected all ranks to end with 0, got rank 0 with 3"),
        (refuse, 1, 120, "rank 0: expected this, got that; do something"),
    ],
    ids=["a deadline ends all", "one leaves without a word", "one refuses"],
)
def test_ranks_that_do_not_end_well_are_named(work: Any, ranks: int, deadline_s: float, words: str) -> None:
    with pytest.raises(RanksError, match=words):
        run_ranks(work, ranks, (), threads=1, deadline_s=deadline_s, imported=True)


def fail_beside_a_sleeper() -> None:
    if dist.get_rank() == 1:
        raise RingShapeError("expected this, got that; do something")
    time.sleep(600)


@pytest.mark.night
def test_a_rank_that_raises_is_named_and_no_other_one_outlives_it() -> None:
    before, ticks = psutil.Process().children(recursive=True), []
    with pytest.raises(RingError, match="rank 1: expected this, got that"):
        run_ranks(fail_beside_a_sleeper, 2, (), threads=1, deadline_s=60, waiting=lambda: ticks.append(1))
    assert ticks
    begun = [one for one in psutil.Process().children(recursive=True) if one not in before]
    ranks = [one for one in begun if "resource_tracker" not in " ".join(one.cmdline())]
    assert not psutil.wait_procs(ranks, 10)[1]


def test_sigterm_ends_what_waits_for_ranks() -> None:
    with pytest.raises(SystemExit) as ended, _ended_by_signal():
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM
