"""Measure real rings on this machine for the demo: peak memory of a rank by ring size, and one timeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from ds_ring.comm.mesh import RingMesh
from ds_ring.masks.catalog import Causal
from ds_ring.ops.options import Options
from ds_ring.schedule.plan import Plan, build_plan
from ds_ring.simulation.rank import GlobalSizes

from ..profile.measure import HEARTBEAT_S, ProfileJob, RankRun, measure_rank
from ..profile.timeline import Timeline, this_machine, timeline_of
from ..run.local_ranks import run_ranks

RING_SIZES = (1, 2, 4, 8)
TRANSPORTS = ("ring", "all_gather")
TOKENS, HEADS, HEAD_DIM = 4096, 8, 64
DRAWN_RING = 4  # the ring of the timeline, the plan and the schedule
DEADLINE_S = 300.0


@dataclass(frozen=True)
class DemoRings:
    """Hold measurements of one causal attention, forward and backward."""

    job: ProfileJob
    peaks_bytes: dict[
        str, dict[int, int]
    ]  # of the rank with the most tensor memory, by transport and ring size
    timeline: Timeline  # of the ring of `DRAWN_RING` ranks
    plan: Plan  # of the same ring


def measure(tokens: int = TOKENS, ring_sizes: tuple[int, ...] = RING_SIZES) -> DemoRings:
    """Run every ring on gloo ranks of this machine, one after the other; sizes divide the largest."""
    sizes = GlobalSizes(1, HEADS, HEADS, tokens, HEAD_DIM, torch.float32)
    job = ProfileJob(sizes, Causal())
    jobs = {transport: replace(job, options=Options(transport=transport)) for transport in TRANSPORTS}
    ranks: list[Mapping[tuple[str, int], RankRun]] = run_ranks(
        _measure_rings, max(ring_sizes), (jobs, ring_sizes), threads=1, deadline_s=DEADLINE_S, imported=True
    )
    peaks = {
        transport: {
            size: max(rank[transport, size].memory.peak_bytes for rank in ranks[:size]) for size in ring_sizes
        }
        for transport in TRANSPORTS
    }
    drawn = (rank["ring", DRAWN_RING].trace for rank in ranks[:DRAWN_RING])
    traces = {number: trace for number, trace in enumerate(drawn) if trace is not None}
    timeline = timeline_of(traces, where=this_machine(DRAWN_RING, 1))
    plan = build_plan(job.pattern, job.layout(DRAWN_RING), query_heads=HEADS, kv_heads=HEADS)
    return DemoRings(job, peaks, timeline, plan)


def _measure_rings(
    jobs: Mapping[str, ProfileJob], ring_sizes: tuple[int, ...]
) -> dict[tuple[str, int], RankRun]:
    """Return this rank's measurements by transport and ring size. Collective: all other ranks wait."""
    found = {}
    for size in ring_sizes:
        mesh = RingMesh.from_world(size, heartbeat_timeout_s=HEARTBEAT_S)
        try:
            for transport, job in jobs.items() if mesh.data_rank == 0 else ():
                times = (transport, size) == ("ring", DRAWN_RING)
                found[transport, size] = measure_rank(mesh, job, times)
        finally:
            mesh.close()
    return found
