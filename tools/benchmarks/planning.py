"""Measure how planning packed documents grows with ranks and documents: processor time of one core.

A row has the layout `auto` for new documents, the plan of one rank and its steps both ways, by part. Lengths
are lognormal, 8 Ki tokens a rank; every draw is new, so nothing is cached. The slowest draw counts, too.
Python's garbage collection leaves out what was there before: it may come at any time, and walks all modules.
With `--step 0.5` a stand-in for a training step (products of matrices, half a second of them) is timed alone,
after planning, and while a thread plans, as the loader's does; it needs a second core.

Example:
    python tools/bench.py planning --ranks 64 256 1024 --draws 20
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from benchmarks.document_lengths import draws, make_document_pattern, read_lengths
from benchmarks.measuring import ResultRow
from ds_ring import build_plan, make_layout
from ds_ring.schedule.lowering import lower_rank

OPTIONS = {
    "ranks": [64, 256, 1024], "draws": 20, "shard": (8192, "tokens of a rank"), "lengths": "lognormal",
    "step": (0.0, "seconds of a stand-in for a step"),
}  # fmt: skip
PARTS = ("layout", "plan", "rank", "steps")


def planned(lengths: np.ndarray, ring_size: int) -> list[float]:
    """Return the seconds of processor time of each part of planning."""
    pattern = make_document_pattern(lengths)
    at = [time.process_time()]
    sizes: dict[str, Any] = {"tokens": int(lengths.sum()), "ring_size": ring_size}
    layout = make_layout("auto", pattern=pattern, **sizes)
    at.append(time.process_time())
    plan = build_plan(pattern, layout, query_heads=64, kv_heads=8)
    at.append(time.process_time())
    rank = plan.rank(ring_size // 3)
    at.append(time.process_time())
    for backward in (False, True):
        lower_rank(rank, backward=backward)
    at.append(time.process_time())
    return np.diff(at).tolist()


def beside_a_step(every: list[np.ndarray], ring_size: int, step_s: float) -> dict[str, float]:
    """Return median seconds of a step alone, with planning before it, and with planning in a thread."""
    matrix = torch.ones(512, 512)

    def products(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            matrix @ matrix
        return time.perf_counter() - began

    count = round(step_s * 50 / products(50))
    seconds: dict[str, list[float]] = {"step_alone_s": [], "step_inline_s": [], "step_ahead_s": []}
    with ThreadPoolExecutor(1) as thread:
        for before, meanwhile in zip(every[::2], every[1::2], strict=True):
            seconds["step_alone_s"].append(products(count))
            began = time.perf_counter()
            planned(before, ring_size)
            products(count)
            seconds["step_inline_s"].append(time.perf_counter() - began)
            began = time.perf_counter()
            coming = thread.submit(planned, meanwhile, ring_size)
            products(count)
            coming.result()
            seconds["step_ahead_s"].append(time.perf_counter() - began)
    return {name: round(statistics.median(values), 4) for name, values in seconds.items()}


def run(options: argparse.Namespace) -> Iterator[ResultRow]:
    """Yield a row for each number of ranks."""
    planned(np.full(64, 64), 4)  # imports
    gc.freeze()
    for ring_size in options.ranks:
        tokens = ring_size * options.shard
        every = list(draws(read_lengths(options.lengths), tokens, options.draws))
        seconds = np.array([planned(lengths, ring_size) for lengths in every])
        total = seconds.sum(1)
        case = {
            "ranks": ring_size,
            "documents": round(np.mean([len(lengths_drawn) for lengths_drawn in every])),
        }
        parts = zip(PARTS, seconds.mean(0).tolist(), strict=True)
        results = {f"{part}_s": round(mean, 4) for part, mean in parts}
        whole = {"mean_s": round(total.mean(), 4), "worst_s": round(total.max(), 4)}
        if options.step:
            drawn = list(draws(read_lengths(options.lengths), tokens, 3 * options.draws))[options.draws :]
            whole |= beside_a_step(drawn, ring_size, options.step)
        yield ResultRow(case, {**results, **whole})
