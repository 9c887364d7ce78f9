"""Save a checkpoint: `engine.save_checkpoint` of an engine of `ds_ring.initialize`.

DeepSpeed writes its files to a hidden folder, `.TAG.saving`, which is renamed to the tag once its manifest is
written. So a failed save never damages the checkpoint before it.

[Note: the order of a save]
Every rank hashes its files, one rank of each storage writes the manifest, then the folder gets its name, and
`latest` comes last. A save that fails or is killed leaves the older checkpoints as they are.
"""

from __future__ import annotations

import atexit
import copy
import functools
import json
import logging
import os
import shutil
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_ring.checkpoint.compatible import describe_training
from ds_ring.checkpoint.manifest import (
    LATEST,
    MANIFEST,
    FileRecord,
    FolderLocks,
    Storage,
    Training,
    files_in,
    find_storage,
    is_folder,
    record_files,
    require_alike,
    require_forward,
    require_plain_tag,
    together,
    write_manifest,
)
from ds_ring.checkpoint.pickles import require_weights_only
from ds_ring.data.engine import DEEPSPEED, ENGINE
from ds_ring.errors import RingCheckpointError, RingConfigError, RingMismatchError
from ds_ring.limits import Limit
from ds_ring.patches import applied, patch
from ds_ring.written_files import sync_folder, write_at_once

log = logging.getLogger(__name__)
Reports = Mapping[int, Sequence[FileRecord]]  # by rank

_LOOK_SECONDS = 0.02
_REST_SECONDS = 10.0  # to seal a checkpoint, or to say why not, after the last report


class HostCopy:
    """Copy the contents of a checkpoint to host memory, so that the next step may change the original.

    Tensors that share memory share it in the copy as well: torch.save writes shared memory once.
    """

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._kept: list[Any] = []  # so that no address is reused during the copy

    def __call__(self, value: Any) -> Any:
        """Return a copy of nested dicts, lists and tuples of tensors and other values."""
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
        copied = torch.empty(0, dtype=x.dtype, device="cpu")
        with torch.no_grad():
            copied.set_(storage, x.storage_offset(), x.size(), x.stride())
        return torch.nn.Parameter(copied, x.requires_grad) if isinstance(x, torch.nn.Parameter) else copied


# [Note: no collective in the background]
# A save in the background copies all tensors to the host's memory; a thread writes, hashes and commits them.
# The thread uses no collective, because the order of collectives belongs to the main thread. Ranks report by
# small files next to the checkpoint, and the first rank of a storage seals it when all have reported.
class BackgroundSave:
    """Hold the one checkpoint of an engine that is being written.

    `limit` is for the slowest rank.
    """

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self._thread: threading.Thread | None = None
        self._fault = ""
        _living.add(self)

    def start(self, work: Callable[[], object]) -> None:
        """Do `work` in a thread; `finish` must have been called since the last one."""
        assert self._thread is None

        def run() -> None:
            try:
                work()
            except Exception as error:  # raised by `finish`, on all ranks
                self._fault = f"{type(error).__name__}: {error}"

        self._fault = ""
        # A daemon: a rank that ends by a fault does not wait for files.
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
            self.wait()
            if self._fault:
                raise RingCheckpointError(self._fault)

        together(wait)

    def wait(self) -> None:
        """Wait for this rank's part alone."""
        if self._thread is not None:
            # The thread has the same limit for the others' reports; its own error is more precise than this.
            self._thread.join(self.limit.seconds + _REST_SECONDS)
            if self._thread.is_alive():
                limit = f"{self.limit.seconds:g} s ({self.limit.key})"
                self._fault = f"the checkpoint in the background was not written within {limit}"
            self._thread = None

    def wait_at_exit(self) -> None:
        """Wait at the end of a script, where an error can only be logged."""
        self.wait()
        if self._fault:
            log.error("the last checkpoint is not whole: %s", self._fault)


_living: weakref.WeakSet[BackgroundSave] = weakref.WeakSet()


@atexit.register
def _wait_at_exit() -> None:
    """Let a checkpoint be finished at the end of a script that has not failed."""
    if getattr(sys, "last_value", None) is None:
        for save in list(_living):
            save.wait_at_exit()


