"""How cost grows: processor time and bytes per rank of a causal pass, forward + backward, with T and P.

Time is the processor time of the busiest rank, so that eight ranks may share two cores; it should follow the
pairs that a rank attends. `slope` is that of log(time) against log(pairs): 1 is linear. Bytes are counted by
the exchange and must equal the plan's.

Example:
    python tools/bench_growth.py --tokens 4096 16384 65536 --ring-sizes 1 2 4 8
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from bench import parser_of, print_row
from tqdm import tqdm

from ds_ring import Causal, RingMesh, build_plan, make_layout
from ds_ring.ops.context import context_for
from ds_ring.ops.options import Options
from ds_ring.ops.ring_op import ring_attention_op
from ds_ring_launcher.run.local_ranks import run_ranks


def one_pass(mesh: RingMesh, tokens: int, options: argparse.Namespace) -> dict[str, float]:
    """Processor seconds of this rank, bytes sent and planned, pairs attended."""
    layout = make_layout("zigzag", tokens=tokens, ring_size=mesh.ring_size)
    context = context_for(Causal(), layout, mesh, Options(hop_timeout_s=600))
    shape = (1, options.heads, layout.local_tokens, options.head_dim)
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    counters = context.exchange.counters if context.exchange is not None else None
    before = counters.bytes_sent if counters else 0
    cpu = time.process_time()
    out, _ = ring_attention_op(q, k, v, context.handle)
    out.backward(torch.randn(shape))
    cpu = time.process_time() - cpu
    sent = counters.bytes_sent - before if counters else 0
    plan = build_plan(Causal(), layout, query_heads=options.heads, kv_heads=options.heads)
    own = plan.rank(mesh.ring_rank)
    planned = 2 * options.head_dim * 4 * (2 * own.tokens_sent + own.tokens_received)
    return {"cpu_s": cpu, "sent": sent, "planned": planned, "pairs": own.pairs}


def on_a_rank(options: argparse.Namespace, lengths: list[int]) -> list[list[dict[str, float]]]:
    """The passes of all lengths on one rank of a ring."""
    mesh = RingMesh.from_world(dist.get_world_size(), heartbeat_timeout_s=120)
    found: list[list[dict[str, float]]] = []
    for tokens in lengths:  # the first pass warms up
        one_pass(mesh, min(tokens, 4096), options)
        found.append([])
        for _ in range(options.rounds):
            dist.barrier()
            found[-1].append(one_pass(mesh, tokens, options))
    return found


def rows_of(size: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One per length, of the busiest rank: all of them for rings of 1 and 2, one for larger ones."""
    lengths, rows = list(options.tokens) if size <= 2 else [options.at], []
    ranks = run_ranks(on_a_rank, size, (options, lengths), threads=1, deadline_s=3600)
    for tokens, *passes in zip(lengths, *ranks, strict=True):
        busiest = max(passes, key=lambda mine: statistics.median(one["cpu_s"] for one in mine))
        row: dict[str, Any] = {"ring_size": size, "tokens": tokens}
        row["cpu_s"] = round(statistics.median(one["cpu_s"] for one in busiest), 4)
        row["pairs"] = int(busiest[0]["pairs"])
        row["mib_sent"] = round(max(mine[0]["sent"] for mine in passes) / 2**20, 3)
        row["as_planned"] = all(one["sent"] == one["planned"] for mine in passes for one in mine)
        rows.append(row)
    return rows


def main(arguments: list[str] | None = None) -> int:
    """One row per (T, P), then the slopes."""
    parser = parser_of(
        __doc__, tokens=[4096, 8192, 16384, 32768, 65536], ring_sizes=[1, 2, 4, 8],
        at=(16384, "length at which the ring sizes are compared"), heads=2, head_dim=64, rounds=3,
    )  # fmt: skip
    options, slopes = parser.parse_args(arguments), {}
    for size in tqdm(options.ring_sizes, desc="ring sizes"):
        rows = rows_of(size, options)
        for row in rows:
            print_row(row)
        if len(rows) > 1:
            pairs, seconds = (np.log([float(row[key]) for row in rows]) for key in ("pairs", "cpu_s"))
            slopes[f"P = {size}"] = round(float(np.polyfit(pairs, seconds, 1)[0]), 3)
    print_row({"slope of time against pairs": slopes})
    return 0


if __name__ == "__main__":
    sys.exit(main())
