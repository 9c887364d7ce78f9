"""Measure how long ranks take to join the monitor process, and how long a verdict takes: 1,024 light ranks.

A light rank is a connection that speaks ds_ring's protocol; all of them are in this process, so the figures
include this process's own part. The limit of open files is 1,024 for the monitor at its start.

Example:
    python tools/bench.py monitor --ranks 1024 --rounds 5
"""

from __future__ import annotations

import argparse
import resource
from collections.abc import Iterator
from functools import partial

from benchmarks.measuring import ResultRow, measure_here
from tests.dist.light_ranks import verdict_seconds

KINDS = ("killed", "stopped", "late in a ring", "late in a collective")
MAX_VERDICT_S = 1.0
OPTIONS = {"ranks": 1024, "rounds": 5, "heartbeat_s": (3.0, "heartbeat timeout")}


def one_round(kind: str, options: argparse.Namespace) -> dict[str, float]:
    """Start a monitor, let a rank fail."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    return dict(
        zip(("joined", "verdict"), verdict_seconds(kind, options.ranks, options.heartbeat_s), strict=True)
    )


def run(options: argparse.Namespace) -> Iterator[ResultRow]:
    """Yield a row for each kind of fault."""
    for kind in KINDS:
        found = measure_here({kind: partial(one_round, kind, options)}, options)
        results: dict[str, float] = {}
        for name in ("joined", "verdict"):
            results |= {
                f"{name}_median_s": found.median(kind, name, 3),
                f"{name}_max_s": round(max(found.each(kind, name)), 3),
            }
        late = results["verdict_max_s"] >= MAX_VERDICT_S
        wrong = f"{kind}: expected verdicts within {MAX_VERDICT_S:g} s" if late else ""
        yield ResultRow({"fault": kind, "ranks": options.ranks}, results, wrong)
