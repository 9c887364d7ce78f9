"""Time the kernel, the links and passes of one attention layer on all ranks.

The device is idle before and after each timing, and the slowest rank counts. All ranks measure at once, as
they will compute at once, so the figures include what they share (cores, memory).
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
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
from ds_ring.config.section import RingConfig
from ds_ring.errors import RingMeshError, RingMismatchError
from ds_ring.kernels.select import get_kernel
from ds_ring.masks.catalog import Causal
from ds_ring.ops.context import make_ring_context
from ds_ring.ops.options import Options
from ds_ring.ops.ring_op import ring_attention_backward_op, ring_attention_op
from ds_ring.plugin import KERNELS
from ds_ring.schedule.layout import Layout, make_layout
from ds_ring.schedule.plan import build_plan

from ..plan.pass_time import BACKWARD_FLOPS, FORWARD_FLOPS
from .request import TuningRequest

HEARTBEAT_S = 60.0
TINY_TOKENS = 16  # of a rank, where only the number of hops counts
SMALL_BYTES, LARGE_BYTES = 64 << 10, 8 << 20  # of messages
ROUNDS = 7  # of messages
TURNS = 3  # of the kernel, and of passes
# Sides of the triangles that are timed. On an H200 4,096 tokens take less than the host's launches do.
SMALL_TOKENS, LARGE_TOKENS = {"cpu": 512, "cuda": 4096}, {"cpu": 4096, "cuda": 32_768}
MATMUL_SIDE = {"cpu": 1024, "cuda": 8192}


@dataclass(frozen=True)
class Links:
    """Hold what moving costs; rates count what leaves a rank while every rank sends."""

    bytes_per_s: float  # to the next rank of a ring of all ranks, of the slowest rank
    fastest_bytes_per_s: float  # the same of the fastest rank
    latency_s: float  # of a small message, its bytes at that rate taken off


@dataclass(frozen=True)
class KernelRate:
    """Hold what a kernel does on one rank while all of them work."""

    # forward_flops, backward_flops: per second, of the pairs that it multiplies, hidden ones included
    forward_flops: float
    backward_flops: float
    call_s: float  # of a forward call without its pairs


@dataclass(frozen=True)
class Measured:
    """Hold what the machine gives; the same on all ranks."""

    kernel: KernelRate
    matmul_flops: float  # per second, of one large product
    ranks_per_node: int  # ranks on rank 0's host
    links: Links | None = None  # None where a sequence has one rank; what is below is measured beside them
    hop_overhead_s: float = 0.0  # what a hop costs that neither computes nor carries much
    pass_s: float = 0.0  # of a layer's pass of the whole length, forward and backward


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

    def require_equal(self, text: str) -> None:
        """Raise RingMismatchError on every rank unless all ranks have the same text."""
        texts = gather_objects(text, self._group)
        differing = next((rank for rank, text_there in enumerate(texts) if text_there != texts[0]), None)
        if differing is not None:
            raise RingMismatchError(
                f"tune: expected one request, got {texts[0]} on rank 0 and {texts[differing]} on rank"
                f" {differing}"
            )

    def count_ranks_here(self) -> int:
        """Count the ranks on rank 0's host."""
        hosts = gather_objects(socket.gethostname(), self._group)
        return hosts.count(hosts[0])

    def slowest(self, value: float) -> float:
        """Return the largest of all ranks' values, the same bits on all."""
        together = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(together, op=dist.ReduceOp.MAX, group=self._group)
        return float(together)

    def time_here(self, work: Callable[[], object]) -> float:
        """Measure seconds on this rank, all ranks starting at once; the device is idle before and after."""
        self.idle()
        dist.barrier(group=self._group)
        started = time.perf_counter()
        work()
        self.idle()
        return time.perf_counter() - started

    def time_all(self, work: Callable[[], object], rounds: int = 1) -> float:
        """Return the slowest rank's seconds; the least of some rounds."""
        # The least and not the median: this is for what the machine can do, and a disturbance only adds.
        return min(self.slowest(self.time_here(work)) for _ in range(rounds))


