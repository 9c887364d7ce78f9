"""Compare rings of every size, rings whose sizes divide the ring's, and one ring, on a mixture of lengths.

Nothing runs: seconds are those by which `"dynamic_ring": true` divides a batch (`SampleTimes`), with rates
that are about an H100's; bytes are counted in the plans of the packed rows, forward and backward, of the rank
that sends most. Lengths are lognormal, as those of texts are. The model is one of 8 billion parameters.
With the defaults, 27 November 2026: every size 1.08 times as fast as one ring with 0.98 of its bytes, sizes
that divide 1.06 times with 1.13 of its bytes.

Example:
    python tools/bench.py dynamic-sizes --ranks 8 --batch 32 --median 2048 --sigma 1.3 --longest 131072
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Iterator
from itertools import pairwise

from benchmarks.measuring import ResultRow
from ds_ring import Causal, Documents, RingConfig, make_layout
from ds_ring.data.dynamic_ring.intervals import between_neighbours, ring_order
from ds_ring.data.dynamic_ring.sample_times import MeasuredRates, ModelSizes, SampleTimes
from ds_ring.data.dynamic_ring.sub_rings import BatchLengths, Filled, RingSizes, divide, fill_rings
from ds_ring.kernels.select import get_kernel
from ds_ring.limits import divisors
from ds_ring.schedule.plan import build_plan

OPTIONS = {
    "ranks": 8, "batch": (32, "samples"), "median": (2048, "tokens"), "sigma": (1.3, "of the logarithms"),
    "longest": (131_072, "tokens of a sample at most"), "draws": (8, "batches"), "seed": 0,
    "link": (40.0, "GB/s from a rank to the next one"),
}  # fmt: skip
MODEL = ModelSizes(32, 4096, 32, 8, 128, 14336, 128_256)
# About an H100's (not measured here): attention, a tile, other products, and a hop.
FLOPS, TILE_S, PRODUCT_FLOPS, HOP_S = (4e14, 3.5e14), (5e-6, 5e-6), 5e14, 5e-5
WAYS = ("one ring", "sizes that divide", "every size")


def divisions_of(ranks: int, sizes: list[int]) -> Iterator[RingSizes]:
    """Yield every division of so many ranks into rings of some sizes, ascending ones."""
    if not ranks:
        yield ()
    for number, size in enumerate(sizes):
        if size <= ranks:
            yield from ((*rest, size) for rest in divisions_of(ranks - size, sizes[: number + 1]))


def best_of_divisors(batch: BatchLengths, ranks: int, times: SampleTimes) -> Filled:
    """Return the fastest division into rings whose sizes divide the number of ranks."""
    known = {size: [times.sample(n, size) for n in batch.lengths] for size in divisors(ranks)}
    every = (fill_rings(batch, one[::-1], times, known.__getitem__) for one in divisions_of(ranks, [*known]))
    return min((one for one in every if one is not None), key=lambda one: one.seconds)


def bytes_of(lengths: list[int], ranks: int, linked: bool) -> int:
    """Return the bytes of all layers that the busiest rank of a ring sends for packed samples, both ways.

    `linked` rings keep to four peers ([Note: rings of intervals] in `intervals.py`).
    """
    if ranks == 1 or not lengths:
        return 0
    ids = [number for number, tokens in enumerate(lengths) for _ in range(tokens)]
    pattern = Causal() & Documents(ids)
    layout = make_layout("auto", tokens=len(ids), ring_size=ranks, pattern=pattern)
    plan = build_plan(pattern, layout, query_heads=MODEL.heads, kv_heads=MODEL.kv_heads)
    if linked:
        plan = between_neighbours(plan, ring_order(ranks), 2 * ranks)
    own = [plan.rank(rank) for rank in range(ranks)]
    # K and V in bfloat16, forward and backward; a float32 gradient of each for what arrived.
    return max(MODEL.layers * 2 * MODEL.head_dim * (4 * x.tokens_sent + 4 * x.tokens_received) for x in own)


def run(options: argparse.Namespace) -> Iterator[ResultRow]:
    """Yield a row for each way to divide."""
    drawn, ranks = random.Random(options.seed), options.ranks
    config = RingConfig(ring_size=ranks, dynamic_ring=True)
    rates = MeasuredRates(FLOPS, TILE_S, PRODUCT_FLOPS, options.link * 1e9, HOP_S)
    times = SampleTimes(MODEL, config, get_kernel("cpu", "cpu"), rates, ("cpu", 2))
    seconds, sent = ({way: list[float]() for way in WAYS} for _ in range(2))
    rings: dict[str, list[list[int]]] = {way: [] for way in WAYS}
    for _ in range(options.draws):
        exponents = (drawn.gauss(0.0, options.sigma) for _ in range(options.batch))
        lengths = tuple(min(max(round(options.median * math.exp(x)), 1), options.longest) for x in exponents)
        most = -(-round(1.125 * max(sum(lengths), max(lengths))) // ranks)
        batch = BatchLengths(lengths, max(most, options.median), padded=False)
        found = divide(batch, ranks, times)
        on_all = [times.sample(tokens, ranks) for tokens in lengths]
        whole = fill_rings(batch, (ranks,), times, {ranks: on_all}.__getitem__)
        few = best_of_divisors(batch, ranks, times)
        assert whole is not None
        every = [([one.ranks for one in found.rings], [one.samples for one in found.rings], found.seconds)]
        others = [(list(one.sizes), list(one.held), one.seconds) for one in (whole, few)]
        for way, (sizes, held, taken) in zip(WAYS, others + every, strict=True):
            seconds[way].append(taken)
            rings[way].append(sorted(sizes, reverse=True))
            each = ([lengths[n] for n in samples] for samples in held)
            sent[way].append(max(bytes_of(*one, way != WAYS[0]) for one in zip(each, sizes, strict=True)))
    for way in WAYS:
        ratios = [a / b for a, b in zip(seconds[WAYS[0]], seconds[way], strict=True)]
        results = {
            "modelled_s": round(statistics.mean(seconds[way]), 4),
            "times_as_fast_as_one_ring": round(statistics.mean(ratios), 3),
            "sent_bytes": round(statistics.mean(sent[way])),
            "rings": rings[way],
        }
        yield ResultRow({"way": way, "ranks": ranks}, results, _wrong(seconds))


def _wrong(seconds: dict[str, list[float]]) -> str:
    """Return the fault if a way that has more divisions is slower by more than 3 %."""
    sums = [sum(seconds[way]) for way in WAYS]
    return "" if all(b <= 1.03 * a for a, b in pairwise(sums)) else f"seconds rise: {sums}"
