"""Report how far this rank is to the folder of its run: step, loss, time, memory and links.

Owns `rank-N.metrics.json` and the one variable that says where it goes, DS_RING_RUN_FOLDER, which
`ds-ring launch` sets where the cluster YAML names a `run_folder`; rank 0 writes the course of the run beside
it (run_report.py). The status page reads the files, and who starts a job again asks in which step a rank
failed. Local to the rank: no collective. Without the variable nothing is written.

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
import re
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from ds_ring.errors import RingShapeError
from ds_ring.integrations.deepspeed.dynamic_ring import link_times
from ds_ring.integrations.deepspeed.monitor import tokens_of
from ds_ring.integrations.deepspeed.session import RingSession
from ds_ring.replaced_file import replace_text
from ds_ring.runtime.trace import Trace

# The course of a run: `history.jsonl`, which rank 0 writes and the status page draws.

FILE = "history.jsonl"
MOST_LINES = 4000  # some 500 KB


class RunHistory:
    """Append lines to a file of at most `most_lines`: where they are more, every other one is left out.

    From then on only every second step adds a line, then every fourth, and so on: the file is rewritten
    log2(steps / most_lines) times in all, and its lines stay evenly spaced.

    Args:
        path: of the file.
        most_lines: at least 2.
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
        line = json.dumps(figures) + "\n"
        self._lines.append(line)
        try:
            if len(self._lines) > self._most_lines:
                self._thin_out()
            else:
                with open(self._path, "a", encoding="utf-8") as file:
                    file.write(line)
        except OSError:
            pass

    def _thin_out(self) -> None:
        self._lines = self._lines[::2]
        self._every *= 2
        replace_text(self._path, "".join(self._lines))


FOLDER_VARIABLE = "DS_RING_RUN_FOLDER"
_LEAST_SECONDS = 0.5  # between two files: a shared file system has better things to do
_LINK_SECONDS = 10.0  # between two steps whose hops are timed
_IN_HISTORY = ("step", "at", "loss", "tokens_per_second", "step_seconds")

_engines: weakref.WeakSet[Any] = weakref.WeakSet()  # of this process that train
_reports: weakref.WeakSet[_Report] = weakref.WeakSet()


def attempt_folder() -> Path | None:
    """Return the folder of this attempt of the run; None where no launcher has named one."""
    named = os.environ.get(FOLDER_VARIABLE)
    return Path(named) if named else None


def attempt_of(folder: Path | None) -> tuple[str, int] | None:
    """Return which run this is and which attempt of it, by the folder's path; None where there is none."""
    found = None if folder is None else re.fullmatch(r"attempt-(\d+)", folder.name)
    return None if folder is None or found is None else (str(folder.parent.resolve()), int(found[1]))


def step_under_way() -> int | None:
    """Return the number of the optimizer step that this process is in, from 1; None where it trains none."""
    steps = [int(engine.global_steps) for engine in _engines]
    return max(steps) + 1 if steps else None


def report_steps(engine: Any, session: RingSession) -> dict[str, Any]:
    """Return the feature that writes this rank's latest figures after its optimizer steps, at most twice a
    second; none without a run folder.
    """
    _engines.add(engine)
    folder = attempt_folder()
    if folder is None:
        return {}
    report = _Report(engine, session, folder)
    _reports.add(report)
    return {"run_report": report}


@atexit.register
def _finish_reports() -> None:
    """Write the last step of a script that ends, whenever the one before was written."""
    for report in list(_reports):
        try:
            report.finish()
        except RuntimeError:  # of a device that has failed
            pass


