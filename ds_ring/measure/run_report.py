"""Write the figures of each optimizer step to the folder of this rank's run.

`ds-ring launch` names the folder in DS_RING_RUN_FOLDER where the cluster YAML has a `run_folder`. Step, loss,
time, memory and links go to `rank-N.metrics.json`; rank 0 writes the history of the run to `history.jsonl`.
`ds-ring status` reads them, and a relaunch reads in which step a rank failed. There is no collective.

[Note: whose loss]
A script reads the mean loss of step k before `engine.step()` or after it. In the second case the loss is not
known when the step ends. A loss that is read after the beginning of the first forward pass of step k, and
before the first forward pass after the step (of training or of an evaluation), is the loss of step k. Rank 0
writes the line of a step without a loss when that pass begins, or at the end of the process.
"""

from __future__ import annotations

import atexit
import json
import math
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
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from ds_ring.comm.mesh import RingMesh
from ds_ring.comm.messages import Observers
from ds_ring.data.engine import ENGINE
from ds_ring.data.engine_part import EnginePart, EngineStart
from ds_ring.data.run_folder import attempt_folder
from ds_ring.data.session import RingSession
from ds_ring.errors import RingShapeError
from ds_ring.measure.step_metrics import count_tokens
from ds_ring.measure.trace import Span, Trace
from ds_ring.patches import patch
from ds_ring.written_files import append_text, replace_text

FILE = "history.jsonl"
MAX_LINES = 4000  # some 500 KB
_LEAST_SECONDS = 0.5  # between two files: a shared file system has better things to do
_LINK_SECONDS = 10.0  # between two steps whose hops are timed
_IN_HISTORY = ("step", "at", "loss", "tokens_per_second", "step_seconds")

_patch = partial(
    patch, ENGINE, feature="run_report", when="a run folder is named",
    reason="writes this rank's latest figures to the folder of the run",
)  # fmt: skip

_engines: weakref.WeakSet[Any] = weakref.WeakSet()  # of this process that train
_reports: weakref.WeakSet[_Report] = weakref.WeakSet()


class RunHistory:
    """Append lines to a file of at most `most_lines`: where they are more, every other one is left out.

    From then on only every second step adds a line, then every fourth, and so on: the file is rewritten
    log2(steps / most_lines) times in all, and its lines stay evenly spaced. `most_lines` is at least 2.
    """

    def __init__(self, path: Path, most_lines: int = MAX_LINES) -> None:
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


def step_under_way() -> int | None:
    """Return the number of the optimizer step that this process is in, from 1; None where it trains none."""
    steps = [int(engine.global_steps) for engine in _engines]
    return max(steps) + 1 if steps else None


class RunReport(EnginePart):
    """Write this rank's latest figures after its steps, where there is a run folder."""

    def patches(self, start: EngineStart) -> list[Any]:
        """Return the patches of an engine that trains."""
        folder = attempt_folder()
        if not start.trains:
            return []
        _engines.add(start.engine)
        if folder is None:
            return []
        report = _Report(start.engine, start.session, folder)
        _reports.add(report)
        return [report]


@atexit.register
def _finish_reports() -> None:
    """Write the last step of a script that ends, whenever the one before was written."""
    for report in list(_reports):
        with suppress(RuntimeError):  # of a device that has failed
            report.finish()


@dataclass
class _EndedStep:
    """The figures of an optimizer step that has ended, None if unknown; `tokens` of this rank."""

    number: int
    at: float
    seconds: float | None
    tokens: float | None
    loss: Tensor | None = None


class _Report:
    """Make and write the figures of one engine."""

    def __init__(self, engine: Any, session: RingSession, folder: Path) -> None:
        self._engine, self._session, self._rank = engine, session, dist.get_rank()
        self._world_size = dist.get_world_size()
        self._path = folder / f"rank-{self._rank}.metrics.json"
        self._history = RunHistory(folder / FILE) if self._rank == 0 else None
        # Of the step under way: the end of the step or evaluation before. Unknown for the first step, which
        # would be the fastest if it began with its first forward pass: without the loading of its batch.
        self._started_s: float | None = None
        self._began = False  # its first forward pass
        self._tokens: float | None = 0.0  # of its batches
        self._loss_before: Tensor | None = None  # the one that was known when it began
        self._last: _EndedStep | None = None  # not written yet, or without its loss
        self._awaits_loss = False
        self._written_s = self._timed_s = -math.inf
        self._links: list[dict[str, Any]] = []
        self._times, self._own_trace = False, Trace()

    @_patch(stage="before_forward")
    def before_forward(self, engine: Any, args: Any, kwargs: Any) -> None:
        self._take_loss()
        if self._awaits_loss:
            self._write(whole=True)
        if engine.module.training and not self._began:  # engine.eval() leaves engine.training
            now_s, mesh = time.monotonic(), self._session.run_mesh
            self._began = True
            self._loss_before = self._session.latest.get("loss")
            # Hops are timed once in a while: that costs microseconds a hop. On a GPU the stream waits and not
            # the host, whose spans would tell nothing of links.
            self._times = self._session.device.type == "cpu" and now_s - self._timed_s >= _LINK_SECONDS
            if self._times and not mesh.owners[Observers]:
                mesh.owners[Observers].append(self._own_trace)

    @_patch(stage="after_forward")
    def after_forward(self, engine: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if not engine.module.training:
            self._started_s = time.monotonic()
        elif self._tokens is not None:
            try:
                self._tokens += count_tokens((*args, *kwargs.values()), self._session)
            except RingShapeError:  # no sharded batch: how many tokens these are is the script's own affair
                self._tokens = None

    @_patch("step", stage="around_step")
    def around_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        observers = self._session.run_mesh.owners[Observers]
        steps = self._engine.global_steps
        trace = next((observer for observer in reversed(observers) if isinstance(observer, Trace)), None)
        # Before the step, since the monitor of the section clears its spans in it.
        if self._times and trace is not None:
            self._links = link_times(trace.spans, self._session.run_mesh)
        result = step(*args, **kwargs)
        if self._engine.global_steps > steps:
            self._after_step(int(self._engine.global_steps))
        return result

    def _after_step(self, number: int) -> None:
        now_s = time.monotonic()
        if self._times:
            self._times, self._timed_s = False, now_s
            self._own_trace.spans.clear()
            traces = self._session.run_mesh.owners[Observers]
            traces[:] = [trace for trace in traces if trace is not self._own_trace]
        seconds = None if self._started_s is None else now_s - self._started_s
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
        rate = step.tokens / step.seconds if step.tokens is not None and step.seconds else None
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
            "ring_rank": self._session.run_mesh.ring_rank,
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
    links_by_sender = []
    for rank in sorted(links):
        hops, hop_ns, wait_ns, payload_bytes = links[rank].tolist()
        seconds = {"hop_seconds": hop_ns / hops / 1e9, "wait_seconds": wait_ns / hops / 1e9}
        links_by_sender.append({"from": rank, "hops": hops, **seconds, "bytes": payload_bytes // hops})
    return links_by_sender
