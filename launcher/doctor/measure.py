"""Measure the tensor memory of one real rank of a ring pass, on generated numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

from ds_ring.comm.mesh import RingMesh
from ds_ring.masks.pattern import Pattern
from ds_ring.measure.memory import measure_cpu_memory
from ds_ring.measure.trace import tracing
from ds_ring.ops.context import context_for
from ds_ring.ops.options import Options
from ds_ring.ops.ring_op import ring_attention_op
from ds_ring.schedule.layout import Layout, make_layout
from ds_ring.simulation.generate import GeneratedSource
from ds_ring.simulation.rank import GlobalSizes, RankMemory, TensorBytes, make_profile, read_shard


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
    context = context_for(job.pattern, layout, mesh, job.options)
    with tracing(mesh) as trace, measure_cpu_memory() as peak:
        q, k, v = (
            read_shard(job.source, layout, name, mesh.ring_rank).requires_grad_() for name in ("q", "k", "v")
        )
        out, lse = ring_attention_op(q, k, v, context.handle)
        out.backward(read_shard(job.source, layout, "grad_out", mesh.ring_rank))
        sizes = TensorBytes(q.nbytes, k.nbytes + v.nbytes, out.nbytes, lse.nbytes)
    return make_profile(peak, trace, sizes)
