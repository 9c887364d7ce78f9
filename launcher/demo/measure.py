"""Measure real rings on this machine for the demo: peak memory of a rank by ring size, and one timeline."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from ds_ring.masks.catalog import Causal
from ds_ring.runtime.context import Options
from ds_ring.schedule.plan import Plan, build_plan
from ds_ring.simulation.rank import GlobalSizes

from ..profile.measure import ProfileJob, measure_ring
from ..profile.timeline import Timeline, timeline_of
from ..run.local_ranks import run_ranks

RING_SIZES = (1, 2, 4, 8)
TRANSPORTS = ("ring", "all_gather")
TOKENS, HEADS, HEAD_DIM = 4096, 8, 64
DRAWN_RING = 4  # the ring of the timeline, the plan and the schedule
DEADLINE_S = 300.0


@dataclass(frozen=True)
class DemoRings:
    """Hold what was measured.

    Attributes:
        job: one causal attention, forward and backward.
        peaks_bytes: peak tensor memory of the rank that needs most, by transport and ring size.
        timeline: of the ring of `DRAWN_RING` ranks.
        plan: of the same ring.
    """

    job: ProfileJob
    peaks_bytes: dict[str, dict[int, int]]
    timeline: Timeline
    plan: Plan


def measure(tokens: int = TOKENS, ring_sizes: tuple[int, ...] = RING_SIZES) -> DemoRings:
    """Run every ring on gloo ranks of this machine, one ring after the other.

    Raises:
        RanksError: a rank failed.
    """
    sizes = GlobalSizes(1, HEADS, HEADS, tokens, HEAD_DIM, torch.float32)
    job = ProfileJob(sizes, Causal())
    peaks: dict[str, dict[int, int]] = {}
    traces = {}
    for transport in TRANSPORTS:
        this = replace(job, options=Options(transport=transport))
        for size in ring_sizes:
            times = transport == "ring" and size == DRAWN_RING
            ranks = run_ranks(
                measure_ring, size, (this, times), threads=1, deadline_s=DEADLINE_S, imported=True
            )
            peaks.setdefault(transport, {})[size] = max(rank.memory.peak_bytes for rank in ranks)
            if times:
                traces = {number: rank.trace for number, rank in enumerate(ranks)}
    cores = len(os.sched_getaffinity(0))
    timeline = timeline_of(traces, where=f"one machine with {cores} cores")
    plan = build_plan(job.pattern, job.layout(DRAWN_RING), query_heads=HEADS, kv_heads=HEADS)
    return DemoRings(job, peaks, timeline, plan)