def measure(request: TuningRequest) -> Measured:
    """Measure the machine for a request. Collective: all ranks have an equal one.

    Raises:
        RingMeshError: torch.distributed is not initialised, or its ranks are not those of the request.
        RingMismatchError: ranks with different requests.
        RingPeerError: another rank failed.
    """
    device = torch.device(request.device)
    if request.device == "cuda":  # the current one, which whoever started the rank has set
        device = torch.device("cuda", torch.cuda.current_device())
    clock = Clock(device)
    clock.require_equal(str(request))
    if dist.get_world_size() != request.world_size:
        raise RingMeshError(
            f"tune: expected {request.world_size} ranks (the request's), got {dist.get_world_size()}"
        )
    rates = measure_kernel(request, clock), measure_matmul_flops(request, clock), clock.count_ranks_here()
    size = request.sequence_size
    if size == 1:
        return Measured(*rates)
    with closing(RingMesh.from_world(size, heartbeat_timeout_s=HEARTBEAT_S)) as mesh:
        links = measure_links(mesh, clock)
        tiny = time_passes(request, mesh, clock, TINY_TOKENS * size, 5)
        passes = time_passes(request, mesh, clock, request.tokens, TURNS)
        return Measured(*rates, links, min(tiny) / (2 * size + 1), statistics.median(passes))


def plan_layout(request: TuningRequest, tokens: int) -> Layout:
    """Return the section's layout for `tokens`; RingLayoutError where the patterns have none."""
    return make_layout(
        request.base.layout,
        tokens=tokens,
        ring_size=request.sequence_size,
        pattern=dict(request.mix),
        block_size=request.base.block_size if KERNELS[request.kernel].takes_blocks else 1,
    )


def time_passes(
    request: TuningRequest, mesh: RingMesh, clock: Clock, tokens: int, rounds: int
) -> list[float]:
    """Return the seconds of a layer's passes on the slowest rank, after a warm-up; the mean of all layers."""
    layout = plan_layout(request, tokens)
    config = RingConfig.model_validate(request.base.model_dump() | {"ring_size": request.sequence_size})
    size = (request.batch, request.heads, layout.local_tokens, request.head_dim)
    kv_size = (size[0], request.kv_heads, *size[2:])
    dtype = getattr(torch, request.dtype)
    q, k, v, grad = (
        torch.randn(shape, dtype=dtype, device=clock.device, requires_grad=True)
        for shape in (size, kv_size, kv_size, size)
    )
    grad = grad.detach()
    layers = [
        (RingAttention(config, mesh=mesh, layout=layout, pattern=pattern), count)
        for pattern, count in request.mix
    ]

    def step(attention: RingAttention) -> None:
        torch.autograd.grad(attention(q, k, v), (q, k, v), grad)

    def time_layer() -> float:
        seconds = sum(count * clock.time_all(lambda: step(attention)) for attention, count in layers)  # noqa: B023
        return seconds / sum(count for _, count in layers)

    return [time_layer() for _ in range(rounds + 1)][1:]


def measure_links(mesh: RingMesh, clock: Clock) -> Links:
    """Measure messages to the next rank of a ring of more than one. Collective."""
    # Through the exchange, as those of a pass, with its checks and waits; all ranks send at once.
    small = _neighbour_seconds(mesh, SMALL_BYTES, clock)
    large = _neighbour_seconds(mesh, LARGE_BYTES, clock)
    # The difference of two sizes: the fixed cost of a message drops out.
    rates = [(LARGE_BYTES - SMALL_BYTES) / max(t - s, 1e-9) for s, t in zip(small, large, strict=True)]
    return Links(rates[0], max(rates), max(small[0] - SMALL_BYTES / rates[0], 1e-7))


