"""Run first on a borrowed GPU: one command, under ten minutes, one GPU, the most important rows first.

The questions of tools/results/gpu_h200.md, one kernel a row; the longest sequence; versions; exactness
against float64 and ten timed passes of every kernel; the share of a ring's messages that is hidden; a trace;
the host; NCCL between processes on the one GPU; rates, tests/gpu. Each result is written to
--output as it comes (gpu_first.jsonl, .md, .log).
A row that raises, crashes or hangs costs no other row. Called again, it computes the rows that are missing
or failed; --again computes all. It ends with 1 if a row failed or was not reached.

An H200's results are in tools/results/gpu_h200.md. By their budgets the first rows fit two calls of 295 s.
--dry-run lists budgets and calls: it computes nothing, and each row ends with "no GPU". With --device cpu the
same code runs on small CPU tensors; a row names what needs CUDA.

Example:
    python tools/gpu_first.py
    python tools/gpu_first.py --dry-run --output /tmp/first
    python tools/gpu_first.py --device cpu --output /tmp/first
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any

from common import ROOT, make_parser, provenance
from gpu_rows.conductor import Book, conduct
from gpu_rows.order import CALLS, PARTS, TOTAL_S, Row, get_call, rows

sys.path.insert(0, str(ROOT))  # rows compare with tests.reference


def compute(device: str, row: Row) -> Iterator[Any]:
    """Yield the results of a row."""
    module, _, function = row.call.partition(".")
    yield from getattr(import_module(f"gpu_rows.{module}"), function)(device, **row.arguments)


def rehearse(spent: dict[str, float], row: Row) -> Iterator[Any]:
    """Yield a row's budget and the call in which it ends, after a look at whether it could be computed."""
    module, _, function = row.call.partition(".")
    inspect.signature(getattr(import_module(f"gpu_rows.{module}"), function)).bind("cuda", **row.arguments)
    over = spent[f"{row.part}: {row.name}"]
    results = {"budget_s": row.budget, "over_after_s": over, "call": get_call(over), "ended": "no GPU"}
    yield {}, results, ""


def is_healthy(device: str) -> bool:
    """Return whether the device still computes, after a row that raised."""
    import torch

    if not torch.cuda.is_initialized():  # nor must it be: ranks are forked from such a process
        return True
    try:
        return bool((torch.ones(8, device="cuda") + 1).sum() == 16)
    except Exception:  # an illegal access spoils all that follows in a process
        return False


def has_gpu() -> bool:
    """Return whether torch sees a GPU: a process of its own looks, see `preload`."""
    child = os.fork()
    if child == 0:
        import torch

        os._exit(int(not torch.cuda.is_available()))
    return os.waitpid(child, 0)[1] == 0


def read_gpu_name() -> str:
    """Return name, driver and memory of the first GPU, as nvidia-smi has them; "" without it."""
    ask = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, timeout=30, check=False).stdout.partition(
            "\n"
        )[0]
    except (OSError, subprocess.TimeoutExpired):
        return ""


def preload(device: str) -> None:
    """Import what all rows need, once: their processes are forked from this one, which uses no CUDA."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import torch

    for module in ("kernels", "questions", "overlap", "probes", "machine", "ranks"):
        import_module(f"gpu_rows.{module}")
    torch.set_num_threads(1 if device == "cpu" else torch.get_num_threads())
    assert not torch.cuda.is_initialized(), "a process that uses CUDA cannot fork others that do"


def main(arguments: list[str] | None = None) -> int:
    """Compute the rows that are missing; 1 if one of all failed or was not reached."""
    parser = make_parser(
        __doc__, minutes=(TOTAL_S / CALLS / 60, "no row begins or goes on after so many"),
        again=(False, "compute all rows, those in --output as well"),
        dry_run=(False, "compute nothing; list rows and budgets"),
        output=(results := os.environ.get("OUT", "tools/results"), "a folder; of a dry run a temporary one"),
    )  # fmt: skip
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    chosen = [row for row in rows(options.device) if row.part in options.parts]
    if options.device == "cuda" and not options.dry_run and not has_gpu():
        parser.error("no CUDA device here; --device cpu runs the same code on small CPU tensors")
    preload(options.device)
    where = provenance() | {"of": options.device, "gpu": read_gpu_name()}
    with tempfile.TemporaryDirectory() as references:
        if options.dry_run and options.output == results:  # no row of it may pass for one that was computed
            options.output = references
        book = Book(Path(options.output), where, options.again)
        os.environ |= {
            "GPU_FIRST_FOLDER": references,
            "GPU_FIRST_OUTPUT": str(Path(options.output).resolve()),
        }
        left = [row for row in chosen if f"{row.part}: {row.name}" not in book.done]
        end = 60 * options.minutes - (time.monotonic() - begin)
        work: Any = partial(compute, options.device)
        if options.dry_run:
            sums = accumulate(row.budget for row in chosen)
            names = (f"{row.part}: {row.name}" for row in chosen)
            work = partial(rehearse, dict(zip(names, sums, strict=True)))
        conduct(left, book, work, end, partial(is_healthy, options.device))
    print(book.table())
    return int(any(result["wrong"] for result in book.results))


if __name__ == "__main__":
    sys.exit(main())
