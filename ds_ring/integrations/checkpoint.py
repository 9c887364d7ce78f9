"""Checkpoints that are whole or not used: DeepSpeed's own files, a manifest with them, one back on damage.

Owns what `engine.save_checkpoint` and `engine.load_checkpoint` do on an engine of `ds_ring.initialize`, and
how all ranks come to one decision. The files and what damage looks like are manifest.py's.

[Note: who hashes] Each rank hashes the files that it wrote itself, all ranks at once. One rank for each
storage puts the manifest together from their reports, after it has found every file in its own view of the
folder, so a folder that the hosts do not share is noticed when it is written. With DeepSpeed's
`"checkpoint": {"use_node_local_storage": true}` each host is a storage of its own, with its own manifest.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_ring.errors import RingCheckpointError, RingConfigError, RingMismatchError
from ds_ring.integrations.atomic_file import write_at_once
from ds_ring.integrations.manifest import (
    LATEST,
    LATEST_UNIVERSAL,
    MANIFEST,
    FileRecord,
    earlier_tags,
    faults_of,
    files_in,
    read_latest,
    record_files,
    unfinished_tags,
    verify_checkpoint,
    write_manifest,
)
from ds_ring.integrations.storage import Storage, storage_of, together

__all__ = ["guard_checkpoints", "load_checkpoint", "save_checkpoint", "verify_checkpoint"]

log = logging.getLogger(__name__)


def guard_checkpoints(engine: DeepSpeedEngine) -> None:
    """Make `engine.save_checkpoint` and `engine.load_checkpoint` the two functions below.

    Raises:
        RingConfigError: the JSON chose a checkpoint writer that goes on writing in the background.
    """
    if engine.checkpoint_engine.is_decoupled():
        raise RingConfigError(
            f"checkpoint: expected files that are complete when save_checkpoint returns, got"
            f" {type(engine.checkpoint_engine).__name__}, which writes on in the background where no manifest"
            ' can follow it; set "decoupled" to false in the "checkpoint" section\'s "writer", or remove it'
        )
    engine.save_checkpoint = types.MethodType(save_checkpoint, engine)
    engine.load_checkpoint = types.MethodType(load_checkpoint, engine)


def save_checkpoint(
    engine: DeepSpeedEngine,
    save_dir: str,
    tag: str | None = None,
    client_state: dict[str, Any] | None = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> bool:
    """DeepSpeed's save_checkpoint, then a manifest, then `latest`, each of the two in one step. Collective.

    However it is cut short, `latest` names a checkpoint that was finished, unless that tag is written anew.

    Raises:
        RingCheckpointError: a file could not be written or read back, or hosts do not share `save_dir`. On
            every rank.
    """
    if not save_dir:
        raise RingConfigError(f"save_dir: expected the path of a folder, got {save_dir!r}; pass one")
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    folder, storage = Path(save_dir, tag), _storage_of(engine)
    # Before any rank writes: no file of the new checkpoint may meet the manifest of an old one.
    together(lambda: (folder / MANIFEST).unlink(missing_ok=True) if storage.leads else None)
    writes = _Writes(folder)
    with writes.watching(engine.checkpoint_engine):
        done = type(engine).save_checkpoint(
            engine,
            save_dir,
            tag,
            client_state=client_state or {},
            save_latest=False,
            exclude_frozen_parameters=exclude_frozen_parameters,
        )
    reports = together(writes.records)
    together(lambda: _seal(folder, storage, reports, engine.global_steps) if storage.leads else None)
    if save_latest:
        together(lambda: write_at_once(Path(save_dir, LATEST), tag) if storage.leads else None)
    return bool(done)


def load_checkpoint(
    engine: DeepSpeedEngine,
    load_dir: str,
    tag: str | None = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: Callable[..., Any] | None = None,
) -> tuple[str | None, dict[str, Any] | None]:
    """DeepSpeed's load_checkpoint of the newest checkpoint that is whole. Collective.

    Without a tag it starts from the one that `latest` names and goes back, one checkpoint at a time, past
    what does not verify; each step is logged as an error with the file, what was expected and what is there.
    Without a file `latest` it returns (None, None), as DeepSpeed does. The path tells which one was taken.

    Raises:
        RingCheckpointError: the tag asked for, or every checkpoint, is damaged or unfinished. On every rank.
        RingMismatchError: the ranks ask for different tags.
    """
    chosen = _choose(engine, Path(load_dir), tag)
    if chosen is None:
        return None, None
    path, client_state = type(engine).load_checkpoint(
        engine,
        load_dir,
        chosen,
        load_module_strict=load_module_strict,
        load_optimizer_states=load_optimizer_states,
        load_lr_scheduler_states=load_lr_scheduler_states,
        load_module_only=load_module_only,
        custom_load_fn=custom_load_fn,
    )
    return path, client_state


def _storage_of(engine: DeepSpeedEngine) -> Storage:
    return storage_of(engine.local_rank, engine.use_node_local_storage())


class _Writes:
    """What this rank's checkpoint engine wrote below a folder, as relative paths, and what went wrong."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.paths, self.fault = folder, dict[str, None](), ""

    def records(self) -> list[FileRecord]:
        """The records of all files, or RingCheckpointError if one could not be written."""
        if self.fault:
            raise RingCheckpointError(self.fault)
        return record_files(self.folder, self.paths)

    @contextmanager
    def watching(self, checkpoint_engine: Any) -> Iterator[None]:
        """Note what is written. An error is kept for later: DeepSpeed's other ranks wait in a barrier."""
        write = checkpoint_engine.save

        def save(state_dict: Any, path: str) -> Any:
            if Path(path).is_relative_to(self.folder):
                self.paths[Path(path).relative_to(self.folder).as_posix()] = None
            try:
                return write(state_dict, path)
            except (OSError, RuntimeError) as error:  # torch names a full disk by a RuntimeError
                self.fault = f"{path}: cannot be written: {error}"

        checkpoint_engine.save = save
        try:
            yield
        finally:
            checkpoint_engine.save = write


