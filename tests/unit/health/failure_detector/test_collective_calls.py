"""Who is behind in a collective that is not ds_ring's, from heartbeats with times. No sockets, no clock."""

from __future__ import annotations

from typing import Any

import pytest

from ds_ring.health.failure_detector.verdicts import LEFT_S, FailureDetector

HEARTBEAT_S = 2.0
SCRIPT = ("the training script", 10.0, "step_timeout_seconds")
STEP = ("engine.step", 6.0, "hop_timeout_seconds")

pytestmark = pytest.mark.situation("late ranks", "a rank is late outside of a pass")


def detector_of(ranks: int = 3) -> FailureDetector:
    detector = FailureDetector(ranks, HEARTBEAT_S)
    for rank in range(ranks):
        detector.join(rank, 0.0)
    return detector


def beat(
    detector: FailureDetector,
    rank: int,
    now: float,
    calls: dict[str, int] | None = None,
    stage: tuple[str, float, str] = SCRIPT,
    kind: str = "beat",
) -> None:
    place, limit, key = stage
    detector.hear(rank, {"kind": kind, "in": place, "limit": limit, "key": key, "calls": calls or {}}, now)


def beats(
    detector: FailureDetector, until: float, since: float = 0.0, late: Any = SCRIPT, ranks: int = 3
) -> None:
    """All ranks beat each half second; the last one is where `late` says."""
    now = since
    while now < until:
        for rank in range(ranks):
            beat(detector, rank, now, stage=late if rank == ranks - 1 else SCRIPT)
        now += 0.5


def culprit(detector: FailureDetector, now: float) -> int | None:
    fault = detector.look(now)
    return None if fault is None else fault.rank


def rank_2_is_behind(late: Any = SCRIPT) -> FailureDetector:
    detector = detector_of()
    for rank in range(3):
        beat(detector, rank, 0.0, {"0": 7 if rank < 2 else 6, "": 3}, late if rank == 2 else SCRIPT)
    return detector


def test_the_rank_that_has_begun_fewer_collectives_is_blamed_after_the_limit_of_where_it_is() -> None:
    for stage in (SCRIPT, STEP):
        detector = rank_2_is_behind(stage)
        beats(detector, stage[1] + 1, late=stage)
        assert detector.look(stage[1] - 0.1) is None
        assert culprit(detector, stage[1] + 0.3) == 2
        assert detector.fault is not None and stage[2] in detector.fault.cause
        assert "collective 7 of process group 0" in detector.fault.cause


def test_it_is_named_after_a_tenth_of_the_limit_once_the_numbers_are_not_old() -> None:
    detector = rank_2_is_behind()
    detector.look(0.9)
    assert detector.late_ranks(0.9) == {}
    detector.look(1.2)
    (late,) = detector.late_ranks(1.2).values()
    assert (late.rank, late.waiting, late.limit_s, late.key) == (2, 0, 10.0, "step_timeout_seconds")
    beat(detector, 2, 2.0, {"0": 7})
    detector.look(2.0)
    assert detector.late_ranks(2.0) == {}, "it has come"


def test_in_a_call_that_is_watched_as_a_whole_the_one_that_sleeps_in_it_is_named_and_blamed() -> None:
    """All report that they wait for all others, the sleeper too: its call has not ended, either."""
    detector = rank_2_is_behind()
    for rank in range(3):
        others = [[other, other] for other in range(3) if other != rank]
        wait = {
            "kind": "wait", "on": others, "place": [-1, 2], "what": "the groups", "limit": 8.0, "key": "k",
        }  # fmt: skip
        detector.hear(rank, wait, 0.3)
    beats(detector, 9.0)
    assert detector.late_ranks(1.0) == {}
    (late,) = detector.late_ranks(1.2).values()
    assert (late.rank, late.limit_s, late.key) == (2, 8.0, "k")
    detector.hear(0, {"kind": "timeout", "on": [[1, 2]], "cause": "late"}, 8.3)
    assert culprit(detector, 8.9) == 2


def test_where_it_was_when_it_was_asked_is_in_the_fault() -> None:
    detector = rank_2_is_behind()
    detector.hear(2, {"kind": "at", "text": "load (train.py:12)"}, 3.0)
    beats(detector, 11.0, since=3.0)
    assert culprit(detector, 11.0) == 2
    assert detector.fault is not None and detector.fault.cause.endswith("it was in load (train.py:12)")
    assert detector.whereabouts(2) == "load (train.py:12)"


def test_a_rank_that_goes_to_and_fro_has_the_longer_of_the_limits() -> None:
    """It evaluates: many short calls of the engine."""
    detector = rank_2_is_behind()
    for number in range(40):
        beat(detector, 2, 0.5 + number / 4, stage=(SCRIPT, STEP)[number % 2])
    beats(detector, 9.9, since=9.5, late=STEP)
    assert detector.look(9.9) is None
    assert culprit(detector, 10.1) == 2


def test_ranks_that_are_blocked_by_the_late_one_in_another_group_are_not_blamed() -> None:
    detector = detector_of(4)
    # Rank 1 waits for 2 in group 3, and 0 and 3 wait for 1 and 2 in the default group.
    for rank, calls in enumerate(({"0": 7}, {"0": 6, "3": 2}, {"0": 6, "3": 1}, {"0": 7})):
        beat(detector, rank, 0.0, calls)
    beats(detector, 11.0, ranks=4)
    assert culprit(detector, 11.0) == 2


def test_numbers_that_differ_for_ever_blame_nobody_while_the_job_goes_on() -> None:
    """gloo counts what a script sends, of which ranks send different numbers."""
    detector = rank_2_is_behind()
    for now in range(1, 200):
        for rank in range(3):
            beat(detector, rank, float(now), {"~1": now})
        assert detector.look(now + 0.5) is None


def test_a_group_of_the_ring_is_not_compared() -> None:
    detector = detector_of()
    for rank in range(3):
        beat(detector, rank, 0.0, {"~1": rank})
    beats(detector, 30.0)
    assert detector.look(30.0) is None


def test_a_pause_of_the_monitor_is_not_counted() -> None:
    detector = rank_2_is_behind()
    detector.look(1.5)
    detector.forgive(100.0)
    beats(detector, 109.0, since=101.5)
    assert detector.look(109.0) is None
    beats(detector, 111.0, since=109.0)
    assert culprit(detector, 110.5) == 2


def test_a_process_that_ended_before_a_collective_of_the_others_left_too_early() -> None:
    detector = rank_2_is_behind()
    beat(detector, 2, 0.2, kind="bye")
    beats(detector, 5.0, ranks=2)
    assert culprit(detector, 1.1 + LEFT_S) == 2
    assert detector.fault is not None and "it left (its process exited)" in detector.fault.cause


def test_a_mesh_that_is_closed_is_no_process_that_ended() -> None:
    detector = rank_2_is_behind()
    detector.hear(2, {"kind": "bye"}, 0.2)
    beats(detector, 30.0, ranks=2)
    assert detector.look(30.0) is None


def test_of_ranks_in_one_call_that_is_watched_as_a_whole_the_one_behind_is_blamed() -> None:
    detector = detector_of()
    for rank in range(3):
        others = [[other, other] for other in range(3) if other != rank]
        message = {"kind": "wait", "on": others, "place": [-1, 2], "what": "the making of groups"}
        detector.hear(rank, message, 0.1)
        beat(detector, rank, 0.2, {"": 4 if rank < 2 else 3})
    detector.hear(0, {"kind": "timeout", "on": [[1, 2]], "cause": "late"}, 5.0)
    beats(detector, 6.0, since=4.5)
    assert culprit(detector, 6.0) == 2
