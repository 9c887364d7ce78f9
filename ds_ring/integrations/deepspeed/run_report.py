"""Report each optimizer step, to DeepSpeed's monitor and to the folder of this rank's run.

To the monitor (CSV, TensorBoard, W&B, Comet) with `"monitor": true`; without it there is no collective:

| event | of an optimizer step |
|---|---|
| `Ring/forward_hop_seconds`, `Ring/backward_hop_seconds` | mean time of a hop (send, compute, wait) |
| `Ring/wait_share` | share of the hops' time that was spent waiting for messages |
| `Ring/exposed_seconds` | the same in seconds: communication that computing did not hide |
| `Ring/sent_bytes` | payload that left a rank |
| `Ring/buffers_bytes` | most memory of messages at once |
| `Ring/memory_bytes` | most memory of the process so far (CPU: resident; CUDA: allocated) |
| `Ring/step_seconds` | from the end of the step before (or the first forward pass) to the end of this one |
| `Ring/tokens_per_second` | tokens of all ranks' training batches, padding included, over that time |

Each is the largest of all ranks, but tokens are added up: a ring is as fast as its slowest one.

To the folder of the run, which `ds-ring launch` names in DS_RING_RUN_FOLDER where the cluster YAML has a
`run_folder`: step, loss, time, memory and links in `rank-N.metrics.json`, and the course of the run in
`history.jsonl`, by rank 0. The status page reads them, and who starts a job again asks in which step a rank
failed. Local to the rank: no collective.

[Note: whose loss]
A script asks for the mean loss of step k before `engine.step()` or after it; in the second case it is not
there yet when the step ends. What is asked for from the first forward pass of step k on and before the first
forward pass after the step (of training or of an evaluation) is the loss of step k: rank 0 writes the line of
a step without one when that pass begins, or at the end of the process.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from ds_ring.comm.exchange import Exchange
from ds_ring.comm.mesh import RingMesh
from ds_ring.config.json_text import append_text, replace_text
from ds_ring.errors import RingConfigError, RingShapeError
from ds_ring.health.client import DetectorClient, LateNotice, log_late
from ds_ring.integrations.adapter import patch
from ds_ring.integrations.deepspeed.engine import ENGINE
from ds_ring.integrations.deepspeed.loss import world_sum
from ds_ring.integrations.deepspeed.session import RingSession
from ds_ring.ring.trace import Span, Trace

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
FOLDER_VARIABLE = "DS_RING_RUN_FOLDER"
# torchrun sets LOCAL_WORLD_SIZE, DeepSpeed's launcher LOCAL_SIZE; torch.distributed does not know nodes.
LOCAL_SIZE_VARIABLES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")
FILE = "history.jsonl"
MOST_LINES = 4000  # some 500 KB
_LEAST_SECONDS = 0.5  # between two files: a shared file system has better things to do
_LINK_SECONDS = 10.0  # between two steps whose hops are timed
_IN_HISTORY = ("step", "at", "loss", "tokens_per_second", "step_seconds")

_monitor_patch = partial(
    patch, ENGINE, feature="monitor", when="monitor",
    reason="writes Ring/* events after an optimizer step; counts training passes only",
)  # fmt: skip
_speeds_patch = partial(
    patch, ENGINE, feature="rank_speeds", when='"rank_speeds": "measured"',
    reason="deals out work by the time that the hops of each rank take",
)  # fmt: skip
_report_patch = partial(
    patch, ENGINE, feature="run_report", when="a run folder is named",
    reason="writes this rank's latest figures to the folder of the run",
)  # fmt: skip

_engines: weakref.WeakSet[Any] = weakref.WeakSet()  # of this process that train
_reports: weakref.WeakSet[_Report] = weakref.WeakSet()


def check_monitor(wanted: bool, config: dict[str, Any]) -> None:
    """Refuse `"monitor": true` where DeepSpeed has no monitor that could show anything."""
    if wanted and not any((config.get(writer) or {}).get("enabled") for writer in _WRITERS):
        raise RingConfigError(
            f"ring_attention.monitor: expected one of {', '.join(_WRITERS)} to be enabled, got none:"
            ' there is nowhere to report to; add {"csv_monitor": {"enabled": true, "output_path": "runs",'
            ' "job_name": "ring"}} to the DeepSpeed JSON, or set monitor to false'
        )


def _of_all_ranks(mine: Sequence[float], session: RingSession) -> torch.Tensor:
    """Return the numbers of every rank of the world, float64 [ranks, n]. Collective."""
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    table = torch.zeros(size, len(mine), dtype=torch.float64, device=session.device)
    table[rank] = torch.tensor(mine, dtype=torch.float64)
    world_sum(table, session.mesh, Exchange(session.mesh, session.mesh.timeouts.hop))
    return table


class RingMonitor:
    """Trace the ring passes of an engine, and report them after each of its optimizer steps."""

    def __init__(self, engine: Any, session: RingSession) -> None:
        self._engine, self._session, self._trace = engine, session, Trace(session.mesh.ring_rank)
        self._spans = 0  # before the forward pass that is under way
        self._tokens = 0.0  # of the step's training batches, this rank's part
        self._started_s: float | None = None  # of the monotonic clock; None until training goes on
        session.mesh.traces.append(self._trace)

    @_monitor_patch(stage="before_forward")
    def before_forward(self, _: Any, args: Any, kwargs: Any) -> None:
        """Begin to measure time with the first training pass of a step."""
        self._spans = len(self._trace.spans)
        if not self._engine.module.training:
            self._started_s = None
        elif self._started_s is None:
            self._started_s = time.monotonic()

    @_monitor_patch(stage="after_forward")
    def after_forward(self, _: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Count the tokens of a training pass; forget the spans of another one."""
        if self._engine.module.training:
            self._tokens += tokens_of((*args, *kwargs.values()), self._session)
        else:
            del self._trace.spans[self._spans :]

    @_monitor_patch("step", stage="around_step")
    def around_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        engine, steps = self._engine, self._engine.global_steps
        result = step(*args, **kwargs)
        if engine.global_steps > steps:
            get_accelerator().synchronize()
            now_s = time.monotonic()
            seconds = 0.0 if self._started_s is None else now_s - self._started_s
            all_ranks = _of_all_ranks([*figures(self._trace.spans), seconds, self._tokens], self._session)
            values = all_ranks.max(0).values.tolist()
            values[-1] = float(all_ranks[:, -1].sum()) / max(values[-2], 1e-9)
            self._trace.spans.clear()
            self._started_s, self._tokens = time.monotonic(), 0.0
            events = zip(EVENTS, values, strict=True)
            engine.monitor.write_events([(f"Ring/{name}", x, engine.global_samples) for name, x in events])
        return result