def _neighbour_seconds(mesh: RingMesh, size_bytes: int, clock: Clock) -> tuple[float, float]:
    """Return seconds of the slowest and of the fastest rank, each the least of some rounds."""
    exchange = Exchange(mesh)
    sent, received = (torch.zeros(size_bytes, dtype=torch.uint8, device=clock.device) for _ in range(2))
    ahead, behind = ((mesh.ring_rank + step) % mesh.ring_size for step in (1, -1))

    def swap() -> None:
        exchange.post([Message(sent, ahead)], [Message(received, behind)]).wait()

    swap()
    fastest = min(clock.time_here(swap) for _ in range(ROUNDS))
    return clock.slowest(fastest), -clock.slowest(-fastest)


def measure_matmul_flops(request: TuningRequest, clock: Clock) -> float:
    """Measure FLOP/s of one large product in the request's dtype, while all ranks compute."""
    side = MATMUL_SIDE[request.device]
    a = torch.ones(side, side, dtype=getattr(torch, request.dtype), device=clock.device)
    clock.time_here(lambda: a @ a)
    return 2 * side**3 / clock.time_all(lambda: a @ a, TURNS)


class KernelSample(NamedTuple):
    """Hold FLOPs and seconds of one size, forward and backward."""

    flops: tuple[float, float]
    seconds: tuple[float, float]


def measure_kernel(request: TuningRequest, clock: Clock) -> KernelRate:
    """Measure the section's kernel by itself: its rate forward and backward, and the fixed cost of a call."""
    small_tokens, large_tokens = SMALL_TOKENS[request.device], LARGE_TOKENS[request.device]
    if request.device == "cpu":  # no larger than a shard, so that the probe costs no more than a pass
        shard = plan_layout(request, request.tokens).local_tokens
        large_tokens = min(max(shard, 2 * small_tokens), large_tokens)
    sample_kernel(request, clock, small_tokens, 1)  # warms up
    small, large = (
        [sample_kernel(request, clock, tokens, rounds) for _ in range(TURNS)]
        for tokens, rounds in ((small_tokens, 3), (large_tokens, 1))
    )
    (forward, call_s), (backward, _) = (fit_rate(small, large, way) for way in (0, 1))
    return KernelRate(forward, backward, call_s)


def sample_kernel(request: TuningRequest, clock: Clock, tokens: int, rounds: int) -> KernelSample:
    """Time a causal triangle of `tokens`."""
    heads = 1 if request.device == "cpu" else request.heads  # a GPU wants to be filled
    layout = make_layout("contiguous", tokens=tokens, ring_size=1)
    mesh = RingMesh.single()
    context = make_ring_context(Causal(), layout, mesh, Options.make(request.base))
    shape, dtype = (1, heads, tokens, request.head_dim), getattr(torch, request.dtype)
    q, k, v, grad = (torch.randn(shape, dtype=dtype, device=clock.device) for _ in range(4))
    results: list[tuple[Tensor, Tensor]] = []
    forward_s = clock.time_all(lambda: results.append(ring_attention_op(q, k, v, context.handle)), rounds)
    out, lse = results[0]
    backward_s = clock.time_all(
        lambda: ring_attention_backward_op(grad, q, k, v, out, lse, context.handle), rounds
    )
    tiles = build_plan(Causal(), layout).rank(0).classes[0].hops[0].tiles
    options = tuple(request.base.kernel_options.items())
    kernel = get_kernel(request.kernel, request.device, options, request.base.block_size)
    forward = FORWARD_FLOPS * heads * request.head_dim * kernel.count_executed_pairs(tiles)
    backward = BACKWARD_FLOPS * heads * request.head_dim * kernel.count_executed_pairs(tiles, backward=True)
    return KernelSample((forward, backward), (forward_s, backward_s))


def fit_rate(small: list[KernelSample], large: list[KernelSample], way: int) -> tuple[float, float]:
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
