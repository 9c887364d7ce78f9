"""Report each optimizer step to DeepSpeed's monitor (CSV, TensorBoard, W&B, Comet), with `"monitor": true`.

Without it there is no collective.

| event | of an optimizer step |
|---|---|
| `Ring/forward_hop_seconds`, `Ring/backward_hop_seconds` | mean time of a hop (send, compute, wait) |
| `Ring/wait_share` | share of the hops' time that was spent waiting for messages |
| `Ring/exposed_seconds` | the same in seconds: communication that computing did not hide |
| `Ring/sent_bytes` | payload that left a rank |
| `Ring/buffers_bytes` | most memory of messages at once |
| `Ring/memory_bytes` | most memory of the process so far (CPU: resident; CUDA: allocated) |
| `Ring/step_seconds` | from the end of the step or evaluation before to its end; not of the first step |
| `Ring/tokens_per_second` | tokens of all ranks' training batches, padding included, over that time |

Each is the largest of all ranks, but tokens are added up: a ring is as fast as its slowest one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ds_ring.comm.exchange import Exchange
from ds_ring.comm.messages import Observers
from ds_ring.config.section import RingConfig
from ds_ring.data.engine import ENGINE
from ds_ring.data.engine_part import EnginePart, EngineStart
from ds_ring.data.loss import world_sum
from ds_ring.data.session import RingSession
from ds_ring.errors import RingConfigError
from ds_ring.measure.trace import Span, Trace
from ds_ring.patches import patch

EVENTS = (
    "forward_hop_seconds",
    "backward_hop_seconds",
    "wait_share",
    "exposed_seconds",
    "sent_bytes",
    "buffers_bytes",
    "memory_bytes",
    "step_seconds",
    "tokens_per_second",
)
_WRITERS = ("tensorboard", "csv_monitor", "wandb", "comet")
_patch = partial(
    patch, ENGINE, feature="monitor", when="monitor",
    reason="writes Ring/* events after an optimizer step; counts training passes only",
)  # fmt: skip


def gather_numbers(mine: Sequence[float], session: RingSession) -> torch.Tensor:
    """Return the numbers of every rank of the world, float64 [ranks, n]. Collective."""
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    table = torch.zeros(size, len(mine), dtype=torch.float64, device=session.device)
    table[rank] = torch.tensor(mine, dtype=torch.float64, device="cpu")
    world_sum(table, session.run_mesh, Exchange(session.run_mesh, session.run_mesh.timeouts.hop))
    return table


class Monitor(EnginePart):
    """Report each optimizer step, with `"monitor": true`."""

    def check(self, config: RingConfig, deepspeed_config: dict[str, Any]) -> None:
        """Refuse `"monitor": true` where DeepSpeed has no monitor that could show anything."""
        enabled = any((deepspeed_config.get(writer) or {}).get("enabled") for writer in _WRITERS)
        if config.monitor and not enabled:
            raise RingConfigError.wrong(
                "ring_attention.monitor", f"one of {', '.join(_WRITERS)}", "none", "enable one"
            )

    def patches(self, start: EngineStart) -> list[Any]:
        """Return what traces and reports the steps of an engine."""
        return [StepMetrics(start.engine, start.session)] if start.session.config.monitor else []


class StepMetrics:
    """Trace the ring passes of an engine, and report them after each of its optimizer steps."""

    def __init__(self, engine: Any, session: RingSession) -> None:
        self._engine, self._session, self._trace = engine, session, Trace()
        self._spans = 0  # before the forward pass that is under way
        self._tokens = 0.0  # of the step's training batches, this rank's part
        self._started_s: float | None = None  # of the monotonic clock; None in the first step
        session.run_mesh.owners[Observers].append(self._trace)

    @_patch(stage="before_forward")
    def before_forward(self, _: Any, args: Any, kwargs: Any) -> None:
        self._spans = len(self._trace.spans)

    @_patch(stage="after_forward")
    def after_forward(self, _: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Count the tokens of a training pass; forget spans and time of another one."""
        if self._engine.module.training:
            self._tokens += count_tokens((*args, *kwargs.values()), self._session)
        else:
            del self._trace.spans[self._spans :]
            self._started_s = time.monotonic()

    @_patch("step", stage="around_step")
    def around_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        engine, steps = self._engine, self._engine.global_steps
        result = step(*args, **kwargs)
        if engine.global_steps > steps:
            get_accelerator().synchronize()
            now_s = time.monotonic()
            seconds = 0.0 if self._started_s is None else now_s - self._started_s
            all_ranks = gather_numbers([*figures(self._trace.spans), seconds, self._tokens], self._session)
            values = all_ranks.max(0).values.tolist()
            values[-1] = float(all_ranks[:, -1].sum()) / max(values[-2], 1e-9)
            self._trace.spans.clear()
            # Without the time of its first batch the first step would be the fastest.
            events = list(zip(EVENTS, values, strict=True))[: -2 if self._started_s is None else None]
            self._started_s, self._tokens = time.monotonic(), 0.0
            engine.monitor.write_events([(f"Ring/{name}", x, engine.global_samples) for name, x in events])
        return result


def count_tokens(arguments: tuple[Any, ...], session: RingSession) -> float:
    """Return how many tokens of the batch in the model are this rank's; the parts of its ranks add up."""
    sharding = session.batches.current
    tensors = [x for x in arguments if isinstance(x, torch.Tensor) and x.ndim >= 2]
    samples = max((len(x) for x in tensors if x.shape[1] == sharding.local_tokens), default=0)
    return samples * sharding.layout.tokens / sharding.mesh.sequence_size


def figures(spans: Sequence[Span]) -> list[float]:
    """Return this rank's values of the first EVENTS over the spans of a step; 0 where there were none."""
    hop_s = []
    for phase in ("forward", "backward"):
        of_phase = [span for span in spans if span.phase == phase]
        hop_s.append(_seconds(of_phase) / max(sum(span.what == "compute" for span in of_phase), 1))
    waited = _seconds(span for span in spans if span.what == "wait")
    return [
        *hop_s,
        waited / max(_seconds(spans), 1e-12),
        waited,
        float(sum(span.batch.bytes_sent for span in spans if span.what == "send")),
        float(max((span.buffers_bytes for span in spans), default=0)),
        float(get_accelerator().max_memory_allocated()),
    ]


def _seconds(spans: Any) -> float:
    return float(sum(span.end_ns - span.start_ns for span in spans)) / 1e9