class MeasuredSpeeds:
    """Measure how fast the ranks of a ring attend, and deal out later batches by it.

    For `"rank_speeds": "measured"`. After a step all ranks learn how many pairs each of them computed in how
    many seconds of its hops. The layout changes if some rank's speed, in sixteenths of the fastest one, is
    off by more than one of them.
    """

    def __init__(self, engine: Any, session: RingSession) -> None:
        if session.device.type != "cpu":  # a trace has the host's times, and kernels run behind them
            raise RingConfigError(
                f'rank_speeds: expected a list of numbers on {session.device.type}, got "measured", which'
                " times hops on CPU ranks only; give the speeds of the ranks, [1, 0.5] say"
            )
        self._engine, self._session, self._trace = engine, session, Trace(session.mesh.ring_rank)
        self._pairs = 0.0  # that this rank's attention computes in the step's training batches
        session.mesh.traces.append(self._trace)

    @_speeds_patch(stage="after_forward")
    def after_forward(self, _: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Count the pairs of a training pass."""
        if self._engine.module.training:
            self._pairs += self._session.work_here()

    @_speeds_patch("step", stage="around_step")
    def around_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        engine, session, steps = self._engine, self._session, self._engine.global_steps
        result = step(*args, **kwargs)
        if engine.global_steps > steps and dist.is_initialized():
            get_accelerator().synchronize()
            spans = [one for one in self._trace.spans if one.what == "compute"]
            seconds = sum(one.end_ns - one.start_ns for one in spans) / 1e9
            table = _of_all_ranks([self._pairs, seconds], session)
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
        found = (rates / rates.max() * 16).round().clamp_min(1) / 16
        now = torch.tensor(self._session.speeds or [1.0] * mesh.ring_size, dtype=found.dtype)
        if bool(((found.cpu() - now / now.max()).abs() > 1.5 / 16).any()):
            self._session.set_speeds(tuple(found.tolist()))


def tokens_of(given: tuple[Any, ...], session: RingSession) -> float:
    """Return how many tokens of the batch in the model are this rank's; the parts of its ranks add up."""
    sharding = session.batches.current
    tensors = [x for x in given if isinstance(x, torch.Tensor) and x.ndim >= 2]
    samples = max((len(x) for x in tensors if x.shape[1] == sharding.local_tokens), default=0)
    return samples * sharding.layout.tokens / sharding.mesh.sequence_size


def figures(spans: Sequence[Span]) -> list[float]:
    """Return this rank's values of the first EVENTS over the spans of a step; 0 where there were none."""
    hop_s = []
    for phase in ("forward", "backward"):
        of_phase = [one for one in spans if one.phase == phase]
        hop_s.append(_seconds(of_phase) / max(sum(one.what == "compute" for one in of_phase), 1))
    waited = _seconds(one for one in spans if one.what == "wait")
    return [
        *hop_s,
        waited / max(_seconds(spans), 1e-12),
        waited,
        float(sum(one.batch.bytes_sent for one in spans if one.what == "send")),
        float(max((one.buffers_bytes for one in spans), default=0)),
        float(get_accelerator().max_memory_allocated()),
    ]


def _seconds(spans: Any) -> float:
    return float(sum(one.end_ns - one.start_ns for one in spans)) / 1e9


class RunHistory:
    """Append lines to a file of at most `most_lines`: where they are more, every other one is left out.

    From then on only every second step adds a line, then every fourth, and so on: the file is rewritten
    log2(steps / most_lines) times in all, and its lines stay evenly spaced. `most_lines` is at least 2.
    """

    def __init__(self, path: Path, most_lines: int = MOST_LINES) -> None:
        self._path, self._most_lines = path, most_lines
        self._lines: list[str] = []
        self._every, self._count = 1, 0

    def add(self, figures: dict[str, Any]) -> None:
        """Append a line, or leave it out where lines are spaced; a full disk ends no training."""
        self._count += 1
        if (self._count - 1) % self._every:
            return
        self._lines.append(json.dumps(figures) + "\n")
        with suppress(OSError):
            if len(self._lines) > self._most_lines:
                self._lines = self._lines[::2]
                self._every *= 2
                replace_text(self._path, "".join(self._lines))
            else:
                append_text(self._path, self._lines[-1])


def attempt_folder() -> Path | None:
    """Return the folder of this attempt of the run; None where no launcher has named one."""
    named = os.environ.get(FOLDER_VARIABLE)
    return Path(named) if named else None


def mark_ring() -> None:
    """Say in the folder of this attempt that this rank has made a ring: the launcher tells where none has."""
    folder = attempt_folder()
    if folder is not None:
        with suppress(OSError):  # a full disk ends no training
            append_text(folder / f"rank-{dist.get_rank()}.ring", "")


def report_late_ranks(detector: DetectorClient) -> None:
    """Let `ds-ring status` know of ranks that others wait for, where there is a run folder."""
    folder = attempt_folder()
    if folder is not None:
        detector.on_late = partial(_write_late, folder, detector.rank)


def _write_late(folder: Path, own: int, notice: LateNotice | int) -> None:
    """Log a notice, and write it into the folder if it is of another rank."""
    log_late(notice)
    with suppress(OSError):  # a full disk ends no training
        if isinstance(notice, int):
            (folder / f"rank-{notice}.late.json").unlink(missing_ok=True)
        elif notice.rank != own:
            told = {"rank": notice.rank, "at": time.time(), "seconds": notice.seconds, "what": notice.what}
            told |= {"where": notice.at, "limit_seconds": notice.limit.seconds, "key": notice.limit.key}
            replace_text(folder / f"rank-{notice.rank}.late.json", json.dumps(told))


def step_under_way() -> int | None:
    """Return the number of the optimizer step that this process is in, from 1; None where it trains none."""
    steps = [int(engine.global_steps) for engine in _engines]
    return max(steps) + 1 if steps else None


def report_steps(engine: Any, session: RingSession) -> _Report | None:
    """Return what writes this rank's latest figures after its steps; None without a run folder."""
    _engines.add(engine)
    folder = attempt_folder()
    if folder is None:
        return None
    report = _Report(engine, session, folder)
    _reports.add(report)
    return report


@atexit.register
def _finish_reports() -> None:
    """Write the last step of a script that ends, whenever the one before was written."""
    for report in list(_reports):
        with suppress(RuntimeError):  # of a device that has failed
            report.finish()


@dataclass
class _EndedStep:
    """Hold what is known of an optimizer step that has ended; `tokens` of this rank, None if unknown."""

    number: int
    at: float
    seconds: float
    tokens: float | None
    loss: Tensor | None = None


class _Report:
    """Make and write the figures of one engine."""

    def __init__(self, engine: Any, session: RingSession, folder: Path) -> None:
        self._engine, self._session, self._rank = engine, session, dist.get_rank()
        self._world_size = dist.get_world_size()
        self._path = folder / f"rank-{self._rank}.metrics.json"
        self._history = RunHistory(folder / FILE) if self._rank == 0 else None
        self._started_s: float | None = None  # of the step under way; None until training goes on
        self._began = False  # its first forward pass
        self._tokens: float | None = 0.0  # of its batches
        self._loss_before: Tensor | None = None  # the one that was known when it began
        self._last: _EndedStep | None = None  # what is not written, or not as a whole
        self._awaits_loss = False
        self._written_s = self._timed_s = -math.inf
        self._links: list[dict[str, Any]] = []
        self._times, self._own_trace = False, Trace(session.mesh.ring_rank)

    @_report_patch(stage="before_forward")
    def before_forward(self, engine: Any, args: Any, kwargs: Any) -> None:
        self._take_loss()
        if self._awaits_loss:
            self._write(whole=True)
        if not engine.module.training:  # engine.eval() leaves engine.training
            self._started_s = None
        elif not self._began:
            now_s, mesh = time.monotonic(), self._session.mesh
            self._began, self._started_s = True, self._started_s or now_s
            self._loss_before = self._session.latest.get("loss")
            # Hops are timed once in a while: that costs microseconds a hop. On a GPU the stream waits and not
            # the host, whose spans would tell nothing of links.
            self._times = self._session.device.type == "cpu" and now_s - self._timed_s >= _LINK_SECONDS
            if self._times and mesh.trace is None:
                mesh.traces.append(self._own_trace)

    @_report_patch(stage="after_forward")
    def after_forward(self, engine: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if engine.module.training and self._tokens is not None:
            try:
                self._tokens += tokens_of((*args, *kwargs.values()), self._session)
            except RingShapeError:  # no sharded batch: how many tokens these are is the script's own affair
                self._tokens = None

    @_report_patch("step", stage="around_step")
    def around_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        steps, trace = self._engine.global_steps, self._session.mesh.trace
        # Before the step, since the monitor of the section clears its spans in it.
        if self._times and trace is not None:
            self._links = link_times(trace.spans, self._session.mesh)
        result = step(*args, **kwargs)
        if self._engine.global_steps > steps:
            self._after_step(int(self._engine.global_steps))
        return result

    def _after_step(self, number: int) -> None:
        now_s = time.monotonic()
        if self._times:
            self._times, self._timed_s = False, now_s
            self._own_trace.spans.clear()
            traces = self._session.mesh.traces
            traces[:] = [trace for trace in traces if trace is not self._own_trace]
        seconds = 0.0 if self._started_s is None else now_s - self._started_s
        self._last = _EndedStep(number, time.time(), seconds, self._tokens)
        self._take_loss()
        self._began, self._started_s, self._tokens, self._awaits_loss = False, now_s, 0.0, False
        if now_s - self._written_s >= _LEAST_SECONDS:
            self._written_s = now_s
            self._awaits_loss = self._rank == 0 and self._last.loss is None
            self._write(whole=not self._awaits_loss)

    def finish(self) -> None:
        self._take_loss()
        self._write(whole=True)

    def _take_loss(self) -> None:
        """Give the last step its loss: see [Note: whose loss]."""
        loss = self._session.latest.get("loss")
        if self._last is not None and self._last.loss is None and loss is not self._loss_before:
            self._last.loss = loss

    def _write(self, whole: bool) -> None:
        """Write what `launcher/run/run_folder.py` documents; `whole` if nothing is to be added to it."""
        step = self._last
        if step is None:
            return
        loss = None if step.loss is None else float(step.loss)
        rate = None if step.tokens is None or step.seconds <= 0 else step.tokens / step.seconds
        figures: dict[str, Any] = {
            "rank": self._rank,
            "at": step.at,
            "step": step.number,
            # "nan" and "inf" are words in JSON
            "loss": loss if loss is None or math.isfinite(loss) else repr(loss),
            "step_seconds": step.seconds,
            # Ranks have equal parts of a batch, but for a dynamic ring's.
            "tokens_per_second": None if rate is None else rate * self._world_size,
            "memory_bytes": int(get_accelerator().max_memory_allocated()),
            "ring_rank": self._session.mesh.ring_rank,
            "world_size": self._world_size,
            "links": self._links,
        }
        with suppress(OSError):  # a full disk ends no training
            replace_text(self._path, json.dumps(figures))
        if whole:
            self._last, self._awaits_loss = None, False
            if self._history is not None:
                self._history.add({name: figures[name] for name in _IN_HISTORY})


def link_times(spans: Sequence[Span], mesh: RingMesh) -> list[dict[str, Any]]:
    """Return the means over hops of each link that brought something to this rank, by the sender.

    Each is {"from": rank of the world, "hops", "hop_seconds": from the post of a batch to the end of the wait
    for it, "wait_seconds", "bytes": payload of a hop}. A link that is slower than computing shows in the
    whole hop and in the wait.
    """
    # by sender: hops, their nanoseconds, those of the waits, payload bytes
    links: defaultdict[int, np.ndarray] = defaultdict(lambda: np.zeros(4, dtype=np.int64))
    posted_ns = 0
    for span in spans:
        if span.what == "send":
            posted_ns = span.start_ns
        elif span.what == "wait":
            arrived: Counter[int] = Counter()
            for message in span.batch.receives:
                arrived[mesh.global_rank_of(message.peer)] += message.payload_bytes
            for rank, payload_bytes in arrived.items():
                links[rank] += (1, span.end_ns - posted_ns, span.end_ns - span.start_ns, payload_bytes)
    found = []
    for rank in sorted(links):
        hops, hop_ns, wait_ns, payload_bytes = links[rank].tolist()
        seconds = {"hop_seconds": hop_ns / hops / 1e9, "wait_seconds": wait_ns / hops / 1e9}
        found.append({"from": rank, "hops": hops, **seconds, "bytes": payload_bytes // hops})
    return found


def ranks_per_node() -> int | None:
    """Return the ranks that share a node; None where no launcher has said so."""
    texts = (os.environ.get(name, "") for name in LOCAL_SIZE_VARIABLES)
    return next((int(text) for text in texts if text.isdecimal() and int(text)), None)
