"""Predict the time of a pass: the plan's work and bytes over measured rates.

The model prunes, and carries a time from a short sequence to the full one; it never has the last word.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from functools import lru_cache

from ds_ring.masks.catalog import HeadShard
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.tiles import Tiles
from ds_ring.schedule.plan import Plan, build_plan, sample_origins

from ..plan.estimate import swapped_heads
from ..plan.pass_memory import PassShape
from ..plan.pass_time import PassRates, TimeLine, count_work, time_line
from .candidates import KernelChoice, TuningCandidate, plan_layout
from .measurements import KernelRate, Links, get_tuned_kernel
from .request import TuningRequest

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

    def __init__(self, request: TuningRequest, measured: Measured) -> None:
        self.request, self.measured = request, measured

    def __call__(self, candidate: TuningCandidate, tokens: int) -> float:
        """Return the seconds that the candidate should take."""
        return self.predict(candidate, tokens).seconds

    def predict(self, candidate: TuningCandidate, tokens: int) -> Predicted:
        """Predict a layer's pass, the mean where layers differ.

        Overlap takes the longer of computing and moving, else their sum.
        """
        mix = self.request.mix
        count, swaps = sum(layers for _, layers in mix), self._swaps(candidate, tokens)
        mean = [0.0] * 4
        for pattern, layers in mix:
            parts = self._pass(candidate, build_candidate_plan(candidate, self.request, tokens, pattern))
            mean = [so_far + layers / count * part for so_far, part in zip(mean, parts, strict=True)]
        seconds, compute, transfer, posting = mean
        return Predicted(seconds + swaps, compute, transfer, posting + swaps)

    def _pass(self, candidate: TuningCandidate, plan: Plan) -> tuple[float, float, float, float]:
        """Return seconds of the slowest rank's pass: all of it, kernel, transfer, posting."""
        lines = [self._lines(candidate, plan, rank) for rank in sample_origins(plan.ring_size)]
        work = [sum(float(line.kernel.sum()) for line in of_rank) for of_rank in lines]
        # a rank that works alone has the shared resources to itself
        alone = max(statistics.mean(work), max(work) / self.measured.alone_speedup)
        scale = alone / max(work) if max(work) else 1.0
        passes = [[line._replace(kernel=line.kernel * scale) for line in of_rank] for of_rank in lines]
        slowest = max(passes, key=lambda both: sum(line.seconds(candidate.overlap) for line in both))
        compute, posting, transfer = (float(sum(line[i].sum() for line in slowest)) for i in range(3))
        return sum(line.seconds(candidate.overlap) for line in slowest), compute, transfer, posting

    def _lines(self, candidate: TuningCandidate, plan: Plan, rank: int) -> list[TimeLine]:
        """Return the time lines of one rank, forward and backward."""
        request, measured, choice = self.request, self.measured, candidate.kernel
        rate, links = measured.kernels[choice], measured.links
        local, element = plan.layout.local_tokens, request.item_bytes
        # nothing travels where there are 0 heads per message: then all heads go together
        message = candidate.heads_per_message * request.batch * local * request.head_dim * element
        sizes = (request.batch, plan.group, local, request.head_dim, element, max(message, 1))
        shape = PassShape(*sizes, kernel=request.kernel)
        bytes_per_s = links.bytes_per_s if links is not None else math.inf
        lines = []
        for backward in (False, True):
            schedule = shape.schedule(plan.rank(rank).classes, backward)

            def executed(tiles: Tiles, backward: bool = backward) -> int:
                return _executed_pairs(tiles, choice, request, backward)

            steps = {id(chunk.steps): chunk.steps for chunk in schedule.chunks}
            work = {key: count_work(chunk_steps, shape, executed) for key, chunk_steps in steps.items()}
            flops = rate.backward_flops if backward else rate.forward_flops
            tile_s = rate.backward_tile_s if backward else rate.forward_tile_s
            rates = PassRates(flops, tile_s, False, measured.hop_overhead_s, bytes_per_s)
            lines.append(time_line(schedule, work, shape, rates))
        return lines

    def _swaps(self, candidate: TuningCandidate, tokens: int) -> float:
        """Return seconds of the all-to-alls: q, k, v, out, and their gradients, each once."""
        links, size, request = self.measured.links, candidate.ulysses_size, self.request
        if size == 1 or links is None or links.all_to_all_bytes_per_s is None:
            return 0.0
        heads = 2 * swapped_heads(request.heads, request.kv_heads)
        shard_bytes = request.batch * tokens / request.sequence_size * request.head_dim * request.item_bytes
        rate = links.all_to_all_bytes_per_s
        return heads * shard_bytes * (size - 1) / size / rate + SWAPS * links.latency_s


def build_candidate_plan(
    candidate: TuningCandidate, request: TuningRequest, tokens: int, pattern: Pattern
) -> Plan:
    """Build a pattern's plan of the candidate's first Ulysses rank; the others' work is alike."""
    ring, size = candidate.ring_size, candidate.ulysses_size
    return build_plan(
        pattern if size == 1 else HeadShard(pattern, 0, size),
        plan_layout(request, candidate.layout, ring, size, tokens),
        query_heads=request.heads // size,
        kv_heads=request.kv_heads // size,
        prune=request.base.prune,
        gradient_payload=request.base.gradient_payload,
        kv_payload=request.base.kv_payload,
    )


@lru_cache(maxsize=4096)
def _executed_pairs(tiles: Tiles, choice: KernelChoice, request: TuningRequest, backward: bool) -> int:
    return get_tuned_kernel(choice, request).count_executed_pairs(tiles, backward)