def _seal(folder: Path, storage: Storage, reports: Sequence[Sequence[FileRecord]], global_steps: int) -> None:
    """Write the manifest of one storage, over its ranks' files and whatever else lies in the folder."""
    files: dict[str, FileRecord] = {}
    for rank in storage.ranks:
        for record in reports[rank]:
            _require_seen(folder, record, rank, storage.rank)
            files[record.path] = record
    others = [path for path in files_in(folder) if path not in files]  # swapped-out tensors, say
    write_manifest(folder, [*files.values(), *record_files(folder, others)], global_steps)


def _require_seen(folder: Path, record: FileRecord, writer: int, leader: int) -> None:
    path = folder / record.path
    got = f"{path.stat().st_size} bytes" if path.exists() else "no such file"
    if got != f"{record.bytes} bytes":
        raise RingCheckpointError(
            f"{path}: rank {writer} wrote {record.bytes} bytes, rank {leader} sees {got}; save into a folder"
            ' that all hosts share, or set "checkpoint": {"use_node_local_storage": true} in the JSON'
        )


def _choose(engine: DeepSpeedEngine, root: Path, tag: str | None) -> str | None:
    """The tag to load, the same on every rank; None where there is nothing to load and none was asked for."""
    asked = together(lambda: None if tag is None else str(tag))
    if len(set(asked)) > 1:
        raise RingMismatchError(f"tag: expected the same on all ranks, got {asked} by rank; pass one tag")
    universal = bool(engine.load_universal_checkpoint())
    proposals = together(lambda: _proposals(root, asked[0], universal) if dist.get_rank() == 0 else [])[0]
    storage, found = _storage_of(engine), []
    for position, name in enumerate(proposals):
        faults = _faults_everywhere(root / name, storage, universal)
        if not faults:
            _say_what_was_left(root, name)
            return name
        found += [f"checkpoint {name}:", *faults]
        after = proposals[position + 1 : position + 2]
        then = f"trying {after[0]} instead" if after else "and there is no other to try"
        _log_on_rank_0(f"checkpoint {name} is damaged, {then}: {'; '.join(faults)}")
    if found:
        which = "every checkpoint" if tag is None else "the one asked for"
        raise RingCheckpointError(
            "\n".join([f"expected a whole checkpoint in {root}, got damage in {which}:", *found])
        )
    return None


def _proposals(root: Path, tag: str | None, universal: bool) -> list[str]:
    """Tags in the order in which to try them."""
    if tag is not None:
        return [tag]
    if universal:
        newest = read_latest(root, LATEST_UNIVERSAL)
        if newest is None:
            raise RingCheckpointError(f"{root}: expected a file '{LATEST_UNIVERSAL}', got none; pass a tag")
        return [newest]
    newest = read_latest(root)
    if newest is None:
        sealed = earlier_tags(root, "")
        hint = f"; whole checkpoints are there: pass tag={sealed[0]!r}" if sealed else ""
        log.warning("no file '%s' in %s, nothing is loaded%s", LATEST, root, hint)
        return []
    return [newest, *earlier_tags(root, newest)]


def _faults_everywhere(folder: Path, storage: Storage, universal: bool) -> list[str]:
    """What is wrong with a checkpoint on any storage, each fault once. Collective."""
    if universal and not any(together((folder / MANIFEST).exists)):
        _log_on_rank_0(f"{folder} is a universal checkpoint without {MANIFEST}: it is loaded unverified")
        return []
    everyones = together(lambda: faults_of(folder, storage.share, len(storage.ranks)))
    return list(dict.fromkeys(fault for faults in everyones for fault in faults))


def _say_what_was_left(root: Path, chosen: str) -> None:
    """Saving that was cut short leaves a folder that nobody names: say that it is not used."""
    if dist.get_rank() == 0 and (left := [tag for tag in unfinished_tags(root) if tag != chosen]):
        log.error("unfinished in %s and not used: %s (no manifest); taking %s", root, ", ".join(left), chosen)


def _log_on_rank_0(text: str) -> None:
    if dist.get_rank() == 0:
        log.error(text)
