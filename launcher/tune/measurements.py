"""Time passes of one attention layer, the kernel and the network on all ranks.

The device is idle before and after each timing, and the slowest rank counts.
"""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_ring.attention_module import RingAttention
from ds_ring.comm.exchange import Exchange
from ds_ring.comm.groups import gather_objects
from ds_ring.comm.mesh import RingMesh
from ds_ring.comm.messages import Message
from ds_ring.errors import RingMeshError, RingMismatchError
from ds_ring.kernels.select import Kernel, get_kernel
from ds_ring.masks.catalog import Causal
from ds_ring.ops.context import RingContext, make_ring_context
from ds_ring.ops.options import Options
from ds_ring.ops.ring_op import ring_attention_backward_op, ring_attention_op
from ds_ring.schedule.layout import make_layout
from ds_ring.schedule.plan import build_plan

from ..plan.pass_time import BACKWARD_FLOPS, FORWARD_FLOPS
from .candidates import KernelChoice, TuningCandidate, default_heads, plan_layout, read_section
from .request import TuningRequest


class Clock:
    """Measure what all ranks do together.

    Args:
        device: of the tensors; CUDA work is waited for at both ends.
    """

    def __init__(self, device: torch.device) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RingMeshError("tune: expected a process group, got none; use `ds-ring tune`, or torchrun")
        self.device = device
        self._group: ProcessGroup | None = None  # the world
        if dist.get_backend() != "gloo":
            self._group = dist.new_group(backend="gloo")  # so that a barrier occupies no device

    def idle(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def meet(self) -> None:
        """Wait for all ranks."""
        self.idle()
        dist.barrier(group=self._group)

    def require_equal(self, text: str) -> None:
        """Raise RingMismatchError on every rank unless all ranks have the same text."""
        texts = gather_objects(text, self._group)
        differing = next((rank for rank, text_there in enumerate(texts) if text_there != texts[0]), None)
        if differing is not None:
            raise RingMismatchError(
                f"tune: expected one request, got {texts[0]} on rank 0 and {texts[differing]} on rank"
                f" {differing}"
            )

    def ranks_here(self) -> int:
        """Count the ranks on this rank's host."""
        return gather_objects(socket.gethostname(), self._group).count(socket.gethostname())

    def slowest(self, value: float) -> float:
        """Return the largest of all ranks' values, the same bits on all."""
        together = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(together, op=dist.ReduceOp.MAX, group=self._group)
        return float(together)

    def own(self, work: Callable[[], object]) -> float:
        """Measure seconds on this rank; the device is idle before and after."""
        self.idle()
        started = time.perf_counter()
        work()
        self.idle()
        return time.perf_counter() - started

    def together(self, work: Callable[[], object], rounds: int = 1) -> float:
        """Return the slowest rank's seconds, all ranks starting at once; the least of some rounds."""
        # The least and not the median: this is for what the machine can do, and a disturbance only adds.
        seconds = []
        for _ in range(rounds):
            self.meet()
            seconds.append(self.slowest(self.own(work)))
        return min(seconds)


HEARTBEAT_S = 60.0
TINY_TOKENS = 16  # of a rank, where only the number of hops counts


class Passes:
    """Run candidates. All ranks must ask for the same ones in the same order.

    Args:
        request: shapes.
        clock: of all ranks.
    """

    def __init__(self, request: TuningRequest, clock: Clock) -> None:
        self.request, self.clock = request, clock
        self.count = 0
        self._meshes: dict[tuple[int, int], RingMesh] = {}  # by ring and Ulysses size
        self._inputs: dict[tuple[int, ...], list[Tensor]] = {}

    def mesh(self, ring_size: int, ulysses_size: int) -> RingMesh:
        """Return the mesh of these sizes, made at the first use."""
        sizes = (ring_size, ulysses_size)
        if sizes not in self._meshes:
            self._meshes[sizes] = RingMesh.from_world(*sizes, heartbeat_timeout_s=HEARTBEAT_S)
        return self._meshes[sizes]

    def seconds(self, candidate: TuningCandidate, tokens: int) -> float:
        """Measure one layer's pass on the slowest rank, inputs not counted; the mean where layers differ."""
        ring, ulysses = candidate.ring_size, candidate.ulysses_size
        layout = plan_layout(self.request, candidate.layout, ring, ulysses, tokens)
        config, mesh = read_section(candidate, self.request, tokens), self.mesh(ring, ulysses)
        q, k, v, grad = self._tensors(layout.local_tokens // ulysses)
        total, mix = 0.0, self.request.mix
        for pattern, layers in mix:
            attention = RingAttention(config, mesh=mesh, layout=layout, pattern=pattern)

            def step(attention: RingAttention = attention) -> None:
                out = attention(q, k, v)
                torch.autograd.grad(out, (q, k, v), grad)

            self.count += 1
            total += layers * self.clock.together(step)
        return total / sum(layers for _, layers in mix)

    def hop_overhead(self, candidate: TuningCandidate) -> float:
        """Measure seconds of a hop that carries next to nothing; 0 in a ring of one."""
        if candidate.ring_size == 1:
            return 0.0
        tokens = TINY_TOKENS * self.request.sequence_size
        heads = default_heads(self.request, candidate.ring_size, candidate.ulysses_size, tokens)
        candidate = replace(candidate, heads_per_message=heads)  # all that are read alike
        self.seconds(candidate, tokens)
        return min(self.seconds(candidate, tokens) for _ in range(5)) / (2 * candidate.ring_size + 1)

    def close(self) -> None:
        """Free what was made."""
        self._inputs.clear()
        for mesh in self._meshes.values():
            mesh.close()

    def _tensors(self, local_tokens: int) -> list[Tensor]:
        """Return q, k, v and the gradient of out, [B, H, S, D]; those of one length are kept."""
        request = self.request
        shape = (request.batch, request.heads, local_tokens, request.head_dim)
        if shape not in self._inputs:
            # One length at a time: two of them may not fit the device.
            self._inputs.clear()
            dtype, device = getattr(torch, request.dtype), self.clock.device
            shapes = [shape, *[(shape[0], request.kv_heads, *shape[2:])] * 2, shape]
            tensors = [torch.randn(s, dtype=dtype, device=device) for s in shapes]
            self._inputs[shape] = [*(x.requires_grad_() for x in tensors[:3]), tensors[3]]
        return self._inputs[shape]


# Messages go through the exchange, as those of a pass do, with its checks and waits; all ranks send at once.

SMALL_BYTES, LARGE_BYTES = 64 << 10, 8 << 20
ROUNDS = 7


@dataclass(frozen=True)
class Links:
    """Hold what moving costs; rates count what leaves a rank while every rank sends."""

    bytes_per_s: float  # to the next rank of a ring of all ranks, of the slowest rank
    fastest_bytes_per_s: float  # the same of the fastest rank
    latency_s: float  # of a small message, its bytes at that rate taken off
    all_to_all_bytes_per_s: float | None  # None where no more than one rank can split the heads


def measure_links(ring: RingMesh, ulysses: RingMesh | None, clock: Clock) -> Links:
    """Measure meshes whose ring, or whose Ulysses group, has more than one rank. Collective."""
    small = _neighbour_seconds(ring, SMALL_BYTES, clock)
    large = _neighbour_seconds(ring, LARGE_BYTES, clock)
    # The difference of two sizes: the fixed cost of a message drops out.
    rates = [(LARGE_BYTES - SMALL_BYTES) / max(t - s, 1e-9) for s, t in zip(small, large, strict=True)]
    latency = max(small[0] - SMALL_BYTES / rates[0], 1e-7)
    swapped = None if ulysses is None else _all_to_all_rate(ulysses, clock)
    return Links(rates[0], max(rates), latency, swapped)


def _neighbour_seconds(mesh: RingMesh, size_bytes: int, clock: Clock) -> tuple[float, float]:
    """Return seconds of the slowest and of the fastest rank, each the least of some rounds."""
    exchange = Exchange(mesh)
    sent, received = (torch.zeros(size_bytes, dtype=torch.uint8, device=clock.device) for _ in range(2))
    ahead, behind = ((mesh.ring_rank + step) % mesh.ring_size for step in (1, -1))

    def swap() -> None:
        exchange.post([Message(sent, ahead)], [Message(received, behind)]).wait()

    swap()
    seconds = []
    for _ in range(ROUNDS):
        clock.meet()
        seconds.append(clock.own(swap))
    fastest = min(seconds)
    return clock.slowest(fastest), -clock.slowest(-fastest)


def _all_to_all_rate(mesh: RingMesh, clock: Clock) -> float:
    exchange, size = Exchange(mesh), mesh.ulysses_size
    parts = [torch.zeros(LARGE_BYTES // size, dtype=torch.uint8, device=clock.device) for _ in range(size)]
    exchange.all_to_all(parts, mesh.ulysses_group)
    seconds = clock.together(lambda: exchange.all_to_all(parts, mesh.ulysses_group), ROUNDS)
    return (size - 1) * (LARGE_BYTES // size) / seconds


# The kernel by itself: its rate forward and backward, and the fixed cost of a tile. All ranks measure at
# once, as they will compute at once, so the figures include what they share (cores, memory). The speed of one
# rank alone is measured as well: ranks with little work leave these resources to the others.

# Sides of the triangles that are timed. On an H200 4,096 tokens take less than the host's launches do.
SMALL_TOKENS, LARGE_TOKENS = {"cpu": 512, "cuda": 4096}, {"cpu": 4096, "cuda": 32_768}
TURNS = 3
MATMUL_SIDE = {"cpu": 1024, "cuda": 8192}


@dataclass(frozen=True)
class KernelRate:
    """Hold what a kernel does on one rank while all of them work."""

    # forward_flops, backward_flops: per second, of the pairs that it multiplies, hidden ones included
    forward_flops: float
    backward_flops: float
    # forward_tile_s, backward_tile_s: seconds of a tile without its pairs
    forward_tile_s: float
    backward_tile_s: float


class KernelSample(NamedTuple):
    """Hold FLOPs and seconds of one size, forward and backward."""

    flops: tuple[float, float]
    seconds: tuple[float, float]


def get_tuned_kernel(choice: KernelChoice, request: TuningRequest) -> Kernel:
    """Return the kernel with these options."""
    return get_kernel(request.kernel, request.device, choice.options, choice.block_size)


class Probe:
    """Time kernels on tensors of one request.

    Args:
        request: shapes and device.
        clock: of all ranks.
    """

    def __init__(self, request: TuningRequest, clock: Clock) -> None:
        self.request, self.clock = request, clock
        self.heads = 1 if request.device == "cpu" else request.heads  # a GPU wants to be filled
        self.mesh = RingMesh.single()

    def rates(
        self, choices: Sequence[KernelChoice], large_tokens: int, progress: Callable[[], object]
    ) -> dict[KernelChoice, KernelRate]:
        """Measure a kernel with each of these options, in turns; the least of the turns counts.

        Args:
            choices: options.
            large_tokens: the larger of the two sizes.
            progress: called `TURNS` times for each choice.
        """
        samples: dict[tuple[KernelChoice, int], list[KernelSample]] = defaultdict(list)
        small_tokens = SMALL_TOKENS[self.request.device]
        # In turns, so that a busy moment of the machine hits every choice alike.
        for turn in range(TURNS):
            for choice in choices:
                if not turn:
                    self._sample(choice, small_tokens, 1)  # warms up
                for tokens, rounds in ((small_tokens, 3), (large_tokens, 1)):
                    samples[choice, tokens].append(self._sample(choice, tokens, rounds))
                progress()
        rates = {}
        for choice in choices:
            small, large = samples[choice, small_tokens], samples[choice, large_tokens]
            (forward, forward_s), (backward, backward_s) = (_fit(small, large, way) for way in (0, 1))
            rates[choice] = KernelRate(forward, backward, forward_s, backward_s)
        return rates

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
        options = Options.make(request.base.model_copy(update=keys))
        layout = make_layout("contiguous", tokens=tokens, ring_size=1)
        context = make_ring_context(Causal(), layout, self.mesh, options)
        shape, dtype = (1, self.heads, tokens, request.head_dim), getattr(torch, request.dtype)
        return context, [torch.randn(shape, dtype=dtype, device=self.clock.device) for _ in range(4)]

    def _sample(self, choice: KernelChoice, tokens: int, rounds: int) -> KernelSample:
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
        kernel, unit = get_tuned_kernel(choice, self.request), self.heads * self.request.head_dim
        forward = FORWARD_FLOPS * unit * kernel.count_executed_pairs(tiles)
        backward = BACKWARD_FLOPS * unit * kernel.count_executed_pairs(tiles, backward=True)
        return KernelSample((forward, backward), (forward_s, backward_s))


def _fit(small: list[KernelSample], large: list[KernelSample], way: int) -> tuple[float, float]:
    """Fit rate and fixed seconds to the least seconds of two sizes, forward (0) or backward (1).

    If the larger one takes less than twice the seconds, launches are most of both: its rate alone, which is
    a lower bound.
    """
    small_s, large_s = (min(sample.seconds[way] for sample in samples) for samples in (small, large))
    few, many = small[0].flops[way], large[0].flops[way]
    if large_s < 2 * small_s:
        return many / large_s, 0.0
    rate = (many - few) / (large_s - small_s)
    return rate, max(small_s - few / rate, 0.0)
