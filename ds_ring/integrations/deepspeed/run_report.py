"""Report how far this rank is to the folder of its run: step, loss, time and memory.

Owns `rank-N.metrics.json` and the one variable that says where it goes, DS_RING_RUN_FOLDER, which
`ds-ring launch` sets where the cluster YAML names a `run_folder`. The status page reads the file, and who
starts a job again asks in which step a rank failed. Local to the rank: no collective. Without the variable
nothing is written.
"""

from __future__ import annotations

import functools
import json
import os
import re
import time
import weakref
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ds_ring.integrations.deepspeed.session import RingSession

FOLDER_VARIABLE = "DS_RING_RUN_FOLDER"
_LEAST_SECONDS = 0.5  # between two files: a shared file system has better things to do

_engines: weakref.WeakSet[Any] = weakref.WeakSet()  # of this process that train


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


def report_steps(engine: Any, session: RingSession) -> None:
    """Write this rank's latest figures after its optimizer steps, at most twice a second."""
    _engines.add(engine)
    folder = attempt_folder()
    if folder is None:
        return
    step, path = engine.step, folder / f"rank-{dist.get_rank()}.metrics.json"
    ended_s, written_s = time.monotonic(), 0.0

    @functools.wraps(step)
    def step_and_report(*args: Any, **kwargs: Any) -> Any:
        nonlocal ended_s, written_s
        steps = engine.global_steps
        result = step(*args, **kwargs)
        if engine.global_steps > steps:
            now_s = time.monotonic()
            if now_s - written_s >= _LEAST_SECONDS:
                written_s = now_s
                _write(path, _figures(engine, session, now_s - ended_s))
            ended_s = time.monotonic()
        return result

    engine.step = step_and_report


def _figures(engine: Any, session: RingSession, step_seconds: float) -> dict[str, Any]:
    loss = session.latest.get("loss")
    return {
        "rank": dist.get_rank(),
        "at": time.time(),
        "step": int(engine.global_steps),
        "loss": None if loss is None else float(loss),  # the last one that the script asked for
        "step_seconds": step_seconds,
        "memory_bytes": int(get_accelerator().max_memory_allocated()),
        "ring_rank": session.mesh.ring_rank,
        "world_size": dist.get_world_size(),
    }


def _write(path: Path, figures: dict[str, Any]) -> None:
    """Replace the file at once; a full disk ends no training."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(json.dumps(figures), encoding="utf-8")
        os.replace(part, path)
    except OSError:
        pass
