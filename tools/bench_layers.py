"""Attention of layers that differ, side by side with the same layers all global: bytes, time, balance.

Forward and backward passes of Gemma 3's layers on a real ring, with the windows of its configuration and
as if all layers saw everything, in turns. Time is of the slowest rank, processor time of the busiest; both
drop by what the windows hide. Balance is the work of the fullest rank over the mean, summed over layers.

Example:
    python tools/bench_layers.py --tokens 16384 --ring-size 4
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from bench import in_turns, parser_of, print_row

from ds_ring import Causal, RingMesh, SlidingWindow, build_plan, make_layout
from ds_ring.masks.pattern import Pattern
from ds_ring.ops.context import context_for
from ds_ring.ops.options import Options
from ds_ring.ops.ring_op import ring_attention_op
from ds_ring.schedule.layout import Layout
from ds_ring_launcher.run.local_ranks import run_ranks


def patterns(layers: int, window: int) -> dict[str, list[Pattern]]:
    """Return what each layer attends to, by the model's configuration and with all layers global."""
    from transformers import Gemma3TextConfig

    types = Gemma3TextConfig(num_hidden_layers=layers).layer_types
    own: list[Pattern] = [
        SlidingWindow(window) if one == "sliding_attention" else Causal() for one in types or []
    ]
    return {"its own": own, "all global": [Causal()] * layers}


def step(mesh: RingMesh, layout: Layout, layers: list[Pattern], asked: dict[str, int]) -> dict[str, float]:
    """Run every layer forward, then every layer backward; return seconds, processor seconds, bytes sent."""
    q_shape = (1, asked["heads"], layout.local_tokens, asked["head_dim"])
    k_shape = (1, asked["kv_heads"], layout.local_tokens, asked["head_dim"])
    inputs = [torch.randn(shape, requires_grad=True) for shape in (q_shape, k_shape, k_shape)]
    contexts = [context_for(one, layout, mesh, Options(hop_timeout_s=600)) for one in layers]
    exchanges = {id(one.exchange): one.exchange for one in contexts if one.exchange is not None}
    before = sum(one.counters.bytes_sent for one in exchanges.values())
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    outs = [ring_attention_op(*inputs, context.handle)[0] for context in contexts]
    for out in reversed(outs):
        out.backward(torch.ones_like(out))
    found = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
    return found | {"bytes": sum(one.counters.bytes_sent for one in exchanges.values()) - before}


def on_a_rank(asked: dict[str, int]) -> list[dict[str, Any]]:
    """Return the medians of every round, on this rank."""
    mesh = RingMesh.from_world(dist.get_world_size(), heartbeat_timeout_s=120)
    kinds = patterns(asked["layers"], asked["window"])
    layouts = {
        kind: make_layout("auto", tokens=asked["tokens"], ring_size=mesh.ring_size, pattern=Counter(layers))
        for kind, layers in kinds.items()
    }
    steps = {kind: partial(step, mesh, layouts[kind], layers, asked) for kind, layers in kinds.items()}
    rounds = in_turns(steps, asked["rounds"])
    rows = []
    for kind, layers in kinds.items():
        middle = {key: statistics.median(one[key] for one in rounds[kind]) for key in rounds[kind][0]}
        named: dict[str, Any] = {"layers": kind, "layout": layouts[kind].name}
        rows.append(named | middle | planned(layers, layouts[kind]))
    mesh.close()
    return rows


def planned(layers: list[Pattern], layout: Layout) -> dict[str, float]:
    """Return the pairs of all ranks, and the fullest rank's over the mean: of the sum, and layer by layer."""
    works = []
    for one, count in Counter(layers).items():
        plan = build_plan(one, layout)
        works.append(count * np.array([plan.rank(rank).pairs for rank in range(layout.ring_size)]))
    total = np.sum(works, axis=0)
    by_layer = sum(work.max() for work in works) / total.mean()
    return {
        "pairs": int(total.sum()),
        "balance": round(float(total.max() / total.mean()), 4),
        "balance_by_layer": round(float(by_layer), 4),
    }


def main(arguments: list[str] | None = None) -> int:
    """Print a row for each of the two, and how they compare."""
    parser = parser_of(
        __doc__, tokens=16384, ring_size=4, layers=6, window=512, heads=4, kv_heads=1, head_dim=64, rounds=1
    )
    asked = vars(parser.parse_args(arguments))
    ranks = run_ranks(on_a_rank, asked["ring_size"], (asked,), threads=1, deadline_s=3600)
    rows = []
    for each in zip(*ranks, strict=True):  # one row of every rank
        worst = {key: max(row[key] for row in each) for key in ("wall_s", "cpu_s")}
        rows.append(each[0] | worst | {"bytes": sum(row["bytes"] for row in each)})
        print_row(rows[-1])
    own, whole = rows
    keys = ("wall_s", "cpu_s", "bytes", "pairs")
    print_row({"of all global": {key: round(own[key] / whole[key], 3) for key in keys}})
    return 0


if __name__ == "__main__":
    sys.exit(main())
