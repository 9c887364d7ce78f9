"""The failure detector: who is late and who is to blame, from events with times. No sockets, no clock."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable
from typing import Any

import pytest

from ds_ring.health.failure_detector.collective_calls import CollectiveCalls, RankStage
from ds_ring.health.failure_detector.verdicts import JOIN_S, LEFT_S, FailureDetector
from ds_ring.health.failure_detector.wire import GRACE_S, merged, write_ranges

TIMEOUT_S = 10.0


Message = dict[str, Any]
Step = tuple[float, Any, Any]  # when, which rank (None: nobody), what


def ranges(ranks: Iterable[int]) -> list[list[int]]:
    """As they come out of a line of JSON."""
    return [list(pair) for pair in write_ranges(ranks)]


def wait(*on: int, call: int = 1, hop: int = 1) -> Message:
    return {"kind": "wait", "on": ranges(on), "place": [call, hop], "what": f"call {call}"}


def late(*on: int) -> Message:
    return {"kind": "timeout", "on": ranges(on), "cause": "late"}


BEAT, BYE, GO = {"kind": "beat"}, {"kind": "bye"}, {"kind": "go"}
BROKEN = {"kind": "broken", "cause": "gloo says so"}
SCRIPT, STEP = (
    ("the training script", 10.0, "step_timeout_seconds"),
    ("engine.step", 6.0, "hop_timeout_seconds"),
)
JOINS, ENDS, PAUSES, BLAMED = "joins", "its connection ends", "the monitor paused so long", "is blamed"
LATE, CAUSE = "all that are late, with limits and keys", "is in the cause of the fault"


def beat(calls: dict[str, int] | None = None, stage: Any = SCRIPT, kind: str = "beat") -> Message:
    """A heartbeat with where the rank is, and the collectives that it has begun by process group."""
    place, limit, key = stage
    return {"kind": kind, "in": place, "limit": limit, "key": key, "calls": calls or {}}


def beats(until: float, since: float = 0.0, late: Any = SCRIPT, ranks: int = 3) -> list[Step]:
    """All ranks beat each half second; the last one is where `late` says."""
    times = [since + half / 2 for half in range(math.ceil(2 * (until - since)))]
    return [
        (now, rank, beat(stage=late if rank == ranks - 1 else SCRIPT))
        for now in times
        for rank in range(ranks)
    ]


def behind(late: Any = SCRIPT) -> list[Step]:
    """Rank 2 has begun a collective less in group 0."""
    calls = [{"0": 7, "": 3}, {"0": 7, "": 3}, {"0": 6, "": 3}]
    return [(0.0, rank, beat(of_rank, late if rank == 2 else SCRIPT)) for rank, of_rank in enumerate(calls)]


def wait_in_one_call(now: float, **limit: Any) -> list[Step]:
    """All three report that they wait for the others in a call that is watched as a whole."""
    message = {"kind": "wait", "place": [-1, 2], "what": "the making of groups", **limit}
    return [(now, rank, message | {"on": ranges({0, 1, 2} - {rank})}) for rank in range(3)]


def joined(ranks: int, size: int | None = None, timeout_s: float = TIMEOUT_S) -> FailureDetector:
    detector = FailureDetector(size or ranks, timeout_s)
    for rank in range(ranks):
        detector.join(rank, 0.0)
    return detector


def play(detector: FailureDetector, *steps: Step) -> None:
    """Take what happens, in order; what is BLAMED, LATE or its CAUSE is compared with what is known then."""
    for now, rank, event in steps:
        if event is BLAMED:
            fault = detector.look(now)
            assert (None if fault is None else fault.rank) == rank, (now, fault)
        elif event is LATE:
            known = [
                (item.rank, item.waiting, item.limit_s, item.key)
                for item in detector.late_ranks(now).values()
            ]
            assert known == rank, (now, known)
        elif event is CAUSE:
            assert detector.fault is not None and re.search(rank, detector.fault.cause), detector.fault
        elif event is PAUSES:
            detector.forgive(now)
        elif event is JOINS:
            detector.join(rank, now)
        elif event is ENDS:
            detector.close(rank)
        else:
            detector.hear(rank, event, now)


def test_ranks_are_written_as_the_fewest_ranges() -> None:
    assert write_ranges([5, 2, 0, 1]) == ((0, 2), (5, 5))
    assert merged([(7, 9), (0, 5), (1, 2), (6, 6), (8, 8)]) == ((0, 9),), "one range may be inside another"
    assert write_ranges(range(1000)) == ((0, 999),), "a line of JSON holds a wait for all ranks"


FOUR: dict[str, list[Step]] = {  # of four ranks that have joined
    "nobody is blamed while all beat": [
        step
        for now in range(1, 100)
        for step in (*((now, rank, BEAT) for rank in range(4)), (now + 0.5, None, BLAMED))
    ],
    "the end of a connection is a death unless goodbye was said": [
        (1.0, 1, BYE), (1.0, 1, ENDS), (1.0, None, BLAMED), (1.0, 2, ENDS), (1.0, 2, BLAMED),
    ],
    "a pause of the monitor ends no wait": [
        (1.0, 1, wait(0)), (1.1, 1, late(0)), (1.0, 2, BYE), (1.0, 3, wait(2)), (30.0, None, PAUSES),
        (31.0 + GRACE_S, None, BLAMED), (31.1 + GRACE_S, 0, BLAMED),
    ],
    "a pause of the monitor makes nobody late": [
        (1.0, 1, wait(0) | {"limit": 10.0, "key": "k"}), (30.0, None, PAUSES), (31.9, [], LATE),
        (32.0, [(0, 1, 10.0, "k")], LATE),
    ],
    "the first fault wins": [
        (0.0, 3, ENDS), (0.1, 1, {"kind": "failed", "cause": "something else"}), (0.2, 3, BLAMED),
    ],
    "waits are followed to the one who does not wait; others may say more for a while": [
        (1.0, 1, wait(0)), (1.0, 0, wait(3)), (1.0, 3, wait(2)), (2.0, 1, late(0)), (2.0, None, BLAMED),
        (2.0 + GRACE_S, 2, BLAMED),
    ],
    "a death heard within the grace comes before an accusation": [
        (1.0, 1, wait(0)), (1.0, 1, late(0)), (1.0, 2, ENDS), (1.0 + GRACE_S, 2, BLAMED),
    ],
    "in a collective the one that is not there is blamed": [
        (1.0, 0, wait(1, 2, 3)), (1.0, 1, wait(0, 2, 3)), (1.0, 3, wait(0, 1, 2)), (2.0, 1, late(0, 2, 3)),
        (3.0, 2, BLAMED),
    ],
    "who leaves while others wait is blamed after a moment": [
        (1.0, 2, BYE), (1.5, 3, wait(2)), (1.5, 0, wait(3)), (1.5 + LEFT_S, None, BLAMED),
        (1.6 + LEFT_S, 2, BLAMED),
    ],
    "who leaves after others have waited for long is blamed after a moment, too": [
        (1.0, 3, wait(2)), (8.0, 2, BYE), (8.0 + LEFT_S, None, BLAMED), (8.1 + LEFT_S, 2, BLAMED),
    ],
    "a broken collective is the fault of who left first, unless a death is heard of": [
        (1.0, 3, BROKEN), (1.0 + GRACE_S, None, BLAMED), (2.0, 2, BYE), (2.1, 1, BYE), (2.2, 0, BROKEN),
        (2.2, None, BLAMED), (2.2 + GRACE_S, 2, BLAMED),
    ],
    "a wait that ended blames nobody": [(1.0, 2, BYE), (1.5, 3, wait(2)), (2.0, 3, GO), (9.0, None, BLAMED)],
    "in a circle the one that is elsewhere is blamed": [
        (1.0, 0, wait(3, hop=3)), (1.0, 1, wait(0, hop=3)), (1.0, 2, wait(1, call=2, hop=0)),
        (1.0, 3, wait(2, hop=3)), (2.0, 0, late(3)), (3.0, 2, BLAMED), (0.0, "wait for each other", CAUSE),
    ],
    "where waits ended is forgotten when one begins; from a goodbye on every look follows the waits": [
        (0.5, 3, BYE), (1.0, 1, wait(0)), (1.0, None, BLAMED), (1.1, 0, wait(2)), (2.0, 1, late(0)),
        (2.0 + GRACE_S, 2, BLAMED),
    ],
}  # fmt: skip
VERDICTS: dict[str, tuple[tuple[Any, ...], list[Step]]] = {
    name: ((4,), steps) for name, steps in FOUR.items()
} | {  # with arguments of `joined`
    "silence is blamed after the timeout and not before": (
        (2,), [(9.0, 0, BEAT), (10.0, None, BLAMED), (10.1, 1, BLAMED)]
    ),
    "a pause of the monitor itself is forgiven": ((2,), [(30.0, None, PAUSES), (39.0, None, BLAMED)]),
    "in a circle of equals the accused is blamed": (
        (2,), [(1.0, 0, wait(1)), (1.0, 1, wait(0)), (2.0, 1, late(0)), (3.0, 0, BLAMED)]
    ),
    # A seeded fault left `_last_join` as it was. At 30.55 rank 3 has come only now: rank 2 may be on its way.
    "a pause of the monitor gives ranks as long to join and to answer": ((0, 4), [
        (0.0, 0, JOINS), (0.1, 1, JOINS), (0.6, 3, JOINS), (0.2, 1, BROKEN), (30.0, None, PAUSES),
        (30.55 + GRACE_S, None, BLAMED), (30.6 + GRACE_S, 2, BLAMED),
    ]),
    "who never joins is blamed": ((0, 3), [
        (5.0, 0, JOINS), (6.0, 2, JOINS), (15.0, 0, BEAT), (15.0, 2, BEAT), (6.0 + TIMEOUT_S, None, BLAMED),
        (6.1 + TIMEOUT_S, 1, BLAMED),
    ]),
    # 1,024 ranks on two busy cores took longer than the timeout from the first to the last.
    "a rank is not late while others still join": ((0, 4), [
        (0.0, 0, JOINS), (0.0, None, BLAMED), (9.0, 1, JOINS), (9.0, 0, BEAT), (9.0, None, BLAMED),
        (18.0, 2, JOINS), (18.0, 0, BEAT), (18.0, 1, BEAT), (18.0, None, BLAMED),
    ]),
    # At 0.5 rank 3 has come only now: rank 2 may be on its way.
    "a broken collective is the fault of who never joined once nobody else comes": ((0, 4), [
        (0.0, 0, JOINS), (0.1, 1, JOINS), (0.2, 1, BROKEN), (0.6, 3, JOINS), (0.5 + GRACE_S, None, BLAMED),
        (0.6 + GRACE_S, 2, BLAMED), (0.0, "gloo says so", CAUSE),
    ]),
    "a short heartbeat leaves time to join": ((0, 2, 0.1), [
        (5.0, 0, JOINS), (5.0 + JOIN_S, 0, BEAT), (5.0 + JOIN_S, None, BLAMED),
    ]),
    "a wait for a rank that has not joined is no crash": (
        (1, 9), [(1.0, 0, wait(8)), (1.0, 0, late(8)), (2.0, 8, BLAMED)]
    ),
}  # fmt: skip


# Of three ranks, about collectives that are not ds_ring's.
COLLECTIVES: dict[str, list[Step]] = {
    **{
        f"the rank that has begun fewer is blamed after the limit of where it is: {stage[0]}": [
            *behind(stage), *beats(stage[1] + 1, late=stage), (stage[1] - 0.1, None, BLAMED),
            (stage[1] + 0.3, 2, BLAMED), (0.0, stage[2], CAUSE),
            (0.0, "collective 7 of process group 0", CAUSE),
        ]
        for stage in (SCRIPT, STEP)
    },
    "it is named after a tenth of the limit once the numbers are not old, until it has come": [
        *behind(), (0.9, None, BLAMED), (0.9, [], LATE), (1.2, None, BLAMED),
        (1.2, [(2, 0, 10.0, "step_timeout_seconds")], LATE), (2.0, 2, beat({"0": 7})), (2.0, None, BLAMED),
        (2.0, [], LATE),
    ],
    # All report that they wait for all others, the sleeper too: its call has not ended, either.
    "in a call that is watched as a whole the one that sleeps in it is named and blamed": [
        *behind(), *wait_in_one_call(0.3, limit=8.0, key="k"), *beats(9.0), (1.0, [], LATE),
        (1.2, [(2, 0, 8.0, "k")], LATE), (8.3, 0, late(1, 2)), (8.9, 2, BLAMED),
    ],
    "where it was when it was asked is in the fault": [
        *behind(), (3.0, 2, {"kind": "at", "text": "load (train.py:12)"}), *beats(11.0, since=3.0),
        (11.0, 2, BLAMED), (0.0, r"it was in load \(train.py:12\)$", CAUSE),
    ],
    # It evaluates: many short calls of the engine.
    "a rank that goes to and fro has the longer of the limits": [
        *behind(), *((0.5 + number / 4, 2, beat(stage=(SCRIPT, STEP)[number % 2])) for number in range(40)),
        *beats(9.9, since=9.5, late=STEP), (9.9, None, BLAMED), (10.1, 2, BLAMED),
    ],
    # gloo counts what a script sends, of which ranks send different numbers.
    "numbers that differ for ever blame nobody while the job goes on": [
        *behind(), *(
            step for now in range(1, 200)
            for step in (*((now, rank, beat({"~1": now})) for rank in range(3)), (now + 0.5, None, BLAMED))
        ),
    ],
    "a group of the ring is not compared": [
        *((0.0, rank, beat({"~1": rank})) for rank in range(3)), *beats(30.0), (30.0, None, BLAMED)
    ],
    "a pause of the monitor is not counted": [
        *behind(), (1.5, None, BLAMED), (100.0, None, PAUSES), *beats(109.0, since=101.5),
        (109.0, None, BLAMED),
        *beats(111.0, since=109.0), (110.5, 2, BLAMED),
    ],
    "a process that ended before a collective of the others left too early": [
        *behind(), (0.2, 2, beat(kind="bye")), *beats(5.0, ranks=2), (1.1 + LEFT_S, 2, BLAMED),
        (0.0, r"it left \(its process exited\)", CAUSE),
    ],
    "a mesh that is closed is no process that ended": [
        *behind(), (0.2, 2, BYE), *beats(30.0, ranks=2), (30.0, None, BLAMED)
    ],
    "of ranks in one call that is watched as a whole the one behind is blamed": [
        *wait_in_one_call(0.1), *((0.2, rank, beat({"": 4 if rank < 2 else 3})) for rank in range(3)),
        (5.0, 0, late(1, 2)), *beats(6.0, since=4.5), (6.0, 2, BLAMED),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", VERDICTS)
def test_verdict(name: str) -> None:
    arguments, steps = VERDICTS[name]
    play(joined(*arguments), *steps)


@pytest.mark.situation("late ranks", "a rank is late outside of a pass")
@pytest.mark.parametrize("name", COLLECTIVES)
def test_verdict_on_collectives(name: str) -> None:
    play(joined(3, timeout_s=2.0), *COLLECTIVES[name])


@pytest.mark.situation("late ranks", "a rank is late outside of a pass")
def test_ranks_that_are_blocked_by_the_late_one_in_another_group_are_not_blamed() -> None:
    """Rank 1 waits for 2 in group 3, and 0 and 3 wait for 1 and 2 in the default group."""
    calls = ({"0": 7}, {"0": 6, "3": 2}, {"0": 6, "3": 1}, {"0": 7})
    begun = [(0.0, rank, beat(of_rank)) for rank, of_rank in enumerate(calls)]
    play(joined(4, timeout_s=2.0), *begun, *beats(11.0, ranks=4), (11.0, 2, BLAMED))


def test_ranks_wait_in_vain_for_one_that_has_left() -> None:
    """It is no late one: nobody can ask it where it is."""
    late_rank = (1, 0, 4.0, "a_key")
    waits = {
        "kind": "wait",
        "on": ranges([1]),
        "place": [3, 1],
        "what": "call 3",
        "limit": 4.0,
        "key": "a_key",
    }
    play(joined(2), (0.0, 0, waits), (1.0, [late_rank], LATE), (1.0, 1, BYE), (1.0, [], LATE))


def test_a_rank_is_judged_by_the_longest_limit_since_a_time() -> None:
    calls = CollectiveCalls()
    assert calls.stage(0, 0.0) is None
    stages = [RankStage("a", 9.0, "k"), RankStage("b", 3.0, "k"), RankStage("c", 5.0, "k")]
    for now, stage in enumerate(stages):
        calls.hear(0, stage, {}, float(now))
    assert [calls.stage(0, since) for since in (0.5, 1.5, 2.5)] == [stages[0], stages[2], stages[2]]


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
    detector = joined(4)
    with pytest.raises(ValueError, match="expected"):
        detector.hear(0, message, 1.0)
    assert detector.look(5.0) is None


def test_many_accusations_of_one_rank_are_one() -> None:
    detector = joined(4)
    for now in range(1000):
        detector.hear(1, late(0), 1.0 + now * 1e-3)
    assert len(detector._accusations) == 1


@pytest.mark.parametrize("how", ["ring", "collective"])
def test_a_verdict_over_1024_ranks_that_all_wait_and_accuse_takes_little_time(how: str) -> None:
    """Following every rank's waits by itself took 3 to 13 s."""
    size, culprit_rank = 1024, 700
    detector = joined(size)
    everyone = set(range(size))
    for rank in everyone - {culprit_rank}:
        on = [(rank - 1) % size] if how == "ring" else sorted(everyone - {rank})
        play(detector, (1.0, rank, wait(*on)), (1.0, rank, late(*on)))
    detector.hear(culprit_rank, BYE, 1.0)  # so that every look follows the waits, too
    started = time.process_time()
    play(detector, (1.0 + GRACE_S, culprit_rank, BLAMED))
    assert time.process_time() - started < 0.5
