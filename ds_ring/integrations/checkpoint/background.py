"""Write a checkpoint while training goes on: copies now, files, hashes and the commit in a thread.

Owns the copies and the thread. What is written and how it is committed stands in save.py. A checkpoint in the
making has no name that loading takes, so whatever ends the job, the one before it is whole.

[Note: no collective in the background]
A save in the background copies all tensors to the host's memory; a thread writes, hashes and commits them.
The thread uses no collective, because the order of collectives belongs to the main thread. Ranks report by
small files beside the checkpoint, and the first rank of a storage seals it when all have reported.
"""

from __future__ import annotations

import atexit
import copy
import json
import shutil
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ds_ring.errors import RingCheckpointError
from ds_ring.integrations.checkpoint.file_record import FileRecord
from ds_ring.integrations.checkpoint.storage import Storage, together

__all__ = ["BackgroundSave", "HostCopy", "exchange_reports"]

_LOOK_SECONDS = 0.02
_REPORTS_SECONDS = 1800.0  # in which the slowest rank has written its files
_EXIT_SECONDS = 600.0


class HostCopy:
    """Copy what a checkpoint holds to host memory, so that the next step may change the original.

    Tensors that share memory share it in the copy, too, since torch.save writes shared memory once.
    """

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._kept: list[Any] = []  # so that no address is used twice meanwhile

    def __call__(self, value: Any) -> Any:
        """Return a copy of nested dicts, lists and tuples of tensors, and of what else is in them."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, OrderedDict):
            copied = OrderedDict((key, self(item)) for key, item in value.items())
            if hasattr(value, "_metadata"):  # of a module's state dict
                copied._metadata = value._metadata  # type: ignore[attr-defined]
            return copied
        if type(value) is dict:
            return {key: self(item) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self(item) for item in value)
        return value if value is None or isinstance(value, (bool, int, float, str)) else copy.deepcopy(value)

    def _tensor(self, x: torch.Tensor) -> torch.Tensor:
        if x.layout is not torch.strided or x.is_meta:
            return x.detach().clone()
        source = x.untyped_storage()
        storage = self._storages.get(source.data_ptr()) if source.nbytes() else None
        if storage is None:
            storage = torch.UntypedStorage(source.nbytes(), device="cpu")
            storage.copy_(source, non_blocking=False)
            self._storages[source.data_ptr()] = storage
            self._kept.append(source)
        made = torch.empty(0, dtype=x.dtype, device="cpu")
        with torch.no_grad():
            made.set_(storage, x.storage_offset(), x.size(), x.stride())
        return torch.nn.Parameter(made, x.requires_grad) if isinstance(x, torch.nn.Parameter) else made


class BackgroundSave:
    """Hold the one checkpoint of an engine that is being written."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._fault = ""
        _living.add(self)

    def start(self, work: Callable[[], object]) -> None:
        """Do `work` in a thread; `finish` must have been called since the last one."""
        assert self._thread is None

        def run() -> None:
            try:
                work()
            except Exception as error:  # told by `finish`, on all ranks
                self._fault = f"{type(error).__name__}: {error}"

        self._fault = ""
        # A daemon: a rank that ends by a fault waits for nobody's files.
        self._thread = threading.Thread(target=run, name="ds_ring checkpoint", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until the checkpoint is whole. Collective, and at once where there is none.

        Raises:
            RingCheckpointError: on every rank, if it could not be written on some rank.
        """
        if self._thread is None:
            return

        def wait() -> None:
            self.wait(_REPORTS_SECONDS)
            if self._fault:
                raise RingCheckpointError(self._fault)

        together(wait)

    def wait(self, seconds: float) -> None:
        """Wait for this rank's part alone."""
        if self._thread is not None:
            self._thread.join(seconds)
            self._thread = None


# No collective: the group is the main thread's, and its calls are matched by order.
def exchange_reports(
    folder: Path, storage: Storage, make: Callable[[], Sequence[FileRecord]]
) -> dict[int, list[FileRecord]] | None:
    """Write this rank's report beside a checkpoint; return those of all ranks, on the storage's first rank.

    Args:
        folder: of the reports; removed by who returns them.
        storage: whose ranks report.
        make: writes this rank's files and returns their records.

    Raises:
        RingCheckpointError: a rank could not write its files, or has not reported in half an hour.
    """
    report: dict[str, Any]
    try:
        report = {"files": [record.model_dump() for record in make()]}
    except Exception as error:  # a full disk, say
        report = {"fault": f"rank {storage.rank}: {type(error).__name__}: {error}"}
    part = folder / f".{storage.rank}"
    part.write_text(json.dumps(report))
    part.rename(folder / f"{storage.rank}.json")
    if not storage.leads:
        if "fault" in report:
            raise RingCheckpointError(report["fault"])
        return None
    paths = {rank: folder / f"{rank}.json" for rank in storage.ranks}
    deadline = time.monotonic() + _REPORTS_SECONDS
    while not all(path.exists() for path in paths.values()):
        if time.monotonic() > deadline:
            raise RingCheckpointError(f"{folder}: expected a report of every rank, got none of some")
        time.sleep(_LOOK_SECONDS)
    reports = {rank: json.loads(path.read_text()) for rank, path in paths.items()}
    shutil.rmtree(folder, ignore_errors=True)
    faults = [one["fault"] for one in reports.values() if "fault" in one]
    if faults:
        raise RingCheckpointError("; ".join(faults))
    return {rank: [FileRecord(**record) for record in one["files"]] for rank, one in reports.items()}


_living: weakref.WeakSet[BackgroundSave] = weakref.WeakSet()


def _wait_at_exit() -> None:
    """Let a checkpoint be finished at the end of a script that has not failed."""
    if getattr(sys, "last_value", None) is None:
        for one in list(_living):
            one.wait(_EXIT_SECONDS)


atexit.register(_wait_at_exit)
