"""Split the memory of a rank into its parts, step by step.

Owns the table and its arithmetic: known tensors by their sizes, messages and accumulators from the trace, and
what the profiler saw beyond them as workspace.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ds_ring.runtime.trace import MemoryPeak, Span, Trace

COMPONENTS = (
    "q", "kv", "in_flight", "accumulators", "out", "lse", "grad_out", "gradients", "workspace",
)  # fmt: skip


class Step(NamedTuple):
    """Hold tensor memory of one rank at the peak of one step of a pass, bytes.

    Attributes:
        phase: "forward" or "backward".
        step: number of the step in its phase.
        hop: whose attention is computed.
        q, kv: shards of q, and of k and v together.
        in_flight: memory of messages: what is here of other shards, on its way, or kept for the next.
        accumulators: float32 sums of low-precision results.
        out, lse: results of the forward pass.
        grad_out, gradients: of the backward pass; gradients are dq, dk and dv together.
        workspace: what the kernel, the merge and the packing need beside all this.
        total: the sum, as the profiler counted it.
    """

    phase: str
    step: int
    hop: int
    q: int
    kv: int
    in_flight: int
    accumulators: int
    out: int
    lse: int
    grad_out: int
    gradients: int
    workspace: int
    total: int


@dataclass(frozen=True)
class RankMemory:
    """Hold tensor memory of one virtual rank: its shards, both passes, and its results.

    Attributes:
        peak_bytes: the most at any time.
        steps: the profile.
    """

    peak_bytes: int
    steps: tuple[Step, ...]

    @property
    def at_peak(self) -> Step:
        """Return the step that needs most."""
        return max(self.steps, key=lambda step: step.total)

    @property
    def components(self) -> dict[str, int]:
        """Return bytes of each component in the step that needs most."""
        return {name: getattr(self.at_peak, name) for name in COMPONENTS}


class TensorBytes(NamedTuple):
    """Hold bytes of the tensors that live for a whole phase."""

    q: int
    kv: int
    out: int
    lse: int


def profile_of(peak: MemoryPeak, trace: Trace, sizes: TensorBytes) -> RankMemory:
    """Return the profile of a measured pass.

    Args:
        peak: measured around the shards, the pass and its results.
        trace: of that pass.
        sizes: of the rank's tensors; grad_out is as large as out, gradients are as large as q, k and v.
    """
    times = np.array([level.time_ns for level in peak.levels])
    live = np.array([level.live_bytes for level in peak.levels])
    steps = []
    for first, spans in _steps_of(trace.spans):
        start_ns, end_ns = peak.spans[first][0], peak.spans[first + len(spans) - 1][1]
        # The level before a step still holds at its start: it counts, too.
        low, high = np.searchsorted(times, [start_ns, end_ns], side="right")
        total = int(live[max(low - 1, 0) : high].max()) if high else 0
        steps.append(_step(spans, sizes, total))
    return RankMemory(peak.peak_bytes, tuple(steps))


def _steps_of(spans: list[Span]) -> list[tuple[int, list[Span]]]:
    """Return the spans of every step, with the number of the first of them."""
    steps: list[tuple[int, list[Span]]] = []
    for number, span in enumerate(spans):
        # Every step begins by posting its messages, if only none.
        if span.what == "send":
            steps.append((number, []))
        steps[-1][1].append(span)
    return steps


def _step(spans: list[Span], sizes: TensorBytes, total: int) -> Step:
    back = spans[0].phase == "backward"
    in_flight = max(span.buffers_bytes for span in spans)
    accumulators = max(span.accumulators_bytes for span in spans)
    grad_out, gradients = (sizes.out, sizes.q + sizes.kv) if back else (0, 0)
    # What the profiler saw beyond the known tensors is the workspace of kernel, merge and packing.
    known = sizes.q + sizes.kv + in_flight + accumulators + sizes.out + sizes.lse + grad_out + gradients
    return Step(
        spans[0].phase, spans[0].step, spans[0].hop - 1, sizes.q, sizes.kv, in_flight, accumulators,
        sizes.out, sizes.lse, grad_out, gradients, total - known, total,
    )  # fmt: skip
