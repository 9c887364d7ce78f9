"""Tests of the choice of tests: each pair of values occurs by day, everything at night."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from tests.selection import combinations_in, covering_set, levels

ROOT = Path(__file__).resolve().parents[2]
TABLE = [row for row in product("abcde", (1, 2, 3, 4), (True, False), "xyz") if row[:2] != ("a", 1)]


def missing(rows: list[tuple[object, ...]], taken: list[int], strength: int) -> set[object]:
    """The combinations of the table that no taken row holds."""
    held = [combinations_in(row, strength) for row in levels(rows)]
    return set().union(*held) - set().union(*(held[number] for number in taken))


@pytest.mark.parametrize(("strength", "most"), [(1, 6), (2, 26)])
def test_every_combination_occurs_and_few_rows_are_taken(strength: int, most: int) -> None:
    taken = covering_set(TABLE, strength)
    assert not missing(TABLE, taken, strength) and len(taken) <= most < len(TABLE)
    assert taken == covering_set(TABLE, strength), "fixed by the table"


def test_a_row_left_out_of_the_cover_is_missed() -> None:
    """The seeded fault: a cover without one of its rows lacks a pair (greedily, two rows may be spare)."""
    taken = covering_set(TABLE)
    lost = [bool(missing(TABLE, [row for row in taken if row != one], 2)) for one in taken]
    assert sum(lost) >= len(taken) - 2


def test_tables_of_one_and_two_parameters_stay_whole() -> None:
    assert covering_set([(n,) for n in range(7)]) == list(range(7))
    assert covering_set(list(product(range(3), range(4)))) == list(range(12))
    assert covering_set([([],), ([],)]) == [0, 1], "values that do not compare are different values"


TESTS = """
import pytest

@pytest.mark.parametrize("c", range(3))
@pytest.mark.parametrize("b", range(3))
@pytest.mark.parametrize("a", range(3))
def test_pairs(a, b, c): pass

@pytest.mark.covering(1)
@pytest.mark.parametrize("b", range(3))
@pytest.mark.parametrize("a", range(3))
def test_values(a, b): pass

@pytest.mark.day("one", "two")
@pytest.mark.parametrize("name", ["one", "two", "three"])
def test_named(name): pass

@pytest.mark.night
def test_long(): pass
"""
CONFTEST = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.selection import pytest_addoption, pytest_collection_modifyitems
"""


def collect(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What pytest would run of this folder's tests."""
    (folder / "conftest.py").write_text(CONFTEST)
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider"]
    environment = {
        **os.environ,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }  # their imports would be most of the time
    return subprocess.run(
        [*command, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), {"pairs": 10, "values": 3, "named": 2}),
        (("--night",), {"pairs": 27, "values": 9, "named": 3, "long": 1}),
        (("test_it.py",), {"pairs": 27, "values": 9, "named": 3, "long": 1}),
        (("test_it.py", "--day"), {"pairs": 10, "values": 3, "named": 2}),
        (("-k", "long"), {"long": 1}),
        (("-k", "nothing"), {}),
    ],
)
def test_what_a_command_runs(tmp_path: Path, arguments: tuple[str, ...], expected: dict[str, int]) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    done = collect(tmp_path, *arguments)
    ids = [line.partition("::test_")[2] for line in done.stdout.splitlines() if "::test_" in line]
    names = [one.partition("[")[0] for one in ids]
    assert {name: names.count(name) for name in names} == expected, done.stdout + done.stderr


def test_a_case_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS.replace('day("one"', 'day("gone"'))
    done = collect(tmp_path)
    assert done.returncode == 4 and "got none for ['gone']" in done.stdout + done.stderr
