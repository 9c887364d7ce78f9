"""Compute the bars, steps and lines that pictures of memory show.

Owns names and order of the parts. Draws nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ds_ring.simulation.rank import COMPONENTS, RankMemory

from .measure import RingRun

# By component, for legends; in the order in which they are stacked.
LABELS = {
    "q": "q shard",
    "kv": "K/V shard",
    "in_flight": "K/V, dK/dV in flight",
    "accumulators": "accumulators",
    "out": "out",
    "lse": "lse",
    "grad_out": "grad_out",
    "gradients": "dq, dk, dv",
    "workspace": "workspace",
    "between": "between steps",  # a peak outside of all steps
}


@dataclass(frozen=True)
class Bar:
    """Hold the peak of the rank that needs most, bytes."""

    kind: str  # "real" or "simulated"
    ring_size: int  # P
    ring_rank: int  # which
    parts: dict[str, int]  # by component, at the peak
    total_bytes: int  # their sum


class Line(NamedTuple):
    """Describe memory that falls as 1/P from the smallest ring on."""

    ring_size: int
    total_bytes: int

    def at(self, ring_size: float) -> float:
        """Return bytes per rank of a ring of this size."""
        return self.total_bytes * self.ring_size / ring_size


def bars_of(runs: Sequence[RingRun]) -> list[Bar]:
    """Return one bar for each run."""
    bars = []
    for run in runs:
        memory = run.ranks[run.busiest].memory
        bars.append(Bar(run.kind, run.ring_size, run.busiest, parts_of(memory), memory.peak_bytes))
    return bars


def parts_of(memory: RankMemory) -> dict[str, int]:
    """Return bytes by component at a rank's peak; they sum to the peak."""
    return memory.components | {"between": memory.peak_bytes - memory.at_peak.total}


def one_over_p(bars: Sequence[Bar]) -> Line:
    """Return the line through the smallest ring's bar, the first one where there are two."""
    first = min(bars, key=lambda bar: bar.ring_size)
    return Line(first.ring_size, first.total_bytes)


def shown_parts(bars: Sequence[Bar]) -> list[str]:
    """Return the components that any bar has, in the order of the stack."""
    return [name for name in LABELS if any(bar.parts[name] for bar in bars)]


def steps_by_part(memory: RankMemory) -> dict[str, list[int]]:
    """Return bytes by component and step, without components that are never used."""
    parts = {name: [getattr(step, name) for step in memory.steps] for name in COMPONENTS}
    return {name: sizes for name, sizes in parts.items() if any(sizes)}
