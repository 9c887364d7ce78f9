"""`tools/bench.py gpu` and gpu_first.py on CPU tensors: the parts of a GPU machine, without the long ones."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks import gpu

ROOT = Path(__file__).parents[2]
SMALL = "--device cpu --tokens 256 --ring-sizes 1 2 --heads 2 --kv-heads 1 --head-dim 16 --dtype float32"


@pytest.mark.night
def test_every_part_has_its_rows(tmp_path: Path) -> None:
    more = f"--kernels cpu flash --rounds 1 --skip tests longest --output {tmp_path}/rows.jsonl"
    command = [sys.executable, "tools/bench.py", "gpu", *SMALL.split(), *more.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    by_part: dict[str, list[Any]] = {}
    for row in rows:
        assert {"hardware", "versions", "commit", "date", "warm_up", "iterations", "units"} <= set(row)
        by_part.setdefault(row["case"]["part"], []).append(row)
    rates = by_part["Kernels by kind of tile"]
    by_kernel = [(row["case"]["tiles"], row["case"]["kernel"]) for row in rates]
    kinds = ("full", "causal", "window", "documents", "LongNet")
    assert {(kind, name) for kind in kinds for name in ("cpu", "flash")} <= set(by_kernel)
    assert all(row["results"]["forward_tflops"] > 0 for row in rates)
    assert rates[0]["units"]["forward_tflops"] == "TFLOP/s"
    ring = by_part["A virtual ring against one device"]
    assert [(row["case"]["ring_size"], row["case"]["kernel"]) for row in ring] == [
        (1, "cpu"), (1, "flash"), (2, "cpu"), (2, "flash"),
    ]  # fmt: skip
    assert all(row["results"]["efficiency"] > 0 for row in ring)
    assert by_part["Merge"] and by_part["Host time of a hop"]


@pytest.mark.parametrize(
    ("counts", "status", "wrong"),
    [
        ("12 passed, 3 skipped in 9 s", 0, ""),
        ("12 passed, 1 failed in 9 s", 1, "12 passed, 1 failed in 9 s"),
        ("40 skipped in 1 s", 0, "no test of tests/gpu passed: 40 skipped in 1 s"),
    ],
)
def test_tests_that_failed_or_did_not_run_are_wrong(counts: str, status: int, wrong: str) -> None:
    assert gpu.tests_row(counts, status, "cuda").wrong == wrong


def test_a_part_without_rows_is_wrong() -> None:
    assert [row.wrong for row in gpu.in_part("Merge", [])] == ["nothing was measured"]


def test_a_machine_without_a_gpu_is_told_so() -> None:
    command = [sys.executable, "tools/bench.py", "gpu", "--skip", "tests", "longest"]
    environment = {"PATH": "", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 2 and "no CUDA device here" in done.stderr


def test_what_a_gpu_runs_first_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A ring that sends to itself; a batch whose messages are lost fails, and is all that is done again."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    first, ring = (importlib.import_module(name) for name in ("gpu_first", "self_ring"))
    command = ["--device", "cpu", "--output", str(tmp_path), "--ring-sizes", "4", "--parts"]
    calls = []

    def lose_the_third(operations: list[Any]) -> list[Any]:
        calls.append(len(operations))
        return real([] if len(calls) == 3 else operations) or [ring._Done() for _ in operations]

    real = ring.copied
    with monkeypatch.context() as lost:
        lost.setattr(ring, "copied", lose_the_third)
        assert first.main([*command, "ring", "merge", "probes"]) == 1
    told = capsys.readouterr()
    assert "expected errors below 1e-05" in told.err and len(calls) > 3
    assert first.main([*command, "ring", "merge", "probes"]) == 0
    told = capsys.readouterr()
    assert "A ring that sends to itself: 8 rows" in told.out and "Merge:" not in told.out
    assert "copies in this process: gloo cannot send to itself" in told.out
    assert first.main([*command, "merge", "host", "--minutes", "0"]) == 1
    assert "host: not reached; call again" in capsys.readouterr().err
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md"}
