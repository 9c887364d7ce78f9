"""Every benchmark runs at a small size and prints rows of one format; a wrong row is the exit status."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from benchmarks.measuring import ResultRow, get_unit

from tools import bench

ROOT = Path(__file__).parents[2]
SMALL = {
    "attention": "--tokens 256 --rounds 1 --only ds_ring",
    "planning": "--ranks 8 --draws 2 --shard 512",
    "published": "--devices 8",
}
ELSEWHERE = {"host"}  # test_checkers.py


def test_every_benchmark_has_a_module_and_a_case_here() -> None:
    assert set(SMALL) | ELSEWHERE == set(bench.BENCHMARKS)
    for one in bench.BENCHMARKS.values():
        module = importlib.import_module(f"benchmarks.{one.module}")
        assert module.__doc__ and module.OPTIONS and callable(getattr(module, one.function))


@pytest.mark.night
@pytest.mark.parametrize("name", list(SMALL))
def test_a_benchmark_prints_and_stores_its_rows(name: str, tmp_path: Path) -> None:
    command = [
        sys.executable, "tools/bench.py", name, *SMALL[name].split(), "--output", str(tmp_path / "rows"),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    head, *rows = done.stdout.splitlines()
    stored = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert head.startswith("# ") and [json.loads(row) for row in rows] == [
        {**row["case"], **row["results"]} for row in stored
    ]
    about = {"benchmark", "case", "results", "units", "warm_up", "iterations", "hardware", "versions"}
    assert all(about | {"commit", "date", "wrong"} == set(row) and row["results"] for row in stored)


def test_a_wrong_row_is_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [ResultRow({"tokens": 8}, {"median_s": 1.0}), ResultRow({"tokens": 9}, {}, "off by one")]
    options = Namespace(warm_up=1, rounds=2, output="", markdown=True)
    assert bench.report("a name", rows[:1], options) == 0
    assert bench.report("a name", rows, options) == 1
    printed = capsys.readouterr()
    assert "WRONG: off by one" in printed.err and "| tokens | median_s |" in printed.out


@pytest.mark.parametrize(
    ("name", "unit"), [("cpu_s", "s"), ("fixed_tokens_per_s", "tokens/s"), ("ratio", "1")]
)
def test_the_end_of_a_name_is_its_unit(name: str, unit: str) -> None:
    assert get_unit(name) == unit
