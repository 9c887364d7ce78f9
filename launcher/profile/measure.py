"""Measure memory and times of one real rank, or of all virtual ranks of a ring.

Owns which passes are run for what: memory is counted under the profiler in a pass of its own, times are taken
in another one without it. Starts no process: who starts ranks calls `measure_rank` on each of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch.distributed as dist

from ds_ring.comm.mesh import RingMesh
from ds_ring.errors import RingConfigError
from ds_ring.kernels.select import get_kernel
from ds_ring.masks.pattern import Pattern
from ds_ring.measure.memory import measure_cpu_memory
from ds_ring.measure.trace import Trace, tracing
from ds_ring.ops.context import RingContext, context_for
from ds_ring.ops.options import Options
from ds_ring.ops.ring_op import ring_attention_op
from ds_ring.schedule.layout import Layout, Mix, make_layout
from ds_ring.schedule.plan import check_length
from ds_ring.simulation.generate import GeneratedSource
from ds_ring.simulation.rank import GlobalSizes, RankMemory, TensorBytes, make_profile, read_shard
from ds_ring.simulation.simulate import SimulationOptions, simulate

MIB = 2**20


@dataclass(frozen=True)
class ProfileJob:
    """Describe one attention over generated numbers, for rings of any size."""

    sizes: GlobalSizes  # of the global tensors
    pattern: Pattern  # which position attends to which
    layout_name: str = "auto"  # "contiguous", "zigzag", ..., or "auto"
    # kernel, least size of messages, whether to prune, deadline of a hop
    options: Options = field(default_factory=Options)
    backward: bool = True  # the backward pass as well
    seed: int = 0  # of the numbers
    threads: int = 1  # of a rank's kernel
    # layers of this pattern and of others, which share the layout; none: all layers have this one
    mix: Mix = ()

    @property
    def source(self) -> GeneratedSource:
        """Return the numbers; the same in every process."""
        sizes = self.sizes
        shape = (sizes.tokens, sizes.query_heads, sizes.kv_heads, sizes.head_dim, sizes.batch)
        return GeneratedSource(*shape, sizes.dtype, self.seed)

    def layout(self, ring_size: int) -> Layout:
        """Return the layout of a ring.

        Raises:
            RingConfigError: fewer tokens than ranks.
            RingLayoutError, RingPatternError: no such layout, or none for this pattern.
        """
        if 0 < self.sizes.tokens < ring_size:
            raise RingConfigError(
                f"expected at least one token a rank, got {self.sizes.tokens} for {ring_size} ranks"
            )
        mix = dict(self.mix) or self.pattern
        layout = make_layout(self.layout_name, tokens=self.sizes.tokens, ring_size=ring_size, pattern=mix)
        check_length(self.pattern, layout)
        return layout

    def check(self, ring_sizes: list[int]) -> None:
        """Raise what any of these rings would raise, before anything is run.

        Raises:
            RingError: a size that does not fit.
        """
        _ = self.source
        get_kernel(self.options.kernel, "cpu", self.options.kernel_pairs, self.options.block_size)
        if not isinstance(self.threads, int) or self.threads < 1:
            raise RingConfigError(f"threads: expected at least 1, got {self.threads}")
        for ring_size in ring_sizes:
            self.layout(ring_size)

    @property
    def title(self) -> str:
        """Return one line for tables and pictures."""
        sizes = self.sizes
        heads = f"{sizes.query_heads} heads"
        if sizes.kv_heads != sizes.query_heads:
            heads += f" on {sizes.kv_heads} K/V heads"
        dtype = str(sizes.dtype).removeprefix("torch.")
        passes = "forward + backward" if self.backward else "forward"
        what = f"{sizes.tokens} tokens, {heads}, head_dim {sizes.head_dim}, {dtype}, {self.pattern}, {passes}"
        layers = dict(self.mix).get(self.pattern)
        return what if layers is None else f"{what}, {layers} of {sum(n for _, n in self.mix)} layers"


REAL, SIMULATED = "real", "simulated"
HEARTBEAT_S = 60.0  # of silence after which a rank counts as lost: many ranks may share few cores


class RankRun(NamedTuple):
    """Hold what one rank found; `trace` is None where no times were wanted. Pickles."""

    memory: RankMemory
    trace: Trace | None


@dataclass(frozen=True)
class RingRun:
    """Hold what all ranks of one ring found."""

    kind: str  # "real" or "simulated"
    layout_name: str  # of the layout that was taken
    ranks: tuple[RankRun, ...]  # by ring rank

    @property
    def ring_size(self) -> int:
        return len(self.ranks)

    @property
    def busiest(self) -> int:
        """Return the ring rank that needs most memory; the first of them."""
        return max(range(self.ring_size), key=lambda rank: self.ranks[rank].memory.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """Return the peak of that rank."""
        return self.ranks[self.busiest].memory.peak_bytes

    @property
    def traces(self) -> dict[int, Trace]:
        """Return traces by ring rank; empty where no times were taken."""
        return {rank: run.trace for rank, run in enumerate(self.ranks) if run.trace is not None}


def measure_virtual(job: ProfileJob, ring_size: int, times: bool, progress: bool = True) -> RingRun:
    """Measure all ranks of a ring in this process, one after the other.

    Args:
        job: what to run.
        ring_size: P.
        times: take times as well, in a second run.
        progress: a bar on stderr once two seconds have passed.

    Raises:
        RingError: as `ds_ring.simulate`.
    """
    layout, options = job.layout(ring_size), job.options
    made = SimulationOptions(
        dict(options.kernel_options), options.chunk_bytes, options.prune, stage_bytes=options.stage_bytes,
        threads=job.threads, progress=progress,
    )  # fmt: skip

    def run(memory: bool, trace: bool) -> tuple[dict[int, RankMemory], dict[int, Trace]]:
        result = simulate(
            job.source, pattern=job.pattern, layout=layout, grad_out=job.backward or None,
            scale=options.scale, kernel=options.kernel, measure_memory=memory, trace=trace, options=made,
        )  # fmt: skip
        return result.memory, result.traces

    # Two runs: the memory profiler slows small calls, so no time is taken under it.
    memory, _ = run(memory=True, trace=False)
    traces = run(memory=False, trace=True)[1] if times else {}
    ranks = tuple(RankRun(memory[rank], traces.get(rank)) for rank in range(ring_size))
    return RingRun(SIMULATED, layout.name, ranks)


def measure_ring(job: ProfileJob, times: bool) -> RankRun:
    """Call `measure_rank` in a ring of all ranks of the process group. Collective.

    Raises:
        RingError: as `ds_ring.ring_attention`.
    """
    mesh = RingMesh.from_world(dist.get_world_size(), heartbeat_timeout_s=HEARTBEAT_S)
    try:
        return measure_rank(mesh, job, times)
    finally:
        mesh.close()


def measure_rank(mesh: RingMesh, job: ProfileJob, times: bool) -> RankRun:
    """Measure this rank's part of a real ring. Collective over the mesh.

    Raises:
        RingError: as `ds_ring.ring_attention`.
    """
    layout = job.layout(mesh.ring_size)
    context = context_for(job.pattern, layout, mesh, job.options)
    with tracing(mesh) as trace, measure_cpu_memory() as peak:
        sizes = _one_pass(mesh, job, layout, context)
    memory = make_profile(peak, trace, sizes)
    if not times:
        return RankRun(memory, None)
    with tracing(mesh) as trace:  # the first pass has warmed everything up
        _one_pass(mesh, job, layout, context)
    return RankRun(memory, trace)


def _one_pass(mesh: RingMesh, job: ProfileJob, layout: Layout, context: RingContext) -> TensorBytes:
    """Run a pass over generated shards, in the order in which virtual ranks do it."""
    q, k, v = (
        read_shard(job.source, layout, name, mesh.ring_rank).requires_grad_(job.backward)
        for name in ("q", "k", "v")
    )
    out, lse = ring_attention_op(q, k, v, context.handle)
    if job.backward:
        out.backward(read_shard(job.source, layout, "grad_out", mesh.ring_rank))
    return TensorBytes(q.nbytes, k.nbytes + v.nbytes, out.nbytes, lse.nbytes)
