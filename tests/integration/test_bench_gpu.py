"""tools/bench_gpu.py on CPU tensors: the same code that a GPU machine runs, all parts but the long ones."""

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
