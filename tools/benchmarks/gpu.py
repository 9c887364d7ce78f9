"""Measure everything on one GPU: correctness, rates of kernels, virtual rings, the longest sequence.

One command on a machine with a GPU runs tests/gpu (every pattern, dtype and head dimension against float64),
times each kernel on each kind of tile, runs the hops of virtual rings of 1 to 16 ranks at 131,072 tokens
against one pass of FlashAttention over all of it, measures the merge, the host's time of a hop and memory,
and finds the longest sequence of a model's layers (tools/longest.py). Contestants take turns in every round;
medians are reported.

No GPU has run it yet: of this file, too, only the part that runs on CPU tensors is tested.

Example:
    python tools/bench.py gpu --output tools/results/h100.jsonl
    python tools/bench.py gpu --device cpu --tokens 1024 --ring-sizes 1 2 --heads 2 --kv-heads 1 \\
        --kernels cpu flash --dtype float32 --skip tests longest
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from common import ROOT, provenance

from benchmarks.gpu_rates import Shape, host_seconds, kernel_rates, merge_rate, ring_row
from benchmarks.measuring import ResultRow
from ds_ring.measure.rates import RATES
from ds_ring.registry import KERNELS

PARTS = {
    "tests": "Correctness", "rates": "Kernels by kind of tile", "ring": "A virtual ring against one device",
    "merge": "Merge", "host": "Host time of a hop", "longest": "The longest sequence of one device",
}  # fmt: skip
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
OPTIONS = {
    "tokens": 131_072, "ring_sizes": [1, 2, 4, 8, 16], "kernels": ["flash", "flex"], "heads": 32,
    "kv_heads": 8, "head_dim": 128, "rounds": 5, "device": ("cuda", "of the tensors", ("cuda", "cpu")),
    "dtype": ("bfloat16", "of the tensors", tuple(DTYPES)), "skip": ([], "these parts", tuple(PARTS)),
    "longest_start": (65_536, "first length that is tried, tokens"),
    "write_rates": (False, 'add the rates to those by which "auto" chooses a kernel'),
}  # fmt: skip
LARGE = "--layers 4 --hidden 4096 --heads 32 --kv-heads 8 --intermediate 14336 --vocab 128256"
SMALL = "--layers 1 --hidden 64 --heads 2 --kv-heads 1 --intermediate 128 --vocab 512"


def run_tests(device: str, workers: int = 0, seconds: float | None = None) -> list[ResultRow]:
    """Run tests/gpu in `workers` processes; one row with pytest's counts, and one for each failure."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(workers), "tests/gpu", "--tb=short"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        return [ResultRow({}, {}, f"tests/gpu did not end within {seconds} s")]
    lines = done.stdout.strip().splitlines() or ["nothing printed"]
    failed = [ResultRow({}, {"tests/gpu": line}, line) for line in lines if line.startswith("FAILED")]
    return [tests_row(lines[-1], done.returncode, device), *failed]


def tests_row(counts: str, status: int, device: str) -> ResultRow:
    """Return the row of pytest's last line; on a GPU a run in which no test passed is wrong."""
    wrong = counts if status else ""
    if device == "cuda" and not re.search(r"\b[1-9]\d* passed", counts):
        wrong = f"no test of tests/gpu passed: {counts}"
    return ResultRow({}, {"tests/gpu": counts, "exit_status": status}, wrong)


def run_longest(device: str, start: int, seconds: float | None = None) -> list[ResultRow]:
    """Find the longest sequence with real training steps; one row for each length that was tried."""
    command = [
        sys.executable, str(ROOT / "tools/longest.py"), "--device", device, "--ranks", "1", "--json",
        "--start", str(start), *(LARGE if device == "cuda" else SMALL).split(),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    stopped: list[ResultRow] = []
    try:
        out, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()  # it ends its ranks
        out, errors = process.communicate()
        stopped = [ResultRow({}, {"fits": f"stopped after {seconds} s"})]
    found = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    rows = [ResultRow({"tokens": one.pop("tokens", "longest")}, one) for one in found]
    return rows + stopped if rows else [ResultRow({}, {}, errors.strip()[-400:] or "nothing printed")]


def parts(options: argparse.Namespace) -> dict[str, Callable[[], list[ResultRow]]]:
    """Return the measurement of each part."""
    shape = Shape(options.heads, options.kv_heads, options.head_dim, DTYPES[options.dtype], options.device)
    tokens, rounds, kernels = options.tokens, options.rounds, options.kernels
    return {
        "tests": lambda: run_tests(options.device),
        "rates": lambda: kernel_rates(shape, tokens, rounds),
        "ring": lambda: [
            ring_row(shape, tokens, size, kernel, rounds) for size in options.ring_sizes for kernel in kernels
        ],
        "merge": lambda: [merge_rate(shape, tokens, rounds)],
        "host": lambda: [host_seconds(shape, kernel) for kernel in kernels],
        "longest": lambda: run_longest(options.device, options.longest_start),
    }


def in_part(title: str, rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Return the rows of a part with its name; a part without rows is wrong."""
    return [row._replace(case={"part": title, **row.case}) for row in rows] or [
        ResultRow({"part": title}, {}, "nothing was measured")
    ]


def write_rates(device: str, rows: Sequence[ResultRow], path: Path = RATES) -> None:
    """Put the rates of a device into the file of `kernels/select.py`; they replace those there."""
    rates: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if row.case["kernel"] in KERNELS and "refused" not in row.results:
            both = [float(row.results[f"{way}_tflops"]) for way in ("forward", "backward")]
            rates.setdefault(row.case["tiles"], {})[row.case["kernel"]] = both
    known = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(known | {device: rates}, indent=1, sort_keys=True) + "\n")


def run(options: argparse.Namespace) -> Iterator[ResultRow]:
    """Yield the rows of all parts that are not skipped."""
    for part, measure in parts(options).items():
        if part in options.skip:
            continue
        rows = measure()
        yield from in_part(PARTS[part], rows)
        if part == "rates" and options.write_rates:
            write_rates(provenance(options.device)["hardware"]["device"], rows)
