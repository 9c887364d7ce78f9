"""How cost grows: processor time and bytes per rank of a causal pass, forward + backward, with T and P.

Time is the processor time of the busiest rank, so that eight ranks may share two cores; it should follow the
pairs that a rank attends. `slope` is that of log(time) against log(pairs): 1 is linear. Bytes are counted by
the exchange and must equal the plan's.

Example:
    python tools/bench_growth.py --tokens 4096 16384 65536 --ring-sizes 1 2 4 8 --picture growth.png
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from tqdm import tqdm

from ds_ring import Causal, RingMesh, build_plan, make_layout
from ds_ring.runtime.autograd import ring_attention_op
from ds_ring.runtime.context import Options, context_for


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


def rank_main(rank: int, size: int, store: str, options: argparse.Namespace, out: str) -> None:
    """All lengths on one rank of a ring."""
    torch.set_num_threads(1)
    timeout = timedelta(minutes=30)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    mesh = RingMesh.from_world(size, heartbeat_timeout_s=120)
    found: dict[str, list[dict[str, float]]] = {str(tokens): [] for tokens in lengths(size, options)}
    for tokens in found:  # the first pass warms up
        one_pass(mesh, min(int(tokens), 4096), options)
        for _ in range(options.rounds):
            dist.barrier()
            found[tokens].append(one_pass(mesh, int(tokens), options))
    Path(f"{out}.{rank}").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def lengths(size: int, options: argparse.Namespace) -> list[int]:
    """All of them for rings of 1 and 2; one for larger ones."""
    return list(options.tokens) if size <= 2 else [options.at]


def rows_of(size: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One per length, of the busiest rank."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(rank_main, (size, f"{folder}/store", options, f"{folder}/out"), nprocs=size)
        ranks = [json.loads(Path(f"{folder}/out.{rank}").read_text()) for rank in range(size)]
    rows = []
    for tokens in lengths(size, options):
        passes = [rank[str(tokens)] for rank in ranks]
        busiest = max(passes, key=lambda mine: statistics.median(one["cpu_s"] for one in mine))
        row: dict[str, Any] = {"ring_size": size, "tokens": tokens}
        row["cpu_s"] = round(statistics.median(one["cpu_s"] for one in busiest), 4)
        row["pairs"] = int(busiest[0]["pairs"])
        row["mib_sent"] = round(max(mine[0]["sent"] for mine in passes) / 2**20, 3)
        row["as_planned"] = all(one["sent"] == one["planned"] for mine in passes for one in mine)
        rows.append(row)
    return rows


def slope(rows: list[dict[str, Any]]) -> float:
    """Of log(time) against log(pairs)."""
    pairs, seconds = (np.log([float(row[key]) for row in rows]) for key in ("pairs", "cpu_s"))
    return float(np.polyfit(pairs, seconds, 1)[0])


def draw(rows: list[dict[str, Any]], path: str, options: argparse.Namespace) -> None:
    """Time against T and P, bytes against T."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_tokens, by_ranks, sent) = pyplot.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    for size in (1, 2):
        mine = [row for row in rows if row["ring_size"] == size]
        if len(mine) < 2:
            continue
        tokens = [row["tokens"] for row in mine]
        line = by_tokens.plot(tokens, [row["cpu_s"] for row in mine], "o", label=f"P = {size}")[0]
        rate = mine[-1]["cpu_s"] / mine[-1]["pairs"]
        by_tokens.plot(
            tokens, [rate * row["pairs"] for row in mine], "--", color=line.get_color(), linewidth=1
        )
        if size > 1:
            sent.plot(tokens, [row["mib_sent"] for row in mine], "o-", label="P = 2, counted = planned")
    at = [row for row in rows if row["tokens"] == options.at]
    by_ranks.plot([row["ring_size"] for row in at], [row["cpu_s"] for row in at], "o", label="busiest rank")
    by_ranks.plot([row["ring_size"] for row in at], [at[0]["cpu_s"] / row["ring_size"] for row in at], "--")
    by_tokens.set(
        xlabel="tokens T", ylabel="processor seconds per rank", title="time; dashed: the pairs count"
    )
    by_ranks.set(xlabel="ring size P", ylabel="processor seconds", title=f"T = {options.at}; dashed: 1/P")
    sent.set(xlabel="tokens T", ylabel="MiB sent per rank", title="bytes")
    for axes in (by_tokens, by_ranks, sent):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> int:
    """One row per (T, P), then the slopes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384, 32768, 65536])
    parser.add_argument("--ring-sizes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--at", type=int, default=16384, help="length at which the ring sizes are compared")
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--picture", metavar="FILE.png")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    for size in tqdm(options.ring_sizes, desc="ring sizes"):
        rows += rows_of(size, options)
    for row in rows:
        print(json.dumps(row), flush=True)
    slopes = {size: [row for row in rows if row["ring_size"] == size] for size in (1, 2)}
    found = {f"P = {size}": round(slope(mine), 3) for size, mine in slopes.items() if len(mine) > 1}
    print(json.dumps({"slope of time against pairs": found}))
    if options.picture:
        draw(rows, options.picture, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
