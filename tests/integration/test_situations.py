"""The command that runs what users did prints a row for each, and finds the one that fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest


@pytest.mark.situation("masks", "a tree without keys")
@pytest.mark.parametrize("value", [0, 1])
def test_one(value):
    assert {good}


@pytest.mark.situation("padding", "prompts padded on the left")
def test_two():
    pass


def test_unmarked():
    raise AssertionError
"""


def run(
    folder: Path, good: str, *arguments: str
) -> tuple[int, dict[tuple[str, str], str], dict[str, object]]:
    (folder / "test_rows.py").write_text(TESTS.format(good=good))
    command = [
        sys.executable,
        "tools/situations.py",
        "--short",
        "--json",
        "--folder",
        str(folder),
        *arguments,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    *rows, last = map(json.loads, done.stdout.splitlines())
    outcomes = {(row["area"], row["test"].partition("::")[2]): row["outcome"] for row in rows}
    return done.returncode, outcomes, last


def test_each_situation_is_a_row_and_one_that_fails_is_the_exit_status(tmp_path: Path) -> None:
    status, outcomes, last = run(tmp_path, "value != 1")
    expected = {("masks", "test_one[0]"): "passed", ("masks", "test_one[1]"): "failed"}
    expected["padding", "test_two"] = "passed"
    assert (status, outcomes) == (1, expected)
    assert {"situations": 3, "passed": 2, "failed": 1}.items() <= last.items()


def test_rows_are_chosen_by_area(tmp_path: Path) -> None:
    status, outcomes, last = run(tmp_path, "True", "--areas", "padding")
    assert (status, outcomes, last["situations"]) == (0, {("padding", "test_two"): "passed"}, 1)
