"""The failure detector: who is to blame, from events with times. No sockets, no clock."""

from __future__ import annotations

import time

import pytest

from ds_ring.health.failure_detector.verdicts import JOIN_S, LEFT_S, FailureDetector
from ds_ring.health.failure_detector.wire import GRACE_S, ranges_of

TIMEOUT_S = 10.0


def ranges(ranks: list[int]) -> list[list[int]]:
    """As they come out of a line of JSON."""
    return [list(one) for one in ranges_of(ranks)]


def detector_of(ranks: int = 4) -> FailureDetector:
    detector = FailureDetector(ranks, TIMEOUT_S)
    for rank in range(ranks):
        detector.join(rank, 0.0)
    return detector


def waits(
    detector: FailureDetector, rank: int, on: int | list[int], now: float, place: tuple[int, int] = (1, 1)
) -> None:
    on = on if isinstance(on, list) else [on]
    detector.hear(
        rank, {"kind": "wait", "on": ranges(on), "place": list(place), "what": f"call {place[0]}"}, now
    )


def accuses(detector: FailureDetector, rank: int, on: int, now: float) -> None:
    detector.hear(rank, {"kind": "timeout", "on": [[on, on]], "cause": "late"}, now)


def culprit(detector: FailureDetector, now: float) -> int | None:
    fault = detector.look(now)
    return None if fault is None else fault.rank


def test_ranks_are_written_as_the_fewest_ranges() -> None:
    assert ranges_of([5, 2, 0, 1]) == ((0, 2), (5, 5))
    assert ranges_of(range(1000)) == ((0, 999),), "a line of JSON holds a wait for all ranks"


def test_nobody_is_blamed_while_all_beat() -> None:
    detector = detector_of()
    for now in range(1, 100):
        for rank in range(4):
            detector.hear(rank, {"kind": "beat", "number": now}, float(now))
        assert detector.look(now + 0.5) is None


def test_the_end_of_a_connection_is_a_death_unless_goodbye_was_said() -> None:
    detector = detector_of()
    detector.hear(1, {"kind": "bye"}, 1.0)
    detector.close(1)
    assert detector.look(1.0) is None
    detector.close(2)
    assert culprit(detector, 1.0) == 2


def test_silence_is_blamed_after_the_timeout_and_not_before() -> None:
    detector = detector_of(2)
    detector.hear(0, {"kind": "beat"}, 9.0)
    assert detector.look(10.0) is None
    assert culprit(detector, 10.1) == 1


def test_a_pause_of_the_monitor_itself_is_forgiven() -> None:
    detector = detector_of(2)
    detector.forgive(30.0)
    assert detector.look(39.0) is None


def test_a_pause_of_the_monitor_gives_ranks_as_long_to_join_and_to_answer() -> None:
    """(A seeded fault left `_last_join` as it was.)"""
    detector = FailureDetector(4, TIMEOUT_S)
    for rank, at in ((0, 0.0), (1, 0.1), (3, 0.6)):
        detector.join(rank, at)
    detector.hear(1, {"kind": "broken", "cause": "gloo says so"}, 0.2)
    detector.forgive(30.0)
    assert detector.look(30.55 + GRACE_S) is None, "rank 3 has come only now: rank 2 may be on its way"
    assert culprit(detector, 30.6 + GRACE_S) == 2


def test_a_pause_of_the_monitor_ends_no_wait() -> None:
    detector = detector_of()
    waits(detector, 1, 0, 1.0)
    accuses(detector, 1, 0, 1.1)
    detector.hear(2, {"kind": "bye"}, 1.0)
    waits(detector, 3, 2, 1.0)
    detector.forgive(30.0)
    assert detector.look(31.0 + GRACE_S) is None
    assert culprit(detector, 31.1 + GRACE_S) == 0


def test_the_first_fault_wins() -> None:
    detector = detector_of()
    detector.close(3)
    detector.hear(1, {"kind": "failed", "cause": "something else"}, 0.1)
    assert culprit(detector, 0.2) == 3


def test_waits_are_followed_to_the_one_who_does_not_wait() -> None:
    detector = detector_of()
    waits(detector, 1, 0, 1.0)
    waits(detector, 0, 3, 1.0)
    waits(detector, 3, 2, 1.0)
    accuses(detector, 1, 0, 2.0)
    assert detector.look(2.0) is None, "others may say more"
    assert culprit(detector, 2.0 + GRACE_S) == 2


