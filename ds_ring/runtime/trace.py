"""Measuring a pass: the peak of tensor memory, in real runs and in fake ones.

Owns the two ways of counting. Real: the running sum of the profiler's allocation events, which is exact and
includes kernel workspaces (a resident-set figure is neither); what another thread frees, gloo's say, it does
not see (`tools/check_plan.py` waits for that). Fake: torch's `MemTracker` over fake tensors, which allocates
nothing, so that rank 0 of 1024 with a million tokens can be measured on a laptop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.profiler import ProfilerActivity, profile


@dataclass
class MemoryPeak:
    """Filled when the measured block ends.

    Attributes:
        peak_bytes: highest total of live tensor bytes above what lived at the start of the block.
        end_bytes: total still alive at its end.
    """

    peak_bytes: int = 0
    end_bytes: int = 0


@contextmanager
def measure_cpu_memory() -> Iterator[MemoryPeak]:
    """Count CPU tensor memory that a block allocates; the figures are there once the block has ended."""
    result = MemoryPeak()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield result
    events = profiler.profiler.kineto_results.events()
    allocations = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    for _, change_bytes in sorted(allocations, key=lambda event: event[0]):
        result.end_bytes += change_bytes
        result.peak_bytes = max(result.peak_bytes, result.end_bytes)


def is_fake(x: Tensor) -> bool:
    """True for tensors that only pretend: a pass over them sends nothing and must compare nothing."""
    return isinstance(x, FakeTensor)


def fake_memory_peak(work: Callable[[], object]) -> int:
    """Peak bytes of the (fake) tensors that `work` makes; call under `FakeTensorMode`."""
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    with tracker:
        kept = work()
    peaks = tracker.get_tracker_snapshot("peak")
    del kept
    return max(int(snapshot["Total"]) for snapshot in peaks.values())


def shard_unit_bytes(batch: int, heads: int, local_tokens: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one local tensor [batch, heads, local_tokens, head_dim]: the unit of the memory tables."""
    return batch * heads * local_tokens * head_dim * dtype.itemsize
