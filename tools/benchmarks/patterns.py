"""Measure sparse patterns against the dense causal pass on one thread, forward + backward.

The ideal speed-up is the ratio of attended pairs (`ideal`); `reached` is the part of it that the medians
reach, by the clock and by the processor time of this process (better on a machine that others share).

Example:
    python tools/bench.py patterns --tokens 16384 65536 --rounds 5
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.measuring import ResultRow, measure_here, shard_inputs, timed_pass
from ds_ring import Causal, Dilated, RingMesh, SlidingWindow, build_plan, make_layout, ring_attention
from ds_ring.masks.pattern import Pattern

DENSE = "dense causal"
OPTIONS = {"tokens": [16384], "heads": 4, "head_dim": 64, "rounds": 5}


def contestants(tokens: int) -> dict[str, Pattern]:
    """Return the dense pass first; LongNet has up to five doublings, up to the whole sequence."""
    lengths = tuple(2048 << i for i in range(5) if 2048 << i <= tokens)
    rates = tuple(1 << i for i in range(len(lengths)))
    return {
        DENSE: Causal(),
        "LongNet": Dilated(lengths, rates, True, "paper"),
        "LongNet, equal offsets": Dilated(lengths, rates, True, "zero"),
        **{f"window {size}": SlidingWindow(size) for size in (4096, 2048, 1024, 256)},
    }


def measure_rows(tokens: int, options: argparse.Namespace) -> Iterator[ResultRow]:
    """Yield a row for each pattern."""
    layout, patterns = make_layout("contiguous", tokens=tokens, ring_size=1), contestants(tokens)
    torch.manual_seed(0)
    inputs = shard_inputs(layout, options.heads, options.head_dim)
    attend = partial(ring_attention, layout=layout, mesh=RingMesh.single())
    passes = {
        name: partial(timed_pass, partial(attend, pattern=pattern), inputs)
        for name, pattern in patterns.items()
    }
    measured = measure_here(passes, options)
    heads = {"query_heads": options.heads, "kv_heads": options.heads}
    pairs = {name: build_plan(pattern, layout, **heads).rank(0).pairs for name, pattern in patterns.items()}
    for name in patterns:
        walls, ideal = measured.each(name, "wall_s"), pairs[DENSE] / pairs[name]
        speed_up, by_cpu = (
            measured.median(DENSE, key) / measured.median(name, key) for key in ("wall_s", "cpu_s")
        )
        results = {"median_s": measured.median(name, "wall_s", 3), "fastest_s": round(min(walls), 3)}
        results |= {"slowest_s": round(max(walls), 3), "median_cpu_s": measured.median(name, "cpu_s", 3)}
        results |= {
            "ideal": round(ideal, 2),
            "speed_up": round(speed_up, 2),
            "speed_up_cpu": round(by_cpu, 2),
        }
        results |= {"reached": round(speed_up / ideal, 2), "reached_cpu": round(by_cpu / ideal, 2)}
        yield ResultRow({"pattern": name, "tokens": tokens}, results)


def run(options: argparse.Namespace) -> Iterator[ResultRow]:
    """Yield a row for each length and pattern."""
    for tokens in options.tokens:
        yield from measure_rows(tokens, options)
