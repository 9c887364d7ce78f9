"""Tests of the choice of cases: each commit takes its part, all commits together take everything."""

from __future__ import annotations

from tests.sampling import chosen, left_out

CASES = [f"tests/x.py::test[{n}]" for n in range(40)]


def test_a_run_takes_its_part_and_the_same_one_again() -> None:
    first = chosen(CASES, 4, "a")
    assert len(first) == 10 and first == chosen(CASES, 4, "a") and first != chosen(CASES, 4, "b")


def test_many_changes_take_every_case() -> None:
    assert set().union(*(chosen(CASES, 4, str(seed)) for seed in range(60))) == set(CASES)


def test_rounds_take_more_and_at_last_all() -> None:
    some, more = chosen(CASES, 4, "a"), chosen(CASES, 4, "a", times=3)
    assert some < more and len(more) == 30
    assert chosen(CASES, 4, "a", times=100) == set(CASES)
    assert len(chosen(CASES[:1], 4, "a")) == 1


def test_tests_of_ranks_take_half_of_their_cases_and_units_all() -> None:
    class Item:
        def __init__(self, nodeid: str) -> None:
            self.nodeid = nodeid

        def get_closest_marker(self, name: str) -> None:
            return None

    folders = ("unit", "dist", "integration")
    items = [Item(f"tests/{folder}/x.py::test[{n}]") for folder in folders for n in range(6)]
    gone = [item.nodeid.split("/")[1] for item in left_out(items, "a", 1)]  # type: ignore[arg-type]
    assert sorted(gone) == ["dist"] * 3 + ["integration"] * 3
    assert not left_out(items, "a", 2)  # type: ignore[arg-type]
