"""The cost model's time against the clock: `tune` measures this machine, `plan` predicts, passes are timed.

On the same ranks, for each pattern: a search (`tune` of ds_ring_launcher.tune) at the longest length gives
the description of the hardware that its `--hardware-output` would write; from that alone come the planned
seconds of a forward and backward pass at all lengths, which then run for real. Attention alone, in the layout
"auto", float32.

Example:
    python tools/check_plan_time.py --processes 2 --tokens 4096 8192 16384
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from typing import Any

import torch
import torch.distributed as dist
from common import parser_of, print_row

from ds_ring import RingMesh, build_plan, make_layout, ring_attention
from ds_ring.masks.pattern import Pattern
from ds_ring.schedule.layout import Layout
from ds_ring.schedule.lowering import chunk_bytes_on
from ds_ring.schedule.plan import Plan
from ds_ring_launcher.plan.hardware import Hardware, hardware_from
from ds_ring_launcher.plan.layer_passes import slowest_pass
from ds_ring_launcher.plan.pass_memory import PassShape
from ds_ring_launcher.run.local_ranks import run_ranks
from ds_ring_launcher.tune.measurements import Clock
from ds_ring_launcher.tune.request import request_from
from ds_ring_launcher.tune.result import describe_hardware
from ds_ring_launcher.tune.search import tune

PATTERNS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 2048},
    "longnet": {"segment_lengths": [2048, 4096, 8192, 16384], "dilation_rates": [1, 2, 4, 8]},
}
ELEMENT_BYTES = 4


def planned_s(plan: Plan, hardware: Hardware, options: argparse.Namespace) -> float:
    """Seconds of the slowest rank's pass, by arithmetic."""
    chunk_bytes = chunk_bytes_on("cpu", plan.ring_size)
    shape = PassShape(1, 1, plan.layout.local_tokens, options.head_dim, ELEMENT_BYTES, chunk_bytes, "cpu")
    return slowest_pass(plan, shape, hardware, "float32", hardware.inter_node_bytes_per_s).seconds


def measured_s(pattern: Pattern, layout: Layout, mesh: RingMesh, clock: Clock, options: Any) -> float:
    """Median seconds of the slowest rank, after one pass that makes the plan."""
    shape = (1, options.heads, layout.local_tokens, options.head_dim)
    q, k, v, grad = (torch.randn(shape) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()

    def step() -> None:
        out = ring_attention(q, k, v, pattern=pattern, layout=layout, mesh=mesh)
        torch.autograd.grad(out, (q, k, v), grad)

    return statistics.median([clock.together(step) for _ in range(options.rounds + 1)][1:])


def rank_main(options: argparse.Namespace) -> None:
    """Tune, plan, measure; rank 0 prints a row for each point."""
    size = dist.get_world_size()
    mesh, clock = RingMesh.from_world(size), Clock(torch.device("cpu"))
    for name in options.patterns:
        request = request_from(
            {"ring_attention": {"pattern": PATTERNS[name]}}, tokens=max(options.tokens), heads=options.heads,
            kv_heads=None, head_dim=options.head_dim, world_size=size,
        )  # fmt: skip
        pattern, result = request.mix[0][0], tune(request)
        hardware = hardware_from(describe_hardware(result), "what tune measured")
        for tokens in options.tokens:
            layout = make_layout("auto", tokens=tokens, ring_size=size, pattern=pattern)
            plan = build_plan(pattern, layout, query_heads=options.heads, kv_heads=options.heads)
            planned = planned_s(plan, hardware, options)
            measured = measured_s(pattern, layout, mesh, clock, options)
            row = {"ranks": size, "tokens": tokens, "pattern": name, "layout": layout.name}
            row |= {"planned_s": round(planned, 4), "measured_s": round(measured, 4)}
            if dist.get_rank() == 0:
                print_row(row | {"planned_over_measured": round(planned / measured, 3)})
        if dist.get_rank() == 0 and options.hardware:
            print(json.dumps(hardware.model_dump(), indent=1), flush=True)
    mesh.close()


def main(arguments: list[str] | None = None) -> int:
    """One row per length and pattern."""
    parser = parser_of(
        __doc__, processes=2, tokens=[4096, 8192, 16384], heads=4, head_dim=64,
        rounds=(5, "timed, after one of warm-up"), hardware=(False, "print what was measured, too"),
    )  # fmt: skip
    parser.add_argument("--patterns", nargs="+", choices=PATTERNS, default=list(PATTERNS))
    options = parser.parse_args(arguments)
    threads = max(1, len(os.sched_getaffinity(0)) // options.processes)
    run_ranks(rank_main, options.processes, (options,), threads=threads, deadline_s=1800)
    return 0


if __name__ == "__main__":
    sys.exit(main())
