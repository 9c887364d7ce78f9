"""Tests of the choice of cases: each commit takes its part, all commits together take everything."""

from __future__ import annotations

from tests.sampling import chosen

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