def test_a_death_heard_within_the_grace_comes_before_an_accusation() -> None:
    detector = detector_of()
    waits(detector, 1, 0, 1.0)
    accuses(detector, 1, 0, 1.0)
    detector.close(2)
    assert culprit(detector, 1.0 + GRACE_S) == 2


def test_in_a_circle_the_one_that_is_elsewhere_is_blamed() -> None:
    detector = detector_of()
    for rank in range(4):
        waits(detector, rank, (rank - 1) % 4, 1.0, place=(2, 0) if rank == 2 else (1, 3))
    accuses(detector, 0, 3, 2.0)
    assert culprit(detector, 3.0) == 2
    assert detector.fault is not None and "wait for each other" in detector.fault.cause


def test_in_a_circle_of_equals_the_accused_is_blamed() -> None:
    detector = detector_of(2)
    waits(detector, 0, 1, 1.0)
    waits(detector, 1, 0, 1.0)
    accuses(detector, 1, 0, 2.0)
    assert culprit(detector, 3.0) == 0


def test_in_a_collective_the_one_that_is_not_there_is_blamed() -> None:
    detector = detector_of()
    for rank in (0, 1, 3):
        waits(detector, rank, [r for r in range(4) if r != rank], 1.0)
    detector.hear(1, {"kind": "timeout", "on": [[0, 0], [2, 3]], "cause": "late"}, 2.0)
    assert culprit(detector, 3.0) == 2


def test_who_leaves_while_others_wait_is_blamed_after_a_moment() -> None:
    detector = detector_of()
    detector.hear(2, {"kind": "bye"}, 1.0)
    waits(detector, 3, 2, 1.5)
    waits(detector, 0, 3, 1.5)
    assert detector.look(1.5 + LEFT_S) is None
    assert culprit(detector, 1.6 + LEFT_S) == 2


def test_a_broken_collective_is_the_fault_of_who_left_first() -> None:
    detector = detector_of()
    detector.hear(3, {"kind": "broken", "cause": "gloo says so"}, 1.0)
    assert detector.look(1.0 + GRACE_S) is None, "nobody has left: not for us to say"
    detector.hear(2, {"kind": "bye"}, 2.0)
    detector.hear(1, {"kind": "bye"}, 2.1)
    detector.hear(0, {"kind": "broken", "cause": "gloo says so"}, 2.2)
    assert detector.look(2.2) is None, "a death may be heard of"
    assert culprit(detector, 2.2 + GRACE_S) == 2


def test_a_broken_collective_is_the_fault_of_who_never_joined_once_nobody_else_comes() -> None:
    detector = FailureDetector(4, TIMEOUT_S)
    detector.join(0, 0.0)
    detector.join(1, 0.1)
    detector.hear(1, {"kind": "broken", "cause": "gloo says so"}, 0.2)
    detector.join(3, 0.6)
    assert detector.look(0.5 + GRACE_S) is None, "rank 3 has come only now: rank 2 may be on its way"
    assert culprit(detector, 0.6 + GRACE_S) == 2
    assert detector.fault is not None and "gloo says so" in detector.fault.cause


def test_a_wait_that_ended_blames_nobody() -> None:
    detector = detector_of()
    detector.hear(2, {"kind": "bye"}, 1.0)
    waits(detector, 3, 2, 1.5)
    detector.hear(3, {"kind": "go"}, 2.0)
    assert detector.look(9.0) is None


def test_who_never_joins_is_blamed() -> None:
    detector = FailureDetector(3, TIMEOUT_S)
    detector.join(0, 5.0)
    detector.join(2, 6.0)
    for rank in (0, 2):
        detector.hear(rank, {"kind": "beat"}, 15.0)
    assert detector.look(6.0 + TIMEOUT_S) is None
    assert culprit(detector, 6.1 + TIMEOUT_S) == 1


def test_a_rank_is_not_late_while_others_still_join() -> None:
    """(1,024 ranks on two busy cores took longer than the timeout from the first to the last.)"""
    detector = FailureDetector(4, TIMEOUT_S)
    for rank in range(3):
        at = rank * 0.9 * TIMEOUT_S
        detector.join(rank, at)
        for other in range(rank):
            detector.hear(other, {"kind": "beat"}, at)
        assert detector.look(at) is None


def test_a_short_heartbeat_leaves_time_to_join() -> None:
    detector = FailureDetector(2, 0.1)
    detector.join(0, 5.0)
    detector.hear(0, {"kind": "beat"}, 5.0 + JOIN_S)
    assert detector.look(5.0 + JOIN_S) is None