def exchange_reports(
    folder: Path, storage: Storage, make: Callable[[], Sequence[FileRecord]], limit: Limit
) -> dict[int, list[FileRecord]] | None:
    """Write this rank's report on a checkpoint; return those of all ranks, on the storage's first rank.

    `folder` is of the reports. `make` writes this rank's files and returns their records. `limit` is for the
    others' reports.

    Raises:
        RingCheckpointError: a rank could not write its files, or has not reported in time.
    """
    try:
        report: dict[str, Any] = {"files": [record.model_dump() for record in make()]}
    except Exception as error:  # such as a full disk
        report = {"fault": f"rank {storage.rank}: {type(error).__name__}: {error}"}
    part = folder / f".{storage.rank}"
    flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    # On a full disk a truncated report is a report, too: the others read it as a failure and do not wait.
    with suppress(OSError), open(os.open(part, flags), "wb") as file:
        file.write(json.dumps(report).encode())
    part.rename(folder / f"{storage.rank}.json")
    if not storage.leads:
        if "fault" in report:
            raise RingCheckpointError(report["fault"])
        return None
    paths = {rank: folder / f"{rank}.json" for rank in storage.ranks}
    deadline = time.monotonic() + limit.seconds
    while missing := [rank for rank, path in paths.items() if not path.exists()]:
        if time.monotonic() > deadline:
            raise RingCheckpointError(
                f"{folder}: expected a report in {limit.seconds:g} s ({limit.key}), got none of {missing[0]}"
            )
        time.sleep(_LOOK_SECONDS)
    reports = {rank: _read_report(path) for rank, path in paths.items()} | {storage.rank: report}
    shutil.rmtree(folder, ignore_errors=True)
    faults = [rank_report["fault"] for rank_report in reports.values() if "fault" in rank_report]
    if faults:
        raise RingCheckpointError("; ".join(faults))
    return {
        rank: [FileRecord(**record) for record in rank_report["files"]]
        for rank, rank_report in reports.items()
    }


