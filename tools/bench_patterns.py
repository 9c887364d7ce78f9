"""Sparse patterns against the dense causal pass on one thread, forward + backward, interleaved in one run.

The ideal speed-up is the ratio of attended pairs; the last column is how much of it is reached.

Example:
    OMP_NUM_THREADS=1 python tools/bench_patterns.py --tokens 16384 --rounds 5
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time

import torch

from ds_ring import Causal, Dilated, RingMesh, SlidingWindow, build_plan, make_layout, ring_attention
from ds_ring.schedule.pattern import Pattern


def contestants(tokens: int) -> dict[str, Pattern]:
    """The dense pass first; LongNet with five doublings up to the whole sequence."""
    lengths = tuple(2048 << i for i in range(5) if 2048 << i <= tokens)
    rates = tuple(1 << i for i in range(len(lengths)))
    return {
        "dense causal": Causal(),
        "LongNet": Dilated(lengths, rates, True, "paper"),
        "LongNet, equal offsets": Dilated(lengths, rates, True, "zero"),
        "window 1024": SlidingWindow(1024),
    }


def seconds_of(pattern: Pattern, options: argparse.Namespace) -> float:
    """One forward + backward pass of a ring of one."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, options.heads, options.tokens, options.head_dim)
    q, k, v, grad = (torch.randn(shape, generator=generator) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    layout = make_layout("contiguous", tokens=options.tokens, ring_size=1)
    started = time.perf_counter()
    out = ring_attention(q, k, v, pattern=pattern, layout=layout, mesh=RingMesh.single())
    out.backward(grad)
    return time.perf_counter() - started


def pairs_of(pattern: Pattern, options: argparse.Namespace) -> int:
    """Attended pairs over all heads."""
    layout = make_layout("contiguous", tokens=options.tokens, ring_size=1)
    return build_plan(pattern, layout, query_heads=options.heads, kv_heads=options.heads).rank(0).pairs


def main(arguments: list[str] | None = None) -> int:
    """Print one row per pattern."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5, help="after one round of warm-up")
    parser.add_argument("--json", action="store_true", help="one JSON row per line")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    patterns = contestants(options.tokens)
    times: dict[str, list[float]] = {name: [] for name in patterns}
    for turn in range(options.rounds + 1):
        for name, pattern in patterns.items():
            seconds = seconds_of(pattern, options)
            if turn:
                times[name].append(seconds)
    dense = statistics.median(times["dense causal"])
    dense_pairs = pairs_of(patterns["dense causal"], options)
    for name, pattern in patterns.items():
        median = statistics.median(times[name])
        ideal = dense_pairs / pairs_of(pattern, options)
        row = {"pattern": name, "tokens": options.tokens, "median_s": round(median, 3)}
        row |= {"fastest_s": round(min(times[name]), 3), "slowest_s": round(max(times[name]), 3)}
        row |= {"speed_up": round(dense / median, 2), "ideal": round(ideal, 2)}
        row |= {
            "reached": round(dense / median / ideal, 2),
            "torch": torch.__version__,
            "cpu": platform.machine(),
        }
        print(json.dumps(row) if options.json else "  ".join(f"{k} {v}" for k, v in row.items()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