@dataclass(frozen=True)
class _EndedStep:
    """Hold what is known of an optimizer step that has ended; `tokens` of this rank, None if unknown."""

    number: int
    at: float
    seconds: float
    tokens: float | None
    loss: Tensor | None


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

    def before_forward(self, engine: Any, args: Any, kwargs: Any) -> None:
        self._take_loss()
        if self._awaits_loss:
            self._write(whole=True)
        if not engine.module.training:  # engine.eval() leaves engine.training
            self._started_s = None
        elif not self._began:
            self._began, self._started_s = True, self._started_s or time.monotonic()
            self._loss_before = self._session.latest.get("loss")
            self._begin_timing()

    def after_forward(self, engine: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if engine.module.training and self._tokens is not None:
            try:
                self._tokens += tokens_of((*args, *kwargs.values()), self._session)
            except RingShapeError:  # no sharded batch: how many tokens these are is the script's own affair
                self._tokens = None

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
        self._end_timing(now_s)
        seconds = 0.0 if self._started_s is None else now_s - self._started_s
        self._last = _EndedStep(number, time.time(), seconds, self._tokens, None)
        self._take_loss()
        self._began, self._started_s, self._tokens, self._awaits_loss = False, now_s, 0.0, False
        if now_s - self._written_s >= _LEAST_SECONDS:
            self._written_s = now_s
            self._awaits_loss = self._rank == 0 and self._last.loss is None
            self._write(whole=not self._awaits_loss)

    def finish(self) -> None:
        """Write what is not written yet."""
        self._take_loss()
        self._write(whole=True)

    def _take_loss(self) -> None:
        """Give the last step its loss: see [Note: whose loss]."""
        loss = self._session.latest.get("loss")
        if self._last is not None and self._last.loss is None and loss is not self._loss_before:
            self._last = replace(self._last, loss=loss)

    def _begin_timing(self) -> None:
        """Let the step that begins be traced, once in a while: that costs microseconds a hop."""
        mesh = self._session.mesh
        # On a GPU the stream waits and not the host, whose spans would tell nothing of links.
        self._times = self._session.device.type == "cpu" and time.monotonic() - self._timed_s >= _LINK_SECONDS
        if self._times and mesh.trace is None:
            mesh.traces.append(self._own_trace)

    def _end_timing(self, now_s: float) -> None:
        if self._times:
            self._times, self._timed_s = False, now_s
            self._own_trace.spans.clear()
            traces = self._session.mesh.traces
            traces[:] = [trace for trace in traces if trace is not self._own_trace]

    def _write(self, whole: bool) -> None:
        """Write the last step; `whole` if nothing is to be added to it."""
        if self._last is None:
            return
        figures = self._figures(self._last)
        _write(self._path, figures)
        if whole:
            self._last, self._awaits_loss = None, False
            if self._history is not None:
                self._history.add({name: figures[name] for name in _IN_HISTORY})

    def _figures(self, step: _EndedStep) -> dict[str, Any]:
        """Return what `launcher/run/run_folder.py` documents."""
        rate = None if step.tokens is None or step.seconds <= 0 else step.tokens / step.seconds
        return {
            "rank": self._rank,
            "at": step.at,
            "step": step.number,
            "loss": None if step.loss is None else _finite(float(step.loss)),
            "step_seconds": step.seconds,
            # Ranks have equal parts of a batch, but for a dynamic ring's.
            "tokens_per_second": None if rate is None else rate * self._world_size,
            "memory_bytes": int(get_accelerator().max_memory_allocated()),
            "ring_rank": self._session.mesh.ring_rank,
            "world_size": self._world_size,
            "links": self._links,
        }


def _finite(value: float) -> float | str:
    """Return a number as JSON has it: "nan" and "inf" are words there."""
    return value if math.isfinite(value) else repr(value)


def _write(path: Path, figures: dict[str, Any]) -> None:
    """Replace the file at once; a full disk ends no training."""
    try:
        replace_text(path, json.dumps(figures))
    except OSError:
        pass


# torchrun sets LOCAL_WORLD_SIZE, DeepSpeed's launcher LOCAL_SIZE; torch.distributed does not know nodes.

LOCAL_SIZE_VARIABLES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")


def ranks_per_node() -> int | None:
    """Return the ranks that share a node; None where no launcher has said so."""
    texts = (os.environ.get(name, "") for name in LOCAL_SIZE_VARIABLES)
    return next((int(text) for text in texts if text.isdecimal() and int(text)), None)
