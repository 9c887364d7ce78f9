"""Settle the GPU path on one GPU: correctness, rates of kernels, a virtual ring, the longest sequence.

One command on a machine with a GPU runs tests/gpu (every pattern, dtype and head dimension against float64),
times each kernel on each kind of tile, runs the hops of virtual rings of 1 to 16 ranks at 131,072 tokens
against one pass of FlashAttention over all of it, measures the merge, the host's time of a hop and memory,
and finds the longest sequence of a model's layers (tools/longest.py). The tables go to --output as Markdown
and JSON, with hardware, versions and commit. Contestants take turns in every round; medians are reported.

It has not run on a GPU yet: of this file, too, only the part that runs on CPU tensors is tested.

Example:
    python tools/bench_gpu.py --output tools/results
    python tools/bench_gpu.py --device cpu --tokens 1024 --ring-sizes 1 2 --heads 2 --kv-heads 1 \\
        --kernels cpu flash --dtype float32 --skip tests longest
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
from bench import parser_of
from gpu_rates import RateRow, Shape, host_seconds, kernel_rates, merge_rate, ring_row
from rich.table import Table
from tqdm import tqdm

from ds_ring.kernels.select import RATES
from ds_ring.registry import KERNELS
from ds_ring_launcher.tables import console, print_table

HERE = Path(__file__).resolve().parent
PARTS = ("tests", "rates", "ring", "merge", "host", "longest")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def where(device: str) -> RateRow:
    """Return hardware, versions and commit."""
    git = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    row: RateRow = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit or "unknown",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": platform.processor() or platform.machine(),
    }
    if device == "cuda":
        found = torch.cuda.get_device_properties(0)
        row |= {
            "device": found.name,
            "memory_gib": round(found.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return row


def run_tests(workers: int = 0, seconds: float | None = None) -> list[RateRow]:
    """Run tests/gpu in so many processes; one row with what pytest counts, and one for each failure."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(workers), "tests/gpu", "--tb=short"]
    try:
        done = subprocess.run(
            command, cwd=HERE.parent, capture_output=True, text=True, check=False, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return [{"failed": f"tests/gpu did not end within {seconds} s"}]
    lines = done.stdout.strip().splitlines()
    failed = [line for line in lines if line.startswith("FAILED")]
    rows = [{"tests/gpu": lines[-1] if lines else "nothing printed", "exit status": done.returncode}]
    return [*rows, *({"tests/gpu": line, "exit status": done.returncode} for line in failed)]


def run_longest(options: argparse.Namespace, seconds: float | None = None) -> list[RateRow]:
    """Find the longest sequence with real training steps; one row for each length that was tried."""
    shape = "--layers 4 --hidden 4096 --heads 32 --kv-heads 8 --intermediate 14336 --vocab 128256"
    if options.device == "cpu":
        shape = "--layers 1 --hidden 64 --heads 2 --kv-heads 1 --intermediate 128 --vocab 512"
    command = [
        sys.executable, str(HERE / "longest.py"), "--device", options.device, "--ranks", "1", "--json",
        "--start", str(options.longest_start), *shape.split(),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    stopped: list[RateRow] = []
    try:
        said, told = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()  # it ends its ranks
        said, told = process.communicate()
        stopped = [{"tokens": "?", "fits": f"stopped after {seconds} s"}]
    rows = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    return rows + stopped if rows else [{"failed": told.strip()[-400:]}]


def measure(options: argparse.Namespace) -> dict[str, list[RateRow]]:
    """Run the parts that were not skipped; rows by part."""
    shape = Shape(options.heads, options.kv_heads, options.head_dim, DTYPES[options.dtype], options.device)
    found: dict[str, list[RateRow]] = {}
    if "tests" not in options.skip:
        found["Correctness"] = run_tests()
    if "rates" not in options.skip:
        found["Kernels by kind of tile"] = kernel_rates(shape, options.tokens, options.rounds)
    if "ring" not in options.skip:
        sizes = tqdm(options.ring_sizes, desc="virtual rings", disable=not sys.stderr.isatty())
        found["A virtual ring against one device"] = [
            ring_row(shape, options.tokens, size, kernel, options.rounds)
            for size in sizes
            for kernel in options.kernels
        ]
    if "merge" not in options.skip:
        found["Merge"] = [merge_rate(shape, options.tokens, options.rounds)]
    if "host" not in options.skip:
        found["Host time of a hop"] = [host_seconds(shape, kernel) for kernel in options.kernels]
    if "longest" not in options.skip:
        found["The longest sequence of one device"] = run_longest(options)
    return found


def cells_of(rows: Sequence[RateRow]) -> list[list[str]]:
    """Return rows as cells, their heads first; columns are the keys of all of them."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return [columns, *([str(row.get(column, "")) for column in columns] for row in rows)]


def as_markdown(header: RateRow, found: dict[str, list[RateRow]]) -> str:
    """Return everything as one Markdown text."""
    lines = [f"# {header['device']}, {header['date']}", ""]
    lines += [f"- {key}: {value}" for key, value in header.items()]
    for title, rows in found.items():
        head, *cells = cells_of(rows)
        lines += ["", f"## {title}", "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
        lines += ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join(lines) + "\n"


def write(folder: Path, header: RateRow, found: dict[str, list[RateRow]]) -> list[Path]:
    """Write Markdown and JSON, named by device and date."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{header['device']}-{header['date']}".lower().replace(" ", "-").replace("/", "-")
    paths = [folder / f"{name}.md", folder / f"{name}.json"]
    paths[0].write_text(as_markdown(header, found))
    paths[1].write_text(json.dumps({"where": header, "rows": found}, indent=1) + "\n")
    return paths


def write_rates(device: str, rows: Sequence[RateRow], path: Path = RATES) -> None:
    """Put the rates of a device into the file of `kernels/select.py`, in place of those there."""
    rates: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if row["kernel"] in KERNELS and "refused" not in row:
            both = [float(row[f"{way} TFLOP/s"]) for way in ("forward", "backward")]
            rates.setdefault(row["tiles"], {})[row["kernel"]] = both
    known = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(known | {device: rates}, indent=1, sort_keys=True) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """Print the tables, and write them where --output says."""
    parser = parser_of(
        __doc__, tokens=131_072, ring_sizes=[1, 2, 4, 8, 16], kernels=["flash", "flex"], heads=32, kv_heads=8,
        head_dim=128, rounds=5, longest_start=(65_536, "first length that is tried, tokens"),
        write_rates=(False, 'add the rates to those by which "auto" takes a kernel'),
    )  # fmt: skip
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--skip", nargs="*", choices=PARTS, default=[])
    parser.add_argument("--output", type=Path, help="folder for the Markdown and JSON files")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; --device cpu runs the same code on CPU tensors, slowly")
    header, found = where(options.device), measure(options)
    console().print("  ".join(f"{key} {value}" for key, value in header.items()), markup=False)
    for title, rows in found.items():
        head, *cells = cells_of(rows)
        table = Table(*head, title=title, title_justify="left")
        for row in cells:
            table.add_row(*row)
        print_table(table)
    if options.output is not None:
        for path in write(options.output, header, found):
            print(path)
    if options.write_rates:
        write_rates(header["device"], found.get("Kernels by kind of tile", []))
    wrong = faults(found, options.device)
    for one in wrong:
        print(f"WRONG: {one}", file=sys.stderr)
    return 1 if wrong else 0


def faults(found: dict[str, list[RateRow]], device: str) -> list[str]:
    """Return what failed, or was not looked at though it was asked for."""
    tests = [row for row in found.get("Correctness", []) if "failed" not in row]
    wrong = [str(row["tests/gpu"]) for row in tests if row["exit status"]]
    if tests and device == "cuda" and not re.search(r"\b[1-9]\d* passed", str(tests[0]["tests/gpu"])):
        wrong.append(f"no test of tests/gpu passed: {tests[0]['tests/gpu']}")
    wrong += [f"{part}: nothing was measured" for part, rows in found.items() if not rows]
    failed = [(part, row["failed"]) for part, rows in found.items() for row in rows if "failed" in row]
    return wrong + [f"{part}: {why}" for part, why in failed]


if __name__ == "__main__":
    sys.exit(main())
