"""Choose the tests of a run: a fixed set by day, every test and every case with `--night`.

The set of the day is the same for every commit, so that the commit that breaks a case is the one that fails:

- A test or a case that is marked `night` waits for the night: real daemons, campaigns of faults, long tables.
- Of a test with three or more parameters, the day takes rows in which each pair of values of two parameters
  occurs (a greedy pairwise covering set). Marked `covering(1)`, rows in which each value occurs.
- `day(id, ...)` names the cases of a table that the day takes; the night takes all.

`-k`, a file or a test on the command line runs what is named, whole; folders are held to the day, and with
`--day` files are, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest

Row = Sequence[Any]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("the day and the night")
    group.addoption(
        "--night", action="store_true", help="run every test and every case, not only those of the day"
    )
    group.addoption("--day", action="store_true", help="hold files that are named to the day, too")
    group.addoption(
        "--without-a-capability",
        action="store_true",
        help="of tests.removals: cases that `day` names may be gone with their capability",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what waits for the night, unless a file, a test or `-k` was named."""
    named = any("::" in argument or argument.endswith(".py") for argument in config.args)
    whole = config.option.night or ((named or config.option.keyword) and not config.option.day)
    if whole:
        return
    skipped = left_out(items, config.option.without_a_capability)
    if skipped:
        config.hook.pytest_deselected(items=skipped)
        gone = set(skipped)
        items[:] = [item for item in items if item not in gone]


def levels(rows: Sequence[Row]) -> list[tuple[int, ...]]:
    """Number the values of each column in the order in which they occur; equal values get one number."""
    seen: list[list[Any]] = [[] for _ in rows[0]]
    numbered = []
    for row in rows:
        numbers = []
        for known, value in zip(seen, row, strict=True):
            number = next((n for n, one in enumerate(known) if _are_same(one, value)), len(known))
            if number == len(known):
                known.append(value)
            numbers.append(number)
        numbered.append(tuple(numbers))
    return numbered


def combinations_in(row: Sequence[int], strength: int) -> set[tuple[tuple[int, int], ...]]:
    """The combinations of `strength` values of a row, each value as (column, level)."""
    return set(combinations(enumerate(row), min(strength, len(row))))


def covering_set(rows: Sequence[Row], strength: int = 2) -> list[int]:
    """Numbers of rows that hold every combination of `strength` values that occurs in any row, greedily.

    Each step takes the row with the most combinations not held yet, the first of these. The result is fixed
    by the table and is at most a logarithmic factor above the smallest set (Chvatal, 1979).
    """
    held = [combinations_in(row, strength) for row in levels(rows)]
    missing = set().union(*held)
    taken = []
    while missing:
        best = max(range(len(rows)), key=lambda number: (len(held[number] & missing), -number))
        taken.append(best)
        missing -= held[best]
    return sorted(taken)


def left_out(items: Sequence[pytest.Item], cases_may_be_gone: bool = False) -> list[pytest.Item]:
    """The items that wait for the night."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    skipped = []
    for test, group in tests.items():
        by_day = [item for item in group if item.get_closest_marker("night") is None]
        kept = set(_of_the_day(test, by_day, cases_may_be_gone)) if by_day else set()
        skipped += [item for item in group if item not in kept]
    return skipped


def _of_the_day(test: str, items: list[pytest.Item], cases_may_be_gone: bool) -> list[pytest.Item]:
    if not hasattr(items[0], "callspec"):
        return items
    named = items[0].get_closest_marker("day")
    if named is not None:
        kept = [item for item in items if item.callspec.id in named.args]  # type: ignore[attr-defined]
        if len(kept) != len(named.args) and not cases_may_be_gone:
            found = sorted(item.callspec.id for item in items)  # type: ignore[attr-defined]
            absent = sorted(set(named.args) - set(found))
            raise pytest.UsageError(
                f"{test}: expected the cases of `day`, got none for {absent} among {found}"
            )
        return kept
    covering = items[0].get_closest_marker("covering")
    rows = [list(item.callspec.params.values()) for item in items]  # type: ignore[attr-defined]
    return [items[number] for number in covering_set(rows, covering.args[0] if covering else 2)]


def _are_same(one: Any, other: Any) -> bool:
    """Numbers, words and tuples of them are compared; anything else (a tensor, a function) is only itself."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_are_same, one, other))
    return one is other or (type(one) is type(other) and isinstance(one, str | int | float) and one == other)
