"""Measure the kernel by itself: its rate forward and backward, and the fixed cost of a tile.

All ranks measure at once, as they will compute at once: what they share (cores, memory) is in the figures.
How much faster one of them is alone is measured as well: ranks with little work leave it to the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ds_ring.masks.catalog import Causal
from ds_ring.module import options_from_config
from ds_ring.runtime.autograd import ring_attention_backward_op, ring_attention_op
from ds_ring.runtime.context import RingContext, context_for
from ds_ring.runtime.kernels import Kernel, get_kernel
from ds_ring.runtime.mesh import RingMesh
from ds_ring.schedule.layout import make_layout
from ds_ring.schedule.plan import build_plan

from ..plan.pass_time import BACKWARD_FLOPS, FORWARD_FLOPS
from .candidates import KernelChoice
from .clock import Clock
from .request import Request

SMALL_TOKENS, LARGE_TOKENS = 512, 4096  # sides of the triangles that are timed
TURNS = 3
MATMUL_SIDE = {"cpu": 1024, "cuda": 8192}


@dataclass(frozen=True)
class KernelRate:
    """Hold what a kernel does on one rank while all of them work."""

    # forward_flops, backward_flops: per second, of the pairs that it multiplies, hidden ones included
    forward_flops: float
    backward_flops: float
    # forward_tile_s, backward_tile_s: what a tile costs beside its pairs, seconds
    forward_tile_s: float
    backward_tile_s: float


class Sample(NamedTuple):
    """Hold FLOPs and seconds of one size, forward and backward."""

    flops: tuple[float, float]
    seconds: tuple[float, float]


def kernel_of(choice: KernelChoice, request: Request) -> Kernel:
    """Return the kernel with these options."""
    return get_kernel(request.kernel, request.device, choice.options, choice.block_size)


class Probe:
    """Time kernels on tensors of one request.

    Args:
        request: shapes and device.
        clock: of all ranks.
    """

    def __init__(self, request: Request, clock: Clock) -> None:
        self.request, self.clock = request, clock
        self.heads = 1 if request.device == "cpu" else request.heads  # a GPU wants to be filled
        self.mesh = RingMesh.single()

    def rates(
        self, choices: Sequence[KernelChoice], large_tokens: int, told: Callable[[], object]
    ) -> dict[KernelChoice, KernelRate]:
        """Measure a kernel with each of these options, in turns; the least of the turns counts.

        Args:
            choices: options.
            large_tokens: the larger of the two sizes.
            told: called `TURNS` times for each choice.
        """
        samples: dict[tuple[KernelChoice, int], list[Sample]] = defaultdict(list)
        # In turns, so that a busy moment of the machine hits every choice alike.
        for turn in range(TURNS):
            for choice in choices:
                if not turn:
                    self._sample(choice, SMALL_TOKENS, 1)  # warms up
                for tokens, rounds in ((SMALL_TOKENS, 3), (large_tokens, 1)):
                    samples[choice, tokens].append(self._sample(choice, tokens, rounds))
                told()
        return {
            choice: _rate(*(samples[choice, n] for n in (SMALL_TOKENS, large_tokens))) for choice in choices
        }

    def alone_speedup(self, choice: KernelChoice, rank: int, tokens: int) -> float:
        """Return seconds while all ranks compute over those of rank 0 alone; at least 1."""
        context, tensors = self._pass(choice, tokens)

        def work() -> None:
            ring_attention_op(*tensors[:3], context.handle)

        together = self.clock.together(work, 3)
        alone = []
        for _ in range(3):
            self.clock.meet()
            alone.append(self.clock.slowest(self.clock.own(work) if rank == 0 else 0.0))
        return max(together / min(alone), 1.0)

    def matmul_flops(self) -> float:
        """Measure FLOP/s of one large product in the request's dtype, while all ranks compute."""
        side = MATMUL_SIDE[self.request.device]
        dtype = getattr(torch, self.request.dtype)
        a = torch.ones(side, side, dtype=dtype, device=self.clock.device)
        self.clock.own(lambda: a @ a)
        return 2 * side**3 / self.clock.together(lambda: a @ a, 3)

    def _pass(self, choice: KernelChoice, tokens: int) -> tuple[RingContext, list[Tensor]]:
        request = self.request
        keys = {"kernel_options": dict(choice.options), "block_size": choice.block_size}
        options = options_from_config(request.base.model_copy(update=keys))
        layout = make_layout("contiguous", tokens=tokens, ring_size=1)
        context = context_for(Causal(), layout, self.mesh, options)
        shape, dtype = (1, self.heads, tokens, request.head_dim), getattr(torch, request.dtype)
        return context, [torch.randn(shape, dtype=dtype, device=self.clock.device) for _ in range(4)]

    def _sample(self, choice: KernelChoice, tokens: int, rounds: int) -> Sample:
        context, (q, k, v, grad) = self._pass(choice, tokens)
        results: list[tuple[Tensor, Tensor]] = []
        forward_s = self.clock.together(
            lambda: results.append(ring_attention_op(q, k, v, context.handle)), rounds
        )
        out, lse = results[0]
        backward_s = self.clock.together(
            lambda: ring_attention_backward_op(grad, q, k, v, out, lse, context.handle), rounds
        )
        layout = make_layout("contiguous", tokens=tokens, ring_size=1)
        tiles = build_plan(Causal(), layout).rank(0).classes[0].hops[0].tiles
        kernel, unit = kernel_of(choice, self.request), self.heads * self.request.head_dim
        forward = FORWARD_FLOPS * unit * kernel.executed_pairs(tiles)
        backward = BACKWARD_FLOPS * unit * kernel.executed_pairs(tiles, backward=True)
        return Sample((forward, backward), (forward_s, backward_s))


def _rate(small: list[Sample], large: list[Sample]) -> KernelRate:
    (forward, forward_s), (backward, backward_s) = (_fit(_least(small), _least(large), way) for way in (0, 1))
    return KernelRate(forward, backward, forward_s, backward_s)


def _least(samples: list[Sample]) -> Sample:
    """Return the least seconds, forward and backward each by itself."""
    forward, backward = (min(sample.seconds[way] for sample in samples) for way in (0, 1))
    return Sample(samples[0].flops, (forward, backward))


def _fit(small: Sample, large: Sample, way: int) -> tuple[float, float]:
    """Fit rate and fixed seconds to two points; without a rise, return the larger one's rate alone."""
    rise_s = large.seconds[way] - small.seconds[way]
    if rise_s <= 0:
        return large.flops[way] / large.seconds[way], 0.0
    rate = (large.flops[way] - small.flops[way]) / rise_s
    return rate, max(small.seconds[way] - small.flops[way] / rate, 0.0)
