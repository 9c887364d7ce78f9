"""Measure how cost grows with T and P: processor time and bytes per rank of a causal pass, both ways.

Time is the processor time of the busiest rank, so that eight ranks may share two cores; it should follow the
pairs that a rank attends. `slope` is that of log(time) against log(pairs): 1 is linear. Bytes are counted by
the exchange and must equal the plan's.

Example:
    python tools/bench.py growth --tokens 4096 16384 65536 --ring-sizes 1 2 4 8
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import numpy as np

from benchmarks.measuring import (
    ResultRow,
    Turns,
    bytes_sent,
    measure_on_ranks,
    ring_of_ranks,
    shard_inputs,
    timed_pass,
)
from ds_ring import Causal, PassOptions, build_plan, make_layout, ring_attention

OPTIONS = {
    "tokens": [4096, 8192, 16384, 32768, 65536], "ring_sizes": [1, 2, 4, 8],
    "at": (16384, "length at which the ring sizes are compared"), "heads": 2, "head_dim": 64, "rounds": 3,
}  # fmt: skip


def prepare(options: argparse.Namespace) -> Turns:
    """Return a pass of one length on this rank."""
    mesh = ring_of_ranks()
    layout = make_layout("zigzag", tokens=options.tokens, ring_size=mesh.ring_size)
    plan = build_plan(Causal(), layout, query_heads=options.heads, kv_heads=options.heads)
    own = plan.rank(mesh.ring_rank)
    planned = 2 * options.head_dim * 4 * (2 * own.tokens_sent + own.tokens_received)
    patient = PassOptions(hop_timeout_seconds=600)
    attend = partial(
        ring_attention,
        pattern=Causal(),
        layout=layout,
        mesh=mesh,
        options=patient,
    )

    def one_pass() -> dict[str, float]:
        before = bytes_sent(mesh)
        taken = timed_pass(attend, shard_inputs(layout, options.heads, options.head_dim))
        sent = bytes_sent(mesh) - before
        return taken | {"sent": sent, "pairs": own.pairs, "as_planned": sent == planned}

    return Turns({"pass": one_pass})


def row_of(size: int, tokens: int, options: argparse.Namespace) -> ResultRow:
    """Measure one length on one ring."""
    found = measure_on_ranks(prepare, argparse.Namespace(**vars(options) | {"ranks": size, "tokens": tokens}))
    as_planned = all(found.each("pass", "as_planned", min))
    results = {"cpu_s": found.median("pass", "cpu_s"), "pairs": int(found.median("pass", "pairs"))}
    results |= {"sent_mib": round(found.median("pass", "sent") / 2**20, 3), "as_planned": as_planned}
    return ResultRow(
        {"ring_size": size, "tokens": tokens}, results, "" if as_planned else "bytes are not the plan's"
    )


def run(options: argparse.Namespace) -> Iterator[ResultRow]:
    """Yield a row for each length on rings of 1 and 2 with its slope, and one for each larger ring."""
    for size in options.ring_sizes:
        rows = []
        for tokens in options.tokens if size <= 2 else [options.at]:
            rows.append(row_of(size, tokens, options))
            yield rows[-1]
        if len(rows) > 1:
            pairs, seconds = (np.log([float(row.results[key]) for row in rows]) for key in ("pairs", "cpu_s"))
            yield ResultRow({"ring_size": size}, {"slope": round(float(np.polyfit(pairs, seconds, 1)[0]), 3)})
