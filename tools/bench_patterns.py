"""Sparse patterns against the dense causal pass on one thread, forward + backward, interleaved in one run.

The ideal speed-up is the ratio of attended pairs (`ideal`); `reached` is how much of it the medians reach, by
the clock and, on a machine that is shared with others, better by the processor time of this process.

Example:
    OMP_NUM_THREADS=1 python tools/bench_patterns.py --tokens 16384 65536 --rounds 5
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from functools import partial
from typing import NamedTuple

import torch
from bench import in_turns, parser_of, print_row

from ds_ring import Causal, Dilated, RingMesh, SlidingWindow, build_plan, make_layout, ring_attention
from ds_ring.masks.pattern import Pattern

DENSE = "dense causal"


class Seconds(NamedTuple):
    """Of one pass, or their medians."""

    wall: float
    cpu: float


def contestants(tokens: int) -> dict[str, Pattern]:
    """The dense pass first; LongNet with up to five doublings, up to the whole sequence."""
    lengths = tuple(2048 << i for i in range(5) if 2048 << i <= tokens)
    rates = tuple(1 << i for i in range(len(lengths)))
    return {
        DENSE: Causal(),
        "LongNet": Dilated(lengths, rates, True, "paper"),
        "LongNet, equal offsets": Dilated(lengths, rates, True, "zero"),
        "window 4096": SlidingWindow(4096),
        "window 2048": SlidingWindow(2048),
        "window 1024": SlidingWindow(1024),
        "window 256": SlidingWindow(256),
    }


def seconds_of(pattern: Pattern, tokens: int, options: argparse.Namespace) -> Seconds:
    """One forward + backward pass of a ring of one."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, options.heads, tokens, options.head_dim)
    q, k, v, grad = (torch.randn(shape, generator=generator) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    layout = make_layout("contiguous", tokens=tokens, ring_size=1)
    wall, cpu = time.perf_counter(), time.process_time()
    out = ring_attention(q, k, v, pattern=pattern, layout=layout, mesh=RingMesh.single())
    out.backward(grad)
    return Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def pairs_of(pattern: Pattern, tokens: int, options: argparse.Namespace) -> int:
    """Attended pairs over all heads."""
    layout = make_layout("contiguous", tokens=tokens, ring_size=1)
    return build_plan(pattern, layout, query_heads=options.heads, kv_heads=options.heads).rank(0).pairs


def median(times: list[Seconds]) -> Seconds:
    """Of wall and processor time, each by itself."""
    return Seconds(*(statistics.median(column) for column in zip(*times, strict=True)))


def rows(tokens: int, options: argparse.Namespace) -> list[dict[str, object]]:
    """One row per pattern."""
    patterns = contestants(tokens)
    passes = {name: partial(seconds_of, pattern, tokens, options) for name, pattern in patterns.items()}
    times = in_turns(passes, options.rounds)
    dense, dense_pairs = median(times[DENSE]), pairs_of(patterns[DENSE], tokens, options)
    found: list[dict[str, object]] = []
    for name, pattern in patterns.items():
        mine, ideal = median(times[name]), dense_pairs / pairs_of(pattern, tokens, options)
        walls = [seconds.wall for seconds in times[name]]
        row: dict[str, object] = {"pattern": name, "tokens": tokens, "ideal": round(ideal, 2)}
        row |= {"median_s": round(mine.wall, 3), "fastest_s": round(min(walls), 3)}
        row |= {"slowest_s": round(max(walls), 3), "median_cpu_s": round(mine.cpu, 3)}
        row |= {"speed_up": round(dense.wall / mine.wall, 2), "speed_up_cpu": round(dense.cpu / mine.cpu, 2)}
        row |= {"reached": round(dense.wall / mine.wall / ideal, 2)}
        row |= {"reached_cpu": round(dense.cpu / mine.cpu / ideal, 2)}
        found.append(row | {"torch": torch.__version__, "cpu": platform.machine()})
    return found


def main(arguments: list[str] | None = None) -> int:
    """Print one row per pattern and length."""
    parser = parser_of(
        __doc__, tokens=([16384], "sequence lengths"), heads=4, head_dim=64,
        rounds=(5, "after one round of warm-up"), json=(False, "one JSON row per line"),
    )  # fmt: skip
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for tokens in options.tokens:
        for row in rows(tokens, options):
            print_row(row, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
