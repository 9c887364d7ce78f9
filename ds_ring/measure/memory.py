"""Measure the peak of tensor memory, in real runs and in fake ones.

Real: the running sum of the profiler's allocation events, which is exact and includes kernel workspaces (a
resident-set figure is neither). It does not see what another thread frees, gloo's for example
(`tools/check_plan.py` waits for that). Fake: torch's `MemTracker` over fake tensors, which allocates nothing,
so that rank 0 of 1024 with a million tokens can be measured on a laptop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from ds_ring.measure.trace import MARK


class Level(NamedTuple):
    """Hold tensor memory from `time_ns` of the profiler's clock on, above what lived when measuring began."""

    time_ns: int
    live_bytes: int


@dataclass
class MemoryPeak:
    """Hold what was measured; filled when the measured block ends.

    Attributes:
        peak_bytes, end_bytes: highest and last total of live bytes above what lived at its start.
        levels: after every allocation and release, by time.
        spans: start and end of the spans of a trace, by their number in it, ns of the same clock.
    """

    peak_bytes: int = 0
    end_bytes: int = 0
    levels: list[Level] = field(default_factory=list, repr=False)
    spans: dict[int, tuple[int, int]] = field(default_factory=dict, repr=False)


@contextmanager
def measure_cpu_memory() -> Iterator[MemoryPeak]:
    """Count CPU tensor memory that a block allocates; the figures are there once the block has ended."""
    result = MemoryPeak()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield result
    allocations = []
    for event in profiler.profiler.kineto_results.events():
        name = event.name()
        if name == "[memory]":
            allocations.append((event.start_ns(), event.nbytes()))
        elif name.startswith(MARK):
            result.spans[int(name[len(MARK) :])] = event.start_ns(), event.end_ns()
    for time_ns, change_bytes in sorted(allocations, key=lambda event: event[0]):
        result.end_bytes += change_bytes
        result.levels.append(Level(time_ns, result.end_bytes))
        result.peak_bytes = max(result.peak_bytes, result.end_bytes)


def fake_memory_peak(work: Callable[[], object]) -> int:
    """Return peak bytes of the (fake) tensors that `work` makes; call under `FakeTensorMode`."""
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    with tracker:
        outputs = work()
    peaks = tracker.get_tracker_snapshot("peak")
    del outputs
    return max(int(snapshot["Total"]) for snapshot in peaks.values())


def shard_unit_bytes(batch: int, heads: int, local_tokens: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of a local [batch, heads, local_tokens, head_dim]: the unit of the memory tables."""
    return batch * heads * local_tokens * head_dim * dtype.itemsize
