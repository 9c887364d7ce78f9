"""tools/bench_gpu.py and gpu_first.py on CPU tensors: what a GPU machine runs, but for the long parts."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SMALL = "--device cpu --tokens 256 --ring-sizes 1 2 --heads 2 --kv-heads 1 --head-dim 16 --dtype float32"


@pytest.mark.night
def test_every_part_has_its_rows_and_files(tmp_path: Path) -> None:
    more = f"--kernels cpu flash --rounds 1 --skip tests longest --output {tmp_path}"
    command = [sys.executable, "tools/bench_gpu.py", *SMALL.split(), *more.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (found,) = tmp_path.glob("*.json")
    written = json.loads(found.read_text())
    assert {"device", "torch", "commit", "date"} <= set(written["where"])
    rows = written["rows"]
    by_kernel = [(row["tiles"], row["kernel"]) for row in rows["Kernels by kind of tile"]]
    kinds = ("full", "causal", "window", "documents", "LongNet")
    assert {(kind, name) for kind in kinds for name in ("cpu", "flash")} <= set(by_kernel)
    assert all(float(row["forward TFLOP/s"]) > 0 for row in rows["Kernels by kind of tile"])
    ring = rows["A virtual ring against one device"]
    assert [(row["ring"], row["kernel"]) for row in ring] == [
        (1, "cpu"), (1, "flash"), (2, "cpu"), (2, "flash"),
    ]  # fmt: skip
    assert all(float(row["efficiency"]) > 0 for row in ring)
    assert rows["Merge"] and rows["Host time of a hop"]
    (text,) = tmp_path.glob("*.md")
    assert text.read_text().count("\n## ") == len(rows)


PASSED = {"tests/gpu": "12 passed, 3 skipped in 9 s", "exit status": 0}


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"Correctness": [PASSED], "Merge": [{"GB/s": 1}]}, []),
        ({"Correctness": [{**PASSED, "exit status": 1}]}, ["12 passed"]),
        ({"Correctness": [{**PASSED, "tests/gpu": "40 skipped in 1 s"}]}, ["no test of tests/gpu passed"]),
        ({"Correctness": [PASSED], "Merge": []}, ["Merge: nothing was measured"]),
        ({"Longest": [{"failed": "out of memory"}]}, ["Longest: out of memory"]),
    ],
)
def test_what_failed_or_was_not_looked_at_is_found(
    found: dict[str, list[dict[str, Any]]], says: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    faults = importlib.import_module("bench_gpu").faults(found, "cuda")
    assert len(faults) == len(says) and all(word in fault for word, fault in zip(says, faults, strict=True))


def test_a_machine_without_a_gpu_is_told_so() -> None:
    command = [sys.executable, "tools/bench_gpu.py", "--skip", "tests", "longest"]
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