@pytest.mark.parametrize(
    "message",
    [
        None, [], 7, "wait", {}, {"kind": "become root"}, {"kind": ["wait"]},
        {"kind": "wait"},
        {"kind": "wait", "on": 3, "place": [1, 1], "what": ""},
        {"kind": "wait", "on": [], "place": [1, 1], "what": ""},
        {"kind": "wait", "on": [1], "place": [1, 1], "what": ""},
        {"kind": "wait", "on": [[0, 0]], "place": [1, 1], "what": ""},
        {"kind": "wait", "on": [[1, 4]], "place": [1, 1], "what": ""},
        {"kind": "wait", "on": [[0, 10**12]], "place": [1, 1], "what": ""},
        {"kind": "wait", "on": [[2, 1]], "place": [1, 1], "what": ""},
        {"kind": "wait", "on": [[-1, 1]], "place": [1, 1], "what": ""},
        {"kind": "wait", "on": [[1, True]], "place": [1, 1], "what": ""},
        {"kind": "wait", "on": [["1", "1"]], "place": [1, 1], "what": ""},
        {"kind": "wait", "on": [[1, 1]], "place": [1], "what": ""},
        {"kind": "wait", "on": [[1, 1]], "place": [1, 1.5], "what": ""},
        {"kind": "wait", "on": [[1, 1]], "place": [1, 1]},
        {"kind": "wait", "on": [[1, 1]], "place": [1, 1], "what": "", "limit": 0, "key": ""},
        {"kind": "wait", "on": [[1, 1]], "place": [1, 1], "what": "", "limit": "1", "key": ""},
        {"kind": "wait", "on": [[1, 1]], "place": [1, 1], "what": "", "limit": 1},
        {"kind": "beat", "in": "a place", "limit": 1.0, "key": "k"},
        {"kind": "beat", "in": "a place", "limit": 1.0, "key": "k", "calls": {"0": 1.5}},
        {"kind": "beat", "in": "a place", "limit": 1.0, "calls": {"0": 1}},
        {"kind": "at"},
        {"kind": "timeout", "on": [[1, 1]]},
        {"kind": "failed"},
        {"kind": "failed", "cause": 7},
    ],
)  # fmt: skip
def test_what_no_rank_sends_is_refused(message: object) -> None:
    detector = detector_of()
    with pytest.raises(ValueError, match="expected"):
        detector.hear(0, message, 1.0)
    assert detector.look(5.0) is None


def test_many_accusations_of_one_rank_are_one() -> None:
    detector = detector_of()
    for now in range(1000):
        accuses(detector, 1, 0, 1.0 + now * 1e-3)
    assert len(detector._accusations) == 1


@pytest.mark.parametrize("how", ["ring", "collective"])
def test_a_verdict_over_1024_ranks_that_all_wait_and_accuse_takes_little_time(how: str) -> None:
    """Following every rank's waits by itself took 3 to 13 s."""
    size, culprit_rank = 1024, 700
    detector = detector_of(size)
    everyone = set(range(size))
    for rank in everyone - {culprit_rank}:
        on = [(rank - 1) % size] if how == "ring" else sorted(everyone - {rank})
        waits(detector, rank, on, 1.0)
        detector.hear(rank, {"kind": "timeout", "on": ranges(on), "cause": "late"}, 1.0)
    detector.hear(culprit_rank, {"kind": "bye"}, 1.0)  # so that every look follows the waits, too
    started = time.process_time()
    assert culprit(detector, 1.0 + GRACE_S) == culprit_rank
    assert time.process_time() - started < 0.5


def test_a_wait_for_a_rank_that_has_not_joined_is_no_crash() -> None:
    detector = FailureDetector(9, TIMEOUT_S)
    detector.join(0, 0.0)
    waits(detector, 0, 8, 1.0)
    accuses(detector, 0, 8, 1.0)
    assert culprit(detector, 2.0) == 8


def test_where_waits_ended_is_forgotten_when_one_begins() -> None:
    detector = detector_of()
    detector.hear(3, {"kind": "bye"}, 0.5)  # from here on every look follows the waits
    waits(detector, 1, 0, 1.0)
    assert detector.look(1.0) is None
    waits(detector, 0, 2, 1.1)
    accuses(detector, 1, 0, 2.0)
    assert culprit(detector, 2.0 + GRACE_S) == 2
