"""Measure how planning packed documents grows with ranks and documents: processor time of one core.

A row has the layout `auto` for new documents, the plan of one rank and its steps both ways, by part. Lengths
are lognormal, 8 Ki tokens a rank; every draw is new, so nothing is cached. The slowest draw counts, too.
Python's garbage collection leaves out what was there before: it may come at any time, and walks all modules.

Example:
    python tools/bench.py planning --ranks 64 256 1024 --draws 20
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.measuring import ResultRow
from ds_ring import build_plan, make_layout
from ds_ring.schedule.lowering import lower_rank
from ds_ring_launcher.plan.documents import draws, lengths_of, pattern_of

OPTIONS = {"ranks": [64, 256, 1024], "draws": 20, "shard": (8192, "tokens of a rank"), "lengths": "lognormal"}
PARTS = ("layout", "plan", "rank", "steps")


def planned(lengths: np.ndarray, ring_size: int) -> list[float]:
    """Return the seconds of processor time of each part of planning."""
    pattern = pattern_of(lengths)
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


def run(options: argparse.Namespace) -> Iterator[ResultRow]:
    """Yield a row for each number of ranks."""
    planned(np.full(64, 64), 4)  # imports
    gc.freeze()
    for ring_size in options.ranks:
        tokens = ring_size * options.shard
        every = list(draws(lengths_of(options.lengths), tokens, options.draws))
        seconds = np.array([planned(lengths, ring_size) for lengths in every])
        total = seconds.sum(1)
        case = {"ranks": ring_size, "documents": round(np.mean([len(one) for one in every]))}
        parts = zip(PARTS, seconds.mean(0).tolist(), strict=True)
        results = {f"{part}_s": round(mean, 4) for part, mean in parts}
        whole = {"mean_s": round(total.mean(), 4), "worst_s": round(total.max(), 4)}
        yield ResultRow(case, {**results, **whole})
