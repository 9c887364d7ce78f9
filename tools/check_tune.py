"""Does `ds-ring tune` find what trying everything finds, and in a tenth of the time?

On the same ranks: first the search, then the full grid (every candidate at the full length, one pass of
warm-up and some rounds, all in turns), then the choice and the grid's best few again, side by side. Reported
are both times, the ratio of the choice's median to the grid's best median (on a busy machine the least of so
many medians is luck), and the choice's over the best of the passes side by side, which is the one to believe.

Example:
    python tools/check_tune.py --processes 2 --tokens 8192 --rounds 3
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from common import in_turns, parser_of
from tqdm import tqdm

from ds_ring_launcher.run.local_ranks import run_ranks
from ds_ring_launcher.tune.candidates import TuningCandidate, candidates
from ds_ring_launcher.tune.measurements import Clock, Passes
from ds_ring_launcher.tune.request import TuningRequest, request_from
from ds_ring_launcher.tune.result import TuningResult
from ds_ring_launcher.tune.search import get_device, tune

Times = dict[TuningCandidate, list[float]]


def grid(
    passes: Passes, everyone: Sequence[TuningCandidate], tokens: int, rounds: int, name: str
) -> tuple[Times, float]:
    """Seconds of every candidate by round, and of all of it."""
    started = time.perf_counter()
    bar = tqdm(total=len(everyone) * (rounds + 1), desc=name, disable=dist.get_rank() != 0)

    def timed(candidate: TuningCandidate) -> float:
        bar.update()
        return passes.seconds(candidate, tokens)

    times = in_turns({candidate: partial(timed, candidate) for candidate in everyone}, rounds)
    bar.close()
    return times, time.perf_counter() - started


def row_of(options: argparse.Namespace, request: TuningRequest, result: TuningResult) -> dict[str, Any]:
    """The grid, its best and the choice again, and how the search compares."""
    passes = Passes(request, Clock(get_device(request)))
    everyone = candidates(request)
    times, grid_s = grid(passes, everyone, request.tokens, options.rounds, "grid")
    medians = {candidate: statistics.median(seconds) for candidate, seconds in times.items()}
    ranked = sorted(medians, key=lambda candidate: medians[candidate])
    best, few = ranked[0], list(dict.fromkeys([result.chosen, *ranked[: options.best]]))
    again, _ = grid(passes, few, request.tokens, options.again, "side by side")
    again_s = {candidate: statistics.median(seconds) for candidate, seconds in again.items()}
    passes.close()
    return {
        "processes": options.processes,
        "tokens": request.tokens,
        "heads": request.heads,
        "candidates": len(everyone),
        "tune_s": round(result.seconds, 1),
        "grid_s": round(grid_s, 1),
        "time_ratio": round(result.seconds / grid_s, 4),
        "chosen": str(result.chosen),
        "best": str(best),
        "defaults": str(result.default),
        "chosen_over_best": round(medians[result.chosen] / medians[best], 4),
        "side_by_side": round(again_s[result.chosen] / min(again_s.values()), 4),
        "defaults_over_best": round(medians[result.default] / medians[best], 4),
        "worst_over_best": round(max(medians.values()) / medians[best], 4),
        "at_full_length": {str(one.candidate): round(one.median_s, 4) for one in result.finalists},
        "passes": result.passes,
    }


def rank_main(options: argparse.Namespace) -> None:
    """Search, grid, the best again, on one rank; rank 0 prints."""
    section = {"pattern": json.loads(options.pattern)} if options.pattern else {}
    request = request_from(
        {"ring_attention": section},
        tokens=options.tokens,
        heads=options.heads,
        kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        world_size=dist.get_world_size(),
    )
    result = tune(request, progress=True)
    row = row_of(options, request, result)
    if dist.get_rank() == 0:
        print(json.dumps(row, indent=2), flush=True)
        if options.json:
            with open(options.json, "a") as file:
                file.write(json.dumps(row) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """One row."""
    parser = parser_of(
        __doc__, processes=2, tokens=8192, heads=4, head_dim=64, deadline_seconds=7200.0,
        pattern=("", "JSON, causal by default; say '{\"window\": 1024}'"),
        rounds=(3, "of the grid, after one of warm-up"), again=(9, "rounds of that"),
        best=(4, "of the grid, timed again beside the choice"),
    )  # fmt: skip
    parser.add_argument("--kv-heads", type=int, default=None)
    parser.add_argument("--json", metavar="FILE", type=Path, help="append the row")
    options = parser.parse_args(arguments)
    threads = max(1, len(os.sched_getaffinity(0)) // options.processes)
    run_ranks(rank_main, options.processes, (options,), threads=threads, deadline_s=options.deadline_seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
