"""Prove on the ranks of a job that its ring is one: exact, O(T / P) in memory, point-to-point alone.

Owns the measurements of `ds-ring doctor` that need all ranks. What they mean is the reader's: a `RankAnswer`
reports the observations. Options, and with them the transport, are those of the job's DeepSpeed JSON.

The memory of a pass is compared with that of the same attention on one rank, by the token: on a ring of P it
should be 1 / P of it, and where keys are gathered it is about as much (Liu et al. 2023, section 3).

The engine of the cluster YAML starts this file as it starts the user's own script. Rank 0 prints one line.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from ds_ring.comm.exchange import Exchange
from ds_ring.comm.groups import gather_objects
from ds_ring.comm.mesh import RingMesh
from ds_ring.comm.messages import Message
from ds_ring.config.section import RingConfig
from ds_ring.data.run_folder import mark_ring
from ds_ring.engines.deepspeed.initialize import init_distributed
from ds_ring.health.joining import presence
from ds_ring.masks.catalog import Causal, SlidingWindow
from ds_ring.masks.pattern import Pattern
from ds_ring.measure.memory import measure_cpu_memory
from ds_ring.measure.trace import tracing
from ds_ring.ops.context import RingContext, make_ring_context
from ds_ring.ops.options import Options
from ds_ring.ops.passes import Operands
from ds_ring.ops.prepare import make_planner
from ds_ring.ops.ring_op import ring_attention_op
from ds_ring.schedule.layout import Layout, expand_runs, make_layout
from ds_ring.schedule.lowering import lower_rank
from ds_ring.schedule.steps import Recv, Send
from ds_ring.simulation.generate import GeneratedSource
from ds_ring.simulation.rank import GlobalSizes, RankMemory, TensorBytes, make_profile, read_shard
from ds_ring_launcher.doctor.findings import MARK

EXACT_TOKENS, EXACT_HEADS, EXACT_KV_HEADS, EXACT_WIDTH = 64, 4, 2, 16  # of the comparison; tokens a rank
MEMORY_TOKENS, MEMORY_TOKENS_A_RANK, MEMORY_HEADS, MEMORY_WIDTH = 16384, 256, 8, 32
NARROW = SlidingWindow(64)
SMALL_BYTES, LARGE_BYTES = 1 << 10, 4 << 20  # of messages; the large one shrinks where a link is slow
SLOW_S = 0.05  # a large message that would take longer is made smaller
ROUNDS = 8


class Link(NamedTuple):
    """Hold one direction of a link between ring neighbours, measured while no other one was in use.

    Attributes:
        source, target: world ranks.
        bytes_per_s, latency_s: the rate of a large message; half of a small one's way there and back.
    """

    source: int
    target: int
    bytes_per_s: float
    latency_s: float


class RankAnswer(NamedTuple):
    """Hold what one rank saw. Plain data, so that it can be sent and written as JSON.

    Attributes:
        rank, ring_rank, ring_size: who this is.
        host, place: its name, and a value that is equal on ranks that share its network interfaces.
        dtype: of the comparison.
        error: the largest of out and the gradients, against float64, over the largest value.
        traffic: `Traffic` of a forward and a backward pass, by field.
        planned_sent, planned_received: `sent` and `received` of the schedule.
        shard: numbers in K and V of the own shard.
        memory_bytes, alone_bytes: of a pass, by the token of the whole sequence: on this ring, and on one
            rank (0 on others than rank 0, which measures it).
        link: to the next rank; None on a ring of one.
        clock_s, clock_error_s: how far this host's clock is ahead of rank 0's, and how sure that is.
    """

    rank: int
    ring_rank: int
    ring_size: int
    host: str
    place: str
    dtype: str
    error: float
    traffic: dict[str, Any]
    planned_sent: int
    planned_received: int
    shard: int
    memory_bytes: float
    alone_bytes: float
    link: Link | None
    clock_s: float
    clock_error_s: float


@dataclass(frozen=True)
class AttentionJob:
    """Describe one attention over generated numbers, for rings of any size."""

    sizes: GlobalSizes  # of the global tensors
    pattern: Pattern
    options: Options = field(default_factory=Options)

    @property
    def source(self) -> GeneratedSource:
        """Return the numbers; the same in every process."""
        sizes = self.sizes
        shape = (sizes.tokens, sizes.query_heads, sizes.kv_heads, sizes.head_dim, sizes.batch)
        return GeneratedSource(*shape, sizes.dtype, 0)

    def layout(self, ring_size: int) -> Layout:
        """Return the layout of a ring."""
        return make_layout("auto", tokens=self.sizes.tokens, ring_size=ring_size, pattern=self.pattern)


def measure_rank(mesh: RingMesh, job: AttentionJob) -> RankMemory:
    """Measure a forward and a backward pass on this rank. Collective over the mesh.

    Raises:
        RingError: as `ds_ring.ring_attention`.
    """
    layout = job.layout(mesh.ring_size)
    context = make_ring_context(job.pattern, layout, mesh, job.options)
    with tracing(mesh) as trace, measure_cpu_memory() as peak:
        q, k, v = (
            read_shard(job.source, layout, name, mesh.ring_rank).requires_grad_() for name in ("q", "k", "v")
        )
        out, lse = ring_attention_op(q, k, v, context.handle)
        out.backward(read_shard(job.source, layout, "grad_out", mesh.ring_rank))
        sizes = TensorBytes(q.nbytes, k.nbytes + v.nbytes, out.nbytes, lse.nbytes)
    return make_profile(peak, trace, sizes)


def self_test(mesh: RingMesh, options: Options) -> list[RankAnswer]:
    """Measure a mesh; return the answers of all ranks of the world, by rank. Collective over the world.

    Raises:
        RingError: as `ds_ring.ring_attention`.
    """
    error, traffic, planned, shard = _exactness(mesh, options)
    memory, alone = _memory(mesh, options)
    link = _link(mesh)
    clock = _clock()
    here = (dist.get_rank(), mesh.ring_rank, mesh.ring_size, socket.gethostname(), presence().host[-12:])
    dtype = str(_kind(mesh)[0]).removeprefix("torch.")
    rank_answer = RankAnswer(
        *here, dtype, error, traffic._asdict(), *planned, shard, memory, alone, link, *clock
    )
    return gather_objects(rank_answer)


class Traffic(NamedTuple):
    """The bytes that one rank moved, as torch.distributed's backends report them; [Note: counted bytes].

    Attributes:
        sends: messages of floating-point numbers to one rank.
        sent, received: numbers in such messages.
        largest: numbers in the largest of them.
        others: calls of anything but point-to-point that moves something, by name.
        integers: numbers of other types that left in messages to one rank: headers.
    """

    sends: int
    sent: int
    received: int
    largest: int
    others: dict[str, int]
    integers: int


# [Note: counted bytes]
# A count of calls of some function proves nothing: there are three ways to every message (torch.distributed,
# a method of the group, a method of its backend), and the way that the exchange takes has changed once. So
# the backends themselves count. Each of them reports to the profiler every operation that it starts, with
# shapes and type, from any function and thread: gloo by the event of its Work
# ("gloo:send"), NCCL by "record_param_comms", also for messages that are started as one. (For NCCL read from
# torch's source, not run so far.) And a count that sees nothing must not pass: it is compared with the plan.
@contextmanager
def record_traffic() -> Iterator[list[Traffic]]:
    """Record what this process moves inside the block; the list has it once the block has ended."""
    traffic: list[Traffic] = []
    config = _ExperimentalConfig(profile_all_threads=True)
    kinds = [ProfilerActivity.CPU]
    with profile(activities=kinds, record_shapes=True, experimental_config=config) as profiler:
        yield traffic
    traffic.append(_traffic(profiler.profiler.kineto_results.events()))


def _traffic(events: Iterable[Any]) -> Traffic:
    """Return what the events of a profile say."""
    sends = sent = received = largest = integers = 0
    others: Counter[str] = Counter()
    for event in events:
        backend, _, what = event.name().partition(":")
        if backend == "gloo":
            dtype, numbers = (
                "".join(event.dtypes()[:1]),
                sum(prod(shape) for shape in event.shapes() if shape),
            )
        elif backend == "record_param_comms":
            meta = event.extra_meta()
            what, dtype = meta.get("Collective name", ""), meta.get("dtype", "")
            numbers = max(int(meta.get(f"{side} msg nelems", 0)) for side in ("In", "Out"))
        else:
            continue
        if not numbers:  # a barrier, a wait
            continue
        if what not in ("send", "recv", "recvAnySource"):
            others[what] += 1
        elif dtype.lower().removeprefix("c10::") not in _FLOATS:
            integers += numbers if what == "send" else 0
        else:
            sends, sent = (sends + 1, sent + numbers) if what == "send" else (sends, sent)
            received += numbers if what != "send" else 0
            largest = max(largest, numbers)
    return Traffic(sends, sent, received, largest, dict(others), integers)


_FLOATS = ("float", "double", "half", "bfloat16")


def _exactness(mesh: RingMesh, options: Options) -> tuple[float, Traffic, tuple[int, int], int]:
    """Return the error of a causal pass against float64, traffic, planned traffic, and numbers of a shard."""
    sizes = GlobalSizes(
        1, EXACT_HEADS, EXACT_KV_HEADS, EXACT_TOKENS * mesh.ring_size, EXACT_WIDTH, torch.float32
    )
    job = AttentionJob(sizes, Causal(), options=options)
    layout = job.layout(mesh.ring_size)
    context = make_ring_context(job.pattern, layout, mesh, options)
    dtype, device = _kind(mesh)
    shards = {
        name: read_shard(job.source, layout, name, mesh.ring_rank).to(device, dtype)
        for name in ("q", "k", "v", "grad_out")
    }
    grad_out = shards.pop("grad_out")
    for x in shards.values():
        x.requires_grad_()
    with record_traffic() as traffic:
        out, _ = ring_attention_op(*shards.values(), context.handle)
        got = (out, *torch.autograd.grad(out, list(shards.values()), grad_out))
    whole = {
        name: read_shard(job.source, job.layout(1), name, 0).to(dtype) for name in ("q", "k", "v", "grad_out")
    }
    want = _dense_causal(**whole)
    positions = torch.from_numpy(expand_runs(layout.runs(mesh.ring_rank)))
    errors = [_error(g[:, :, : len(positions)], w[:, :, positions]) for g, w in zip(got, want, strict=True)]
    shard = shards["k"].numel() + shards["v"].numel()
    return max(errors), traffic[0], _planned(context, layout, *shards.values()), shard


def _planned(context: RingContext, layout: Layout, q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int]:
    """Return the numbers that the schedules of this rank send and receive, forward and backward together."""
    plan = make_planner(context, Operands(q, k, v))(context.pattern, layout)
    rank = plan.rank(context.mesh.ring_rank)
    counts = {Send: 0, Recv: 0}
    for backward in (False, True):
        for chunk in lower_rank(rank, backward=backward).chunks:
            # both tensors of a message, of all heads of the chunk
            width = 2 * k.shape[0] * len(range(k.shape[1])[chunk.kv_heads]) * k.shape[3]
            for step in (step for steps in chunk.steps.rounds for step in steps.posted):
                counts[type(step)] += step.count * width
    return counts[Send], counts[Recv]


def _kind(mesh: RingMesh) -> tuple[torch.dtype, torch.device]:
    """Return the dtype and device of the test: bfloat16 on a GPU, whose kernels take no float32."""
    backend = "" if mesh.ring_group is None else dist.get_backend(mesh.ring_group)
    if "nccl" in backend or (mesh.ring_group is None and torch.cuda.is_available()):
        return torch.bfloat16, torch.device("cuda", torch.cuda.current_device())
    return torch.float32, torch.device("cpu")


def _dense_causal(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out, dq, dk, dv of causal attention in float64."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT / q.shape[-1] ** 0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    out = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v.repeat_interleave(group, 1)
    grads = torch.autograd.grad(out, (q, k, v), grad_out.double())
    return (out.detach(), *grads)


def _error(got: Tensor, want: Tensor) -> float:
    error = (got.detach().cpu().double() - want).abs().max() / want.abs().max()
    return float("inf") if bool(error.isnan()) else float(error)


def _memory(mesh: RingMesh, options: Options) -> tuple[float, float]:
    """Return the peak of a pass by the token of the whole sequence, on this ring and on one rank, bytes.

    Keys travel as in causal attention, and few of them are attended, so that little time is spent.
    """
    if options.has_hops:
        options = options.replaced(prune=False, chunk_bytes=1)  # heads go round one by one
    if _kind(mesh)[1].type == "cuda":
        return _memory_on_cuda(mesh, options)
    tokens = max(MEMORY_TOKENS, MEMORY_TOKENS_A_RANK * mesh.ring_size)
    job = _memory_job(tokens, torch.float32, options)
    here = measure_rank(mesh, job).peak_bytes / tokens
    if dist.get_rank():  # once is enough, and takes P times the memory
        return here, 0.0
    job = _memory_job(MEMORY_TOKENS, torch.float32, options)
    return here, measure_rank(RingMesh.single(), job).peak_bytes / MEMORY_TOKENS


def _memory_job(tokens: int, dtype: torch.dtype, options: Options) -> AttentionJob:
    sizes = GlobalSizes(1, MEMORY_HEADS, MEMORY_HEADS, tokens, MEMORY_WIDTH, dtype)
    return AttentionJob(sizes, NARROW, options=options)


def _memory_on_cuda(mesh: RingMesh, options: Options) -> tuple[float, float]:
    """Return the same by the allocator's own count. (For CUDA, not run so far: no GPU was at hand.)"""
    peaks = []
    for mesh_used, tokens in ((mesh, MEMORY_TOKENS * mesh.ring_size), (RingMesh.single(), MEMORY_TOKENS)):
        job = _memory_job(tokens, torch.bfloat16, options)
        layout = job.layout(mesh_used.ring_size)
        context = make_ring_context(job.pattern, layout, mesh_used, options)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        q, k, v, grad_out = (
            read_shard(job.source, layout, name, mesh_used.ring_rank).cuda()
            for name in ("q", "k", "v", "grad_out")
        )
        out, _ = ring_attention_op(*(x.requires_grad_() for x in (q, k, v)), context.handle)
        out.backward(grad_out)
        torch.cuda.synchronize()
        peaks.append((torch.cuda.max_memory_allocated() - before) / tokens)
        del q, k, v, grad_out, out
    return peaks[0], peaks[1]


