"""The judge: who is to blame, from events with times. No sockets, no clock."""

from __future__ import annotations

from ds_ring.runtime.watch_board import GRACE_S, JOIN_S, LEFT_S, Judge

TIMEOUT_S = 10.0


def judge_of(ranks: int = 4) -> Judge:
    judge = Judge(ranks, TIMEOUT_S)
    for rank in range(ranks):
        judge.join(rank, 0.0)
    return judge


def waits(judge: Judge, rank: int, on: int | list[int], now: float, place: tuple[int, int] = (1, 1)) -> None:
    on = on if isinstance(on, list) else [on]
    judge.hear(rank, {"kind": "wait", "on": on, "place": list(place), "what": f"call {place[0]}"}, now)


def accuses(judge: Judge, rank: int, on: int, now: float) -> None:
    judge.hear(rank, {"kind": "accuse", "on": [on], "cause": "late"}, now)


def culprit(judge: Judge, now: float) -> int | None:
    fault = judge.look(now)
    return None if fault is None else fault.rank


def test_nobody_is_blamed_while_all_beat() -> None:
    judge = judge_of()
    for now in range(1, 100):
        for rank in range(4):
            judge.hear(rank, {"kind": "beat", "number": now}, float(now))
        assert judge.look(now + 0.5) is None


def test_the_end_of_a_connection_is_a_death_unless_goodbye_was_said() -> None:
    judge = judge_of()
    judge.hear(1, {"kind": "bye"}, 1.0)
    judge.close(1)
    assert judge.look(1.0) is None
    judge.close(2)
    assert culprit(judge, 1.0) == 2


def test_silence_is_blamed_after_the_timeout_and_not_before() -> None:
    judge = judge_of(2)
    judge.hear(0, {"kind": "beat"}, 9.0)
    assert judge.look(10.0) is None
    assert culprit(judge, 10.1) == 1


def test_a_pause_of_the_board_itself_is_forgiven() -> None:
    judge = judge_of(2)
    judge.forgive(30.0)
    assert judge.look(39.0) is None


def test_the_first_fault_wins() -> None:
    judge = judge_of()
    judge.close(3)
    judge.hear(1, {"kind": "failed", "cause": "something else"}, 0.1)
    assert culprit(judge, 0.2) == 3


def test_waits_are_followed_to_the_one_who_does_not_wait() -> None:
    judge = judge_of()
    waits(judge, 1, 0, 1.0)
    waits(judge, 0, 3, 1.0)
    waits(judge, 3, 2, 1.0)
    accuses(judge, 1, 0, 2.0)
    assert judge.look(2.0) is None, "others may say more"
    assert culprit(judge, 2.0 + GRACE_S) == 2


def test_a_death_heard_within_the_grace_comes_before_an_accusation() -> None:
    judge = judge_of()
    waits(judge, 1, 0, 1.0)
    accuses(judge, 1, 0, 1.0)
    judge.close(2)
    assert culprit(judge, 1.0 + GRACE_S) == 2


def test_in_a_circle_the_one_that_is_elsewhere_is_blamed() -> None:
    judge = judge_of()
    for rank in range(4):
        waits(judge, rank, (rank - 1) % 4, 1.0, place=(2, 0) if rank == 2 else (1, 3))
    accuses(judge, 0, 3, 2.0)
    assert culprit(judge, 3.0) == 2
    assert judge.fault is not None and "wait for each other" in judge.fault.cause


def test_in_a_circle_of_equals_the_accused_is_blamed() -> None:
    judge = judge_of(2)
    waits(judge, 0, 1, 1.0)
    waits(judge, 1, 0, 1.0)
    accuses(judge, 1, 0, 2.0)
    assert culprit(judge, 3.0) == 0


def test_in_a_collective_the_one_that_is_not_there_is_blamed() -> None:
    judge = judge_of()
    for rank in (0, 1, 3):
        waits(judge, rank, [r for r in range(4) if r != rank], 1.0)
    judge.hear(1, {"kind": "accuse", "on": [0, 2, 3], "cause": "late"}, 2.0)
    assert culprit(judge, 3.0) == 2


def test_who_leaves_while_others_wait_is_blamed_after_a_moment() -> None:
    judge = judge_of()
    judge.hear(2, {"kind": "bye"}, 1.0)
    waits(judge, 3, 2, 1.5)
    waits(judge, 0, 3, 1.5)
    assert judge.look(1.5 + LEFT_S) is None
    assert culprit(judge, 1.6 + LEFT_S) == 2


def test_a_wait_that_ended_blames_nobody() -> None:
    judge = judge_of()
    judge.hear(2, {"kind": "bye"}, 1.0)
    waits(judge, 3, 2, 1.5)
    judge.hear(3, {"kind": "go"}, 2.0)
    assert judge.look(9.0) is None


def test_who_never_joins_is_blamed() -> None:
    judge = Judge(3, 1e9)
    judge.join(0, 5.0)
    judge.join(2, 6.0)
    assert judge.look(5.0 + JOIN_S) is None
    assert culprit(judge, 5.1 + JOIN_S) == 1


def test_a_wait_for_a_rank_that_has_not_joined_is_no_crash() -> None:
    judge = judge_of(2)
    waits(judge, 0, 9, 1.0)
    assert judge.look(2.0) is None
