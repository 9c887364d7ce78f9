"""Report what the ring did in a step to DeepSpeed's monitor (CSV, TensorBoard, W&B, Comet).

Owns the figures and their names; the spans they are made of are `runtime/trace.py`'s, the files DeepSpeed's.
Off, nothing of this exists: no trace, no collective. Forward passes of an evaluation do not count.

| event | of an optimizer step |
|---|---|
| `Ring/forward_hop_seconds`, `Ring/backward_hop_seconds` | mean time of a hop (send, compute, wait) |
| `Ring/wait_share` | share of the hops' time that was spent waiting for messages |
| `Ring/sent_bytes` | payload that left a rank |
| `Ring/buffers_bytes` | most memory of messages at once |
| `Ring/memory_bytes` | most memory of the process so far (CPU: resident; CUDA: allocated) |

Each is the largest of all ranks: a ring is as fast as its slowest one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ds_ring.errors import RingConfigError
from ds_ring.integrations.deepspeed.session import RingSession
from ds_ring.runtime.exchange import Exchange
from ds_ring.runtime.trace import Span, Trace

EVENTS = (
    "forward_hop_seconds",
    "backward_hop_seconds",
    "wait_share",
    "sent_bytes",
    "buffers_bytes",
    "memory_bytes",
)
_WRITERS = ("tensorboard", "csv_monitor", "wandb", "comet")


def check_monitor(wanted: bool, config: dict[str, Any]) -> None:
    """Refuse `"monitor": true` where DeepSpeed has no monitor that could show anything."""
    if wanted and not any((config.get(writer) or {}).get("enabled") for writer in _WRITERS):
        raise RingConfigError(
            f"ring_attention.monitor: expected one of {', '.join(_WRITERS)} to be enabled, got none:"
            ' there is nowhere to report to; add {"csv_monitor": {"enabled": true, "output_path": "runs",'
            ' "job_name": "ring"}} to the DeepSpeed JSON, or set monitor to false'
        )


def monitor_ring(engine: Any, session: RingSession) -> None:
    """Trace ring passes, and report them after every optimizer step of the engine."""
    trace = Trace(session.mesh.ring_rank)
    session.mesh.traces.append(trace)
    step: Callable[..., Any] = engine.step
    kept = [0]  # spans before the forward pass that is under way

    def note(*_: Any) -> None:
        kept[0] = len(trace.spans)

    def forget_evaluation(*_: Any) -> None:
        if not engine.module.training:
            del trace.spans[kept[0] :]

    engine.register_forward_pre_hook(note)
    engine.register_forward_hook(forget_evaluation)

    @functools.wraps(step)
    def step_and_report(*args: Any, **kwargs: Any) -> Any:
        before = engine.global_steps
        result = step(*args, **kwargs)
        if engine.global_steps > before:
            values = _largest(figures(trace.spans), session)
            trace.spans.clear()
            engine.monitor.write_events(
                [
                    (f"Ring/{name}", value, engine.global_samples)
                    for name, value in zip(EVENTS, values, strict=True)
                ]
            )
        return result

    engine.step = step_and_report


def figures(spans: Sequence[Span]) -> list[float]:
    """Return this rank's values of EVENTS over the spans of a step; 0 where nothing of the kind was done."""
    waited = _seconds(one for one in spans if one.what == "wait")
    return [
        *(_hop_seconds([one for one in spans if one.phase == phase]) for phase in ("forward", "backward")),
        waited / max(_seconds(spans), 1e-12),
        float(sum(one.batch.bytes_sent for one in spans if one.what == "send")),
        float(max((one.buffers_bytes for one in spans), default=0)),
        float(get_accelerator().max_memory_allocated()),
    ]


def _seconds(spans: Any) -> float:
    return float(sum(one.end_ns - one.start_ns for one in spans)) / 1e9


def _hop_seconds(spans: Sequence[Span]) -> float:
    return _seconds(spans) / max(sum(one.what == "compute" for one in spans), 1)


def _largest(values: list[float], session: RingSession) -> list[float]:
    """Return the largest of each over all ranks. Collective over the world."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values
    everyones = torch.zeros(dist.get_world_size(), len(values), dtype=torch.float64, device=session.device)
    everyones[dist.get_rank()] = torch.tensor(values, dtype=torch.float64)
    assert dist.group.WORLD is not None
    Exchange(session.mesh, session.config.hop_timeout_seconds).all_reduce(everyones, dist.group.WORLD)
    return [float(value) for value in everyones.max(0).values]