def _link(mesh: RingMesh) -> Link | None:
    """Return this rank's link to the next rank; links are measured one after the other."""
    if mesh.ring_size == 1:
        return None
    exchange, link = Exchange(mesh), None
    device = _kind(mesh)[1]
    for source in range(mesh.ring_size):
        target = (source + 1) % mesh.ring_size
        if mesh.ring_rank in (source, target):
            timed = _timed(exchange, mesh.ring_rank == source, target, source, device)
            if mesh.ring_rank == source:
                link = Link(mesh.global_rank_of(source), mesh.global_rank_of(target), *timed)
        dist.barrier(group=mesh.ring_group)  # the others wait until this link has been measured
    return link


def _timed(
    exchange: Exchange, sends: bool, target: int, source: int, device: torch.device
) -> tuple[float, float]:
    """Return bytes per second from source to target, and the latency, on the rank that sends."""

    def there_and_back(size: int) -> float:
        payload = torch.zeros(size, dtype=torch.uint8, device=device)
        answer = torch.zeros(8, dtype=torch.uint8, device=device)
        started = time.perf_counter()
        if sends:
            exchange.post([Message(payload, target)], []).wait()
            exchange.post([], [Message(answer, target)]).wait()
            float(answer[0])  # on a GPU the host has not waited so far
        else:
            exchange.post([], [Message(payload, source)]).wait()
            exchange.post([Message(answer, source)], []).wait()
        return time.perf_counter() - started

    there_and_back(SMALL_BYTES)
    small = min(there_and_back(SMALL_BYTES) for _ in range(ROUNDS))
    fast = there_and_back(LARGE_BYTES // 16) < SLOW_S / 16
    chosen = torch.tensor([LARGE_BYTES if fast else LARGE_BYTES // 16], device=device)
    # the sender's choice holds for both
    if sends:
        exchange.post([Message(chosen, target)], []).wait()
    else:
        exchange.post([], [Message(chosen, source)]).wait()
    size = int(chosen)
    large = min(there_and_back(size) for _ in range(ROUNDS))
    # without the small message's time, as far as that is no noise
    return size / max(large - small, large / 2), small / 2


def _clock() -> tuple[float, float]:
    """Return how far this rank's clock is ahead of rank 0's, and how sure that is, seconds.

    No rank leaves a gathering before all have come to it. So the time of rank 0's clock before it is not
    later than that of this rank's after it, and the other way round: two bounds, narrowed by some rounds.
    """
    rank, low, high = dist.get_rank(), -float("inf"), float("inf")
    own_before = zero_before = after = 0.0
    for turn in range(ROUNDS + 1):
        before = time.time()
        stamps = gather_objects((before, after))
        if turn:  # times after a round are sent in the next one
            low = max(low, own_before - stamps[0][1])
            high = min(high, after - zero_before)
        own_before, zero_before, after = before, stamps[0][0], time.time()
    return (0.0, 0.0) if rank == 0 else ((low + high) / 2, (high - low) / 2)


def main() -> int:
    """Measure, and print what was found on rank 0; a RingError is the last line of stderr."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--deepspeed", action="store_true")
    parser.add_argument("--deepspeed_config", type=Path, required=True)
    parser.add_argument("--local_rank", type=int, default=0)
    options = parser.parse_args()

    if init_distributed().type == "cpu":
        torch.set_num_threads(1)
    mark_ring()
    config = RingConfig.from_deepspeed(options.deepspeed_config)
    config.validate_world(dist.get_world_size())
    mesh = RingMesh.from_world(config.ring_size, config.ulysses_size)
    answers = self_test(mesh, Options.make(config))
    if dist.get_rank() == 0:
        meta = [
            {**rank_answer._asdict(), "link": rank_answer.link and rank_answer.link._asdict()}
            for rank_answer in answers
        ]
        print(MARK + json.dumps(meta), flush=True)
    mesh.close()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
