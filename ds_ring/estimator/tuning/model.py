"""Predict the time of a pass: the plan's work and bytes over measured rates.

The model prunes, and carries a time from a short sequence to the full one; it never has the last word.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ds_ring.estimator.cost import BACKWARD_FLOPS, FORWARD_FLOPS
from ds_ring.estimator.tuning.candidates import KernelChoice, TuningCandidate, layout_of
from ds_ring.estimator.tuning.links import Links
from ds_ring.estimator.tuning.probe import KernelRate, kernel_of
from ds_ring.estimator.tuning.request import Request
from ds_ring.masks.heads import HeadsOfPart
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.tiles import Tiles
from ds_ring.schedule.plan import Plan, build_plan, sampled_origins
from ds_ring.schedule.rank_plan import RankPlan

GRADIENT_BYTES = 4  # dK and dV travel in float32
SWAPS = 4  # all-to-alls of a step with Ulysses ranks


@dataclass(frozen=True)
class Measured:
    """Hold what the machine gives."""

    kernels: dict[KernelChoice, KernelRate]  # the rate of every kernel that can be chosen
    alone_speedup: float  # how much faster a rank computes while the others wait
    matmul_flops: float  # per second, of one large product
    links: Links | None  # None where a sequence has one rank
    hop_overhead_s: float  # what a hop costs that neither computes nor carries much


@dataclass(frozen=True)
class Predicted:
    """Hold seconds of a pass forward and backward, and what they are made of."""

    seconds: float
    compute_s: float
    transfer_s: float
    overhead_s: float


class Model:
    """Predict times for one request on what was measured."""

    def __init__(self, request: Request, measured: Measured) -> None:
        self.request, self.measured = request, measured
        self._known: dict[tuple[TuningCandidate, int], Predicted] = {}

    def __call__(self, candidate: TuningCandidate, tokens: int) -> float:
        """Return the seconds that the candidate should take."""
        return self.predict(candidate, tokens).seconds

    def predict(self, candidate: TuningCandidate, tokens: int) -> Predicted:
        """Predict one candidate; overlap takes the longer of computing and moving, else their sum."""
        if (candidate, tokens) not in self._known:
            self._known[candidate, tokens] = self._predict(candidate, tokens)
        return self._known[candidate, tokens]

    def _predict(self, candidate: TuningCandidate, tokens: int) -> Predicted:
        plan = plan_of(candidate, self.request, tokens)
        ranks = [plan.rank(rank) for rank in sampled_origins(plan.ring_size)]
        groups = message_groups(candidate, ranks[0])
        work = [self._compute(candidate.kernel, rank, groups) for rank in ranks]
        # a rank that is alone in its work has what it shares with the others to itself
        compute = max(statistics.mean(work), max(work) / self.measured.alone_speedup)
        transfer = max(self._transfer(rank) for rank in ranks)
        hops = max(lane.hops for rank in ranks for walk in rank.walks for lane in walk.lanes)
        overhead = self.measured.hop_overhead_s * (2 * hops + 1) * groups + self._swaps(candidate, tokens)
        exposed = transfer / (groups * max(hops - 1, 1)) if candidate.overlap else min(compute, transfer)
        return Predicted(max(compute, transfer) + exposed + overhead, compute, transfer, overhead)

    def _compute(self, choice: KernelChoice, rank: RankPlan, groups: int) -> float:
        rate, unit = self.measured.kernels[choice], self.request.batch * self.request.head_dim
        tiles = count_tiles(rank) * groups
        forward = FORWARD_FLOPS * unit * executed_pairs(rank, choice, self.request, False)
        backward = BACKWARD_FLOPS * unit * executed_pairs(rank, choice, self.request, True)
        per_tile = rate.forward_tile_s + rate.backward_tile_s
        return forward / rate.forward_flops + backward / rate.backward_flops + tiles * per_tile

    def _transfer(self, rank: RankPlan) -> float:
        """Return seconds of moving: K and V go round twice, their gradients once."""
        links, request = self.measured.links, self.request
        if links is None or not rank.tokens_received:
            return 0.0
        # Links are full duplex: whichever direction carries more decides.
        keys = max(rank.tokens_received, rank.tokens_sent)
        per_token = 2 * request.batch * request.head_dim * (2 * request.item_bytes + GRADIENT_BYTES)
        return keys * per_token / links.bytes_per_s

    def _swaps(self, candidate: TuningCandidate, tokens: int) -> float:
        """Return seconds of the all-to-alls: q, k, v, out, and their gradients, each once."""
        links, size, request = self.measured.links, candidate.ulysses_size, self.request
        if size == 1 or links is None or links.all_to_all_bytes_per_s is None:
            return 0.0
        heads = 2 * (2 * request.heads + 2 * request.kv_heads)
        own = request.batch * tokens / request.sequence_size * request.head_dim * request.item_bytes
        rate = links.all_to_all_bytes_per_s
        return heads * own * (size - 1) / size / rate + SWAPS * links.latency_s


def plan_of(candidate: TuningCandidate, request: Request, tokens: int) -> Plan:
    """Build the plan of the candidate's first Ulysses rank; the others' work is alike."""
    ring, size = candidate.ring_size, candidate.ulysses_size
    pattern: Pattern = request.pattern if size == 1 else HeadsOfPart(request.pattern, 0, size)
    return build_plan(
        pattern,
        layout_of(request, candidate.layout, ring, size, tokens),
        query_heads=request.heads // size,
        kv_heads=request.kv_heads // size,
        prune=request.base.prune,
    )


def message_groups(candidate: TuningCandidate, rank: RankPlan) -> int:
    """Count the groups of K/V heads that go round one after the other."""
    if candidate.heads_per_message == 0:
        return len(rank.walks)
    heads = [len(range(rank.kv_heads)[walk.kv_heads]) for walk in rank.walks]
    return sum(-(-n // candidate.heads_per_message) for n in heads)


def count_tiles(rank: RankPlan) -> int:
    """Count tiles of one head of every group, over the number of groups: each has so many."""
    counts = [sum(len(visit.tiles) for visit in walk.visits) for walk in rank.walks]
    return round(sum(counts) / len(counts))


@lru_cache(maxsize=4096)
def _pairs_of(tiles: Tiles, choice: KernelChoice, request: Request, backward: bool) -> int:
    return kernel_of(choice, request).executed_pairs(tiles, backward)


def executed_pairs(rank: RankPlan, choice: KernelChoice, request: Request, backward: bool) -> int:
    """Count the pairs that the kernel multiplies on this rank, over all its query heads."""
    total = 0
    for walk in rank.walks:
        kv_heads = len(range(rank.kv_heads)[walk.kv_heads])
        for visit in walk.visits:
            for tiles, heads in _by_member(visit.tiles, rank.group):
                total += kv_heads * heads * _pairs_of(tiles, choice, request, backward)
    return total


def _by_member(tiles: Tiles, group: int) -> Iterator[tuple[Tiles, int]]:
    """Yield tiles that are for all query heads of a group, and those for one of them each."""
    single = tiles.member >= 0
    if not single.any():
        yield tiles, group
        return
    yield tiles.rows(single), 1
    if not single.all():
        yield tiles.rows(np.logical_not(single)), group
