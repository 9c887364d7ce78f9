"""Run first on a borrowed GPU: one command, under ten minutes, one GPU.

Parts come in this order, the most important ones first: a ring of 4 and of 8 that sends to itself by NCCL
through the production exchange, against float64; tests/gpu in parallel; rates of the kernels; the blocks of
flex against Inductor's; host time and merge; probes of CUDA; the longest sequence.
Each part's rows are written to --output as soon as it ends. Called again, it does the parts that are missing
or failed; --again does all. It ends with 1 if something failed or was not reached.

No GPU has run it. With --device cpu the same code runs on small CPU tensors; a row names what needs CUDA.

Example:
    python tools/gpu_first.py
    python tools/gpu_first.py --device cpu --output /tmp/first
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu import in_part, run_longest, run_tests
from benchmarks.gpu_rates import Shape, flex_rates, host_seconds, kernel_rates, merge_rate
from benchmarks.measuring import ResultRow, markdown
from common import ROOT, parser_of, provenance

from ds_ring.registry import KV_PAYLOADS

sys.path.insert(0, str(ROOT))
from self_ring import self_group, self_ring_row  # needs tests.reference

PARTS: dict[str, str] = {
    "ring": "A ring that sends to itself", "tests": "Correctness", "rates": "Kernels by kind of tile",
    "options": "Blocks of flex", "host": "Host time of a hop", "merge": "Merge", "probes": "Probes",
    "longest": "The longest sequence of one device",
}  # fmt: skip
NO_GPU = [ResultRow({}, {"not_shown": "needs CUDA"})]


def ring_rows(shape: Shape, tokens: int, sizes: list[int], kernels: list[str]) -> list[ResultRow]:
    """Return the errors of self-sending rings."""
    with self_group(shape.device):
        way = "NCCL" if shape.device == "cuda" else "copies in this process: gloo cannot send to itself"
        kinds = [(most, payload) for payload in KV_PAYLOADS for most in (0, 1 << 40)]
        ways = [(size, kernel, *kind) for size in sizes for kernel in kernels for kind in kinds]
        rows = [self_ring_row(shape, tokens, *way) for way in ways]
    return [row._replace(case={"messages_by": way, **row.case}) for row in rows]


def probe_rows(device: str) -> list[ResultRow]:
    """Check two assumptions of the runtime: queries of events are cheap, and do not disturb a capture."""
    if device != "cuda":
        return NO_GPU
    return [
        _queries("event query, idle host", lambda: None),
        _queries("event query, host launching", _launches),
        ResultRow({"probe": "graph capture during event queries of a thread"}, _capture()),
    ]


def _launches() -> None:
    x = torch.ones(1024, device="cuda")
    for _ in range(20_000):
        x.add_(1)


def _queries(name: str, work: Callable[[], None]) -> ResultRow:
    """Time queries of an event that is not over, from a thread, while the main thread works."""
    taken: list[float] = []
    torch.cuda._sleep(1 << 30)  # clock cycles: about half a second
    event = torch.cuda.Event()
    event.record()
    over = threading.Event()

    def ask() -> None:
        while not over.is_set() and not event.query():
            begin = time.perf_counter()
            event.query()
            taken.append(time.perf_counter() - begin)
            time.sleep(1e-3)

    thread = threading.Thread(target=ask)
    thread.start()
    work()
    torch.cuda.synchronize()
    over.set()
    thread.join()
    if not taken:
        return ResultRow({"probe": name}, {}, "the event was over before the first query")
    seconds = {"median_us": statistics.median(taken), "largest_us": max(taken)}
    results = {key: round(value * 1e6, 1) for key, value in seconds.items()}
    return ResultRow({"probe": name}, results | {"queries": len(taken)})


def _capture() -> dict[str, str]:
    """Capture a graph while a thread queries an event, in both modes that torch offers."""
    row: dict[str, str] = {}
    for mode in ("global", "thread_local"):
        event, over = torch.cuda.Event(), threading.Event()
        event.record()

        def ask(event: Any = event, over: threading.Event = over) -> None:
            while not over.is_set():
                event.query()
                time.sleep(1e-4)

        thread = threading.Thread(target=ask)
        x, graph = torch.ones(1024, device="cuda"), torch.cuda.CUDAGraph()
        thread.start()
        try:
            with torch.cuda.graph(graph, capture_error_mode=mode):
                for _ in range(1000):
                    x.add_(1)
            x.zero_()
            graph.replay()
            row[mode] = "right" if bool((x == 1000).all()) else "wrong numbers"
        except RuntimeError as error:
            row[mode] = str(error).splitlines()[0][:100]
        finally:
            over.set()
            thread.join()
    return row


def works_of(options: Any) -> dict[str, Callable[[], list[ResultRow]]]:
    """Return the parts, the most important ones first."""
    cuda = options.device == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    shape = Shape(32, 8, 128, dtype, "cuda") if cuda else Shape(4, 2, 16, dtype, "cpu")
    kernels = ["flash", "flex"] if cuda else ["flash", "cpu"]
    local, tokens, rounds = (2048, 32_768, 3) if cuda else (256, 512, 1)
    start = 32_768 if cuda else 256
    workers = max(1, min(8, (os.cpu_count() or 2) // 2)) if cuda else 1

    def flex() -> list[ResultRow]:
        return [
            row for dim in (64, 128, 256) for row in flex_rates(shape._replace(head_dim=dim), tokens, rounds)
        ]

    return {
        "ring": lambda: ring_rows(shape, local, options.ring_sizes, kernels),
        "tests": lambda: run_tests(options.device, workers, options.part_seconds),
        "rates": partial(kernel_rates, shape, tokens, rounds),
        "options": flex if cuda else lambda: NO_GPU,
        "host": lambda: [host_seconds(shape, kernel) for kernel in kernels],
        "merge": lambda: [merge_rate(shape, tokens, rounds)],
        "probes": lambda: probe_rows(options.device),
        "longest": lambda: run_longest(options.device, start, options.part_seconds),
    }


def main(arguments: list[str] | None = None) -> int:
    """Do the parts that are missing; 1 if one of all failed or was not reached."""
    parser = parser_of(
        __doc__, minutes=(8.0, "no part begins after so many"), part_seconds=(200.0, "of tests; of longest"),
        ring_sizes=[4, 8], again=(False, "do all parts, those in --output as well"), output="tools/results",
    )  # fmt: skip
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; --device cpu runs the same code on small CPU tensors")
    header, begin = provenance(options.device), time.monotonic()
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    name = f"gpu_first-{header['hardware']['device']}".lower().replace(" ", "-").replace("/", "-")
    state = folder / f"{name}.json"
    known = json.loads(state.read_text()) if state.is_file() and not options.again else {}
    same = known.get("where", {}).get("commit") == header["commit"]
    rows = [ResultRow(**row) for row in known["rows"]] if same else []
    for part, work in works_of(options).items():
        title = PARTS[part]
        done = [row for row in rows if row.case["part"] == title]
        if part not in options.parts or (done and not any(row.wrong for row in done)):
            continue
        started, found = time.monotonic(), [ResultRow({}, {}, f"{part}: not reached; call again")]
        if started - begin <= 60 * options.minutes:
            try:
                found = work()
            except Exception as error:  # one part that fails must not cost the others
                found = [ResultRow({}, {}, f"{type(error).__name__}: {str(error)[:300]}")]
            print(f"{time.monotonic() - started:6.1f} s  {title}: {len(found)} rows", flush=True)
        rows = [row for row in rows if row.case["part"] != title] + in_part(title, found)
        state.write_text(
            json.dumps({"where": header, "rows": [row._asdict() for row in rows]}, indent=1) + "\n"
        )
        state.with_suffix(".md").write_text(f"{json.dumps(header)}\n\n{markdown(rows)}")
    print(markdown(rows))
    wrong = [f"{row.case['part']}: {row.wrong}" for row in rows if row.wrong]
    for one in wrong:
        print(f"WRONG: {one}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