def _read_report(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except ValueError:
        return {"fault": f"rank {path.stem}: its report of the checkpoint was cut short: is the disk full?"}


# [Note: who hashes] Each rank hashes the files that it wrote itself, all ranks at once. One rank for each
# storage puts the manifest together from their reports, after it has found every file in its own view of the
# folder, so a folder that the hosts do not share is noticed when it is written. With DeepSpeed's
# `"checkpoint": {"use_node_local_storage": true}` each host is a storage of its own, with its own manifest.
def save_checkpoint(
    engine: DeepSpeedEngine,
    save_dir: str,
    tag: str | None = None,
    client_state: dict[str, Any] | None = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
    background: bool = False,
    *,
    locks: FolderLocks,
    under_way: BackgroundSave,
    damaged: Collection[Path] = (),
) -> bool:
    """Call DeepSpeed's save_checkpoint, then write a manifest, the tag's name and `latest`. Collective.

    However it is cut short, `latest` names a checkpoint that was finished, and one of the same tag that was
    there before is whole until the new one is. That takes the disk space of both.

    With `background` it returns when all tensors are copied to host memory, which takes as much as the
    checkpoint; files, hashes and commit follow in a thread. The next save or load and the
    end of the script wait for it. An error in it is raised by the next save or load.

    Raises:
        RingCheckpointError: a file could not be written or read back (a full disk, a read-only folder),
            another job saves in `save_dir`, `latest` there names a later step, hosts do not share it, the tag
            is no plain name, or the client state has what loading would refuse. On every rank; what was
            written of it is removed.
        RingMismatchError: the ranks save different tags, or with different options.
    """
    if not save_dir:
        raise RingConfigError(f"save_dir: expected the path of a folder, got {save_dir!r}; pass one")
    under_way.finish()
    root, storage = Path(save_dir), find_storage(engine.local_rank, engine.use_node_local_storage())
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    tags = together(lambda: require_plain_tag(tag, "tag"))
    if len(set(tags)) > 1:
        raise RingMismatchError(f"tag: expected the same on all ranks, got {tags} by rank; pass one tag")
    wanted = {
        "save_latest": save_latest, "background": background,
        "exclude_frozen_parameters": exclude_frozen_parameters,
    }  # fmt: skip
    require_alike("save_checkpoint", wanted)
    hidden = root / f".{tag}.saving"
    reporting = storage.ranks if background else ()
    if save_latest:
        together(lambda: require_forward(root, engine.global_steps, damaged) if storage.leads else None)
    together(lambda: _make_room(root, hidden, locks, reporting) if storage.leads else None)
    writes = _Writes(hidden, HostCopy() if background else None)
    of = int(engine.global_steps), describe_training(engine, exclude_frozen_parameters)
    try:
        with writes.watching(engine):
            done = type(engine).save_checkpoint(
                engine,
                save_dir,
                hidden.name,
                client_state=client_state or {},
                save_latest=False,
                exclude_frozen_parameters=exclude_frozen_parameters,
            )
        if background:  # a fault so far is reported as well: the ranks must decide alike
            rest = root / tag, of, save_latest, storage, locks, under_way.limit
            under_way.start(functools.partial(_seal_later, writes, *rest))
            return bool(done)
        reports = dict(enumerate(together(writes.records)))
        together(lambda: _seal(hidden, storage, reports, *of) if storage.leads else None)
    except RingCheckpointError:  # raised on all ranks: none of them writes any more
        if storage.leads:
            shutil.rmtree(hidden, ignore_errors=True)
        raise
    # The rename is the commit: before it the old checkpoint is whole, after it the new one.
    together(lambda: _commit(hidden, root / tag, locks) if storage.leads else None)
    if save_latest:
        together(lambda: write_at_once(root / LATEST, tag) if storage.leads else None)
    return bool(done)


def _seal_later(
    writes: _Writes,
    folder: Path,
    of: tuple[int, Training],
    save_latest: bool,
    storage: Storage,
    locks: FolderLocks,
    limit: Limit,
) -> None:
    """Write this rank's files; on a storage's first rank commit the checkpoint once all have. In a thread."""
    reports_folder = _get_reports_folder(writes.folder)
    try:
        reports = exchange_reports(reports_folder, storage, writes.records, limit)
        if reports is None:
            return
        _seal(writes.folder, storage, reports, *of)
    except BaseException:
        if storage.leads:
            shutil.rmtree(writes.folder, ignore_errors=True)
            shutil.rmtree(reports_folder, ignore_errors=True)
        raise
    _commit(writes.folder, folder, locks)
    if save_latest:
        write_at_once(folder.parent / LATEST, folder.name)


def _commit(hidden: Path, folder: Path, locks: FolderLocks) -> None:
    locks.require_still(folder.parent)
    give_its_name(hidden, folder)


def _get_reports_folder(hidden: Path) -> Path:
    return hidden.with_name(f"{hidden.name}.reports")


def _make_room(root: Path, hidden: Path, locks: FolderLocks, reporting: Sequence[int]) -> None:
    """Create and lock the folders that DeepSpeed writes into, before any rank is in a barrier of its own.

    The ranks that report later get a file each, since a disk may be full by then.
    """
    root.mkdir(parents=True, exist_ok=True)
    locks.claim(root)
    for folder in (hidden, _get_reports_folder(hidden)):
        if is_folder(folder):
            shutil.rmtree(folder)  # of a save that was cut short
    hidden.mkdir()
    if reporting:
        _get_reports_folder(hidden).mkdir()
    for rank in reporting:
        (_get_reports_folder(hidden) / f".{rank}").touch(exist_ok=False)


class _Writes:
    """Record what this rank wrote below a folder, as relative paths, and what went wrong."""

    def __init__(self, folder: Path, copy: HostCopy | None) -> None:
        self.folder, self.paths, self.fault, self._copy = folder, dict[str, None](), "", copy
        self._later: list[Callable[[], object]] = []

    def records(self) -> list[FileRecord]:
        """Return the records of all files, or raise if one could not be written or loaded again."""
        while self._later:
            self._later.pop(0)()
        if self.fault:
            raise RingCheckpointError(self.fault)
        require_weights_only(self.folder, self.paths)
        return record_files(self.folder, self.paths)

    def watching(self, engine: DeepSpeedEngine) -> AbstractContextManager[None]:
        """Record written files. Keep an error for later: DeepSpeed's other ranks wait in a barrier."""
        return applied(self, engine=engine)

    @patch(
        ENGINE, "_copy_recovery_script", stage="around_save", feature="checkpoint.script",
        reason="its error must not leave the other ranks in DeepSpeed's barrier",
    )  # fmt: skip
    def _save_script(self, copy: Callable[..., Any], path: str) -> Any:
        return self._try(path, _copy_scripts, copy, path, self.folder)

    @patch(
        DEEPSPEED.imported("shutil"), "copytree", stage="around_save", feature="checkpoint.swapped",
        reason="DeepSpeed copies swapped-out tensors by it; its error must not leave the others in a barrier",
    )  # fmt: skip
    def _save_swapped(self, copy: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return self._try(str(args[1]), copy, *args, **options)

    @patch(
        DEEPSPEED.given(
            "engine.checkpoint_engine",
            "deepspeed.runtime.checkpoint_engine.checkpoint_engine.CheckpointEngine",
        ),
        "save", stage="around_save", feature="checkpoint.files",
        reason="knows which files were written; keeps an error until all ranks hear of it",
    )  # fmt: skip
    def _save(self, write: Callable[..., Any], state_dict: Any, path: str) -> Any:
        if Path(path).is_relative_to(self.folder):
            self.paths[Path(path).relative_to(self.folder).as_posix()] = None
        if self._copy is not None:
            copied = self._copy(state_dict)
            self._later.append(lambda: self._try(path, write, copied, path))
            return None
        return self._try(path, write, state_dict, path)

    def _try(self, path: str, write: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if self.fault:
            return None  # the disk is full: more would only take time
        try:
            return write(*args, **options)
        except Exception as error:  # a RuntimeError of torch for a full disk; any type of pickling
            self.fault = f"{path}: cannot be written: {type(error).__name__}: {error}"


def _copy_scripts(copy: Callable[[str], object], folder: str, hidden: Path) -> None:
    """Let DeepSpeed copy its recovery scripts, but not through links in `folder` ([Note: planted links])."""
    work = hidden / ".scripts"
    work.mkdir()
    try:
        copy(str(work))
        for script in work.iterdir():
            os.replace(script, Path(folder, script.name))
    finally:
        shutil.rmtree(work)


def _seal(
    folder: Path, storage: Storage, reports: Reports, global_steps: int, training: Training | None = None
) -> None:
    """Write the manifest of one storage, of its ranks' files and all other files in the folder."""
    files: dict[str, FileRecord] = {}
    for rank in storage.ranks:
        for record in reports[rank]:
            path = folder / record.path
            got = f"{path.stat().st_size} bytes" if path.exists() else "no such file"
            if got != f"{record.bytes} bytes":
                raise RingCheckpointError(
                    f"{path}: expected {record.bytes} bytes of rank {rank}, got {got} on rank {storage.rank};"
                    ' share the folder, or set "checkpoint": {"use_node_local_storage": true}'
                )
            files[record.path] = record
    others = [path for path in files_in(folder) if path not in files]  # swapped-out tensors, say
    write_manifest(folder, [*files.values(), *record_files(folder, others)], global_steps, training)


def give_its_name(hidden: Path, folder: Path) -> None:
    """Rename a sealed folder. What had the name is removed if it is an older checkpoint, else set aside."""
    before = None
    if os.path.lexists(folder):
        if is_folder(folder) and (folder / MANIFEST).exists():
            before = folder.with_name(f".{folder.name}.replaced")
            shutil.rmtree(before, ignore_errors=True)
        else:
            number, before = 1, folder.with_name(f"{folder.name}.unsealed")
            while os.path.lexists(before):
                number += 1
                before = folder.with_name(f"{folder.name}.unsealed{number}")
            log.warning("%s has no %s: it becomes %s", folder, MANIFEST, before)
        os.rename(folder, before)
    try:
        os.rename(hidden, folder)
    except OSError:
        if before is not None:
            os.rename(before, folder)
        raise
    sync_folder(folder.parent)
    if before is not None and before.name.startswith("."):
        shutil.rmtree(before, ignore_errors=True)
