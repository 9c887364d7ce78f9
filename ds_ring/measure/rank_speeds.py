"""Measure how fast the ranks of a ring attend, for `"rank_speeds": "measured"`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ds_ring.data.engine import ENGINE
from ds_ring.data.engine_part import EnginePart, EngineStart
from ds_ring.data.session import RingSession
from ds_ring.errors import RingConfigError
from ds_ring.measure.step_metrics import gather_numbers
from ds_ring.measure.trace import Trace
from ds_ring.patches import patch
from ds_ring.ring.observer import Observers

_patch = partial(
    patch, ENGINE, feature="rank_speeds", when='"rank_speeds": "measured"',
    reason="deals out work by the time that the hops of each rank take",
)  # fmt: skip


class RankSpeeds(EnginePart):
    """Deal out work by the measured speeds of ranks, with `"rank_speeds": "measured"`."""

    def patches(self, start: EngineStart) -> list[Any]:
        """Return what measures the ranks of an engine."""
        measured = start.session.config.rank_speeds == "measured"
        return [MeasuredSpeeds(start.engine, start.session)] if measured else []


class MeasuredSpeeds:
    """Measure how fast the ranks of a ring attend, and deal out later batches by it.

    For `"rank_speeds": "measured"`. After a step all ranks learn how many pairs each of them computed in how
    many seconds of its hops. The layout changes if some rank's speed, in sixteenths of the fastest one, is
    off by more than one of them.
    """

    def __init__(self, engine: Any, session: RingSession) -> None:
        if session.device.type != "cpu":  # a trace has the host's times; kernels run later
            raise RingConfigError.wrong(
                "rank_speeds", f"numbers on {session.device.type}", '"measured"', "give [1, 0.5]"
            )
        self._engine, self._session, self._trace = engine, session, Trace(session.mesh.ring_rank)
        self._pairs = 0.0  # that this rank's attention computes in the step's training batches
        session.mesh.owners[Observers].append(self._trace)

    @_patch(stage="after_forward")
    def after_forward(self, _: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Count the pairs of a training pass."""
        if self._engine.module.training:
            self._pairs += self._session.sharder.count_pairs()

    @_patch("step", stage="around_step")
    def around_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        engine, session, steps = self._engine, self._session, self._engine.global_steps
        result = step(*args, **kwargs)
        if engine.global_steps > steps and dist.is_initialized():
            get_accelerator().synchronize()
            spans = [span for span in self._trace.spans if span.what == "compute"]
            seconds = sum(span.end_ns - span.start_ns for span in spans) / 1e9
            table = gather_numbers([self._pairs, seconds], session)
            self._trace.spans.clear()
            self._pairs = 0.0
            self._adopt(table)
        return result

    def _adopt(self, table: torch.Tensor) -> None:
        """Set the speeds of this rank's ring from [world, 2] of pairs and seconds."""
        mesh = self._session.mesh
        ranks = [mesh.global_rank_in_sequence(rank) for rank in range(mesh.sequence_size)]
        pairs, seconds = table[ranks].unflatten(0, (mesh.ring_size, mesh.ulysses_size)).sum(1).unbind(1)
        if not bool((pairs > 0).all() and (seconds > 0).all()):
            return
        rates = pairs / seconds
        speeds = (rates / rates.max() * 16).round().clamp_min(1) / 16
        now = torch.tensor(self._session.speeds or [1.0] * mesh.ring_size, dtype=speeds.dtype, device="cpu")
        if bool(((speeds.cpu() - now / now.max()).abs() > 1.5 / 16).any()):
            self._session.sharder.set_speeds(tuple(speeds.tolist()))
