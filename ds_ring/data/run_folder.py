"""Marks of rings and of late ranks in the folder of a run, which `ds-ring launch` names in the environment.

The launcher reads them (`launcher/run/run_folder.py`). There is no collective.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch.distributed as dist

from ds_ring.error_origins import compiled_in, get_failure_kind
from ds_ring.health.client import DetectorClient, LateNotice, log_late
from ds_ring.written_files import append_text, replace_text

FOLDER_VARIABLE = "DS_RING_RUN_FOLDER"
# torchrun sets LOCAL_WORLD_SIZE, DeepSpeed's launcher LOCAL_SIZE; torch.distributed does not know nodes.
LOCAL_SIZE_VARIABLES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")


def attempt_folder() -> Path | None:
    """Return the folder of this attempt of the run; None where no launcher has named one."""
    named = os.environ.get(FOLDER_VARIABLE)
    return Path(named) if named else None


def mark_ring() -> None:
    """Mark in this attempt's folder that this rank has made a ring: the launcher warns without a mark."""
    folder = attempt_folder()
    if folder is not None:
        with suppress(OSError):  # a full disk ends no training
            append_text(folder / f"rank-{dist.get_rank()}.ring", "")


def report_late_ranks(detector: DetectorClient) -> None:
    """Let `ds-ring status` know of ranks that others wait for, where there is a run folder."""
    folder = attempt_folder()
    if folder is not None:
        detector.on_late = partial(_write_late, folder, detector.rank)


def _write_late(folder: Path, own_rank: int, notice: LateNotice | int) -> None:
    """Log a notice, and write it into the folder if it is of another rank."""
    log_late(notice)
    with suppress(OSError):  # a full disk ends no training
        if isinstance(notice, int):
            (folder / f"rank-{notice}.late.json").unlink(missing_ok=True)
        elif notice.rank != own_rank:
            late = {"rank": notice.rank, "at": time.time(), "seconds": notice.seconds, "what": notice.what}
            late |= {"where": notice.at, "limit_seconds": notice.limit.seconds, "key": notice.limit.key}
            replace_text(folder / f"rank-{notice.rank}.late.json", json.dumps(late))


def record_fault(rank: int, error: BaseException, step: int | None) -> None:
    """Describe the error that ends this process for the launcher (`RankFault`), unless it was described.

    `step` is the optimizer step that is under way.
    """
    folder = attempt_folder()
    if folder is None or (path := folder / f"rank-{rank}.fault.json").exists():
        return
    kind, blames = get_failure_kind(error)
    fault: dict[str, object] = {"rank": rank, "at": time.time(), "step": step, "kind": kind, "blames": blames}
    fault |= {"type": type(error).__name__, "message": str(error)[:2000], "frames": [], "traceback": ""}
    with suppress(OSError):  # the traceback is printed anyway
        replace_text(path, json.dumps(fault | {"raised": compiled_in(error) is None}))


def ranks_per_node() -> int | None:
    """Return the ranks that share a node; None if no launcher has set the variable."""
    texts = (os.environ.get(name, "") for name in LOCAL_SIZE_VARIABLES)
    return next((int(text) for text in texts if text.isdecimal() and int(text)), None)
