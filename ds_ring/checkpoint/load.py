"""Load only checkpoints that are whole: `engine.load_checkpoint` of an engine of `ds_ring.initialize`.

[Note: one decision]
The ranks divide the hashing and collect all faults before anybody decides, so every rank takes the same
checkpoint or raises the same error.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_ring.checkpoint.compatible import deepspeed_errors_typed, require_loadable
from ds_ring.checkpoint.manifest import (
    LATEST,
    LATEST_UNIVERSAL,
    MANIFEST,
    Attempt,
    FolderLocks,
    Storage,
    changes_by_others,
    earlier_tags,
    files_in,
    find_faults,
    find_storage,
    is_universal,
    read_digest,
    read_latest,
    read_manifest,
    require_alike,
    require_folder,
    require_plain_tag,
    together,
    unfinished_tags,
    walk_entries,
)
from ds_ring.checkpoint.pickles import require_weights_only, weights_only_below
from ds_ring.checkpoint.resize import count_ranks, read_stage
from ds_ring.checkpoint.save import BackgroundSave, save_checkpoint
from ds_ring.compat.deepspeed import writes_decoupled
from ds_ring.data.engine import DEEPSPEED, ENGINE
from ds_ring.errors import RingCheckpointError, RingCheckpointMissingError, RingConfigError, RingMismatchError
from ds_ring.limits import Limit, Timeouts
from ds_ring.patches import BoundPatch, applied, patch

log = logging.getLogger(__name__)


_SEALED = "sealed checkpoints, one decision of all ranks; DeepSpeed's method is called inside"
_save = patch(
    ENGINE, "save_checkpoint", stage="around_save", kind="replaced", feature="checkpoint", reason=_SEALED
)
_load = patch(
    ENGINE, "load_checkpoint", stage="around_load", kind="replaced", feature="checkpoint", reason=_SEALED
)
_universal = patch(
    DEEPSPEED.given("engine._config", "deepspeed.runtime.config.DeepSpeedConfig"),
    "load_universal_checkpoint", stage="around_load", kind="set", feature="checkpoint.universal",
    reason="a folder is loaded by its kind",
)  # fmt: skip


def guard_checkpoints(
    engine: DeepSpeedEngine,
    attempt: Attempt | None = None,
    limit: Limit = Timeouts().limit("checkpoint"),  # noqa: B008  # an immutable value
) -> list[BoundPatch]:
    """Return save.py's save_checkpoint and the load_checkpoint below as methods of an engine.

    `attempt` is that of `FolderLocks`, `limit` that of a save in the background.
    """
    if writes_decoupled(engine.checkpoint_engine):
        raise RingConfigError(
            "checkpoint: expected files that are complete when save_checkpoint returns, got"
            f' {type(engine.checkpoint_engine).__name__}; set "decoupled" to false in "writer"'
        )
    under_way, damaged = BackgroundSave(limit), set[Path]()
    save = partial(save_checkpoint, locks=FolderLocks(attempt), under_way=under_way, damaged=damaged)
    load = partial(load_checkpoint, under_way=under_way, damaged=damaged)
    return [_save.to(MethodType(save, engine)), _load.to(MethodType(load, engine))]


# [Note: damage or changes] A crash or a disk leaves files that are missing, short or changed, or a torn
# `latest`: then the checkpoint before is taken. A link, a FIFO, an additional file, a path that leads out of
# the folder, or code in a pickle was put there by somebody: loading stops, and a person decides.
def load_checkpoint(
    engine: DeepSpeedEngine,
    load_dir: str,
    tag: str | None = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: Callable[..., Any] | None = None,
    *,
    under_way: BackgroundSave,
    damaged: set[Path],
) -> tuple[str | None, dict[str, Any] | None]:
    """Load the newest checkpoint that is whole, by DeepSpeed's load_checkpoint. Collective.

    Without a tag it takes the checkpoint that `latest` names, or the newest one before it that verifies. Each
    checkpoint that it skips is logged as an error with the file, the expected and the found contents.
    Without a file `latest` it returns (None, None), as DeepSpeed does. The returned path is of the checkpoint
    taken. No pickled code is run ([Note: weights only] in pickles.py).

    Raises:
        RingCheckpointMissingError: there is no checkpoint of this tag.
        RingCheckpointError: the checkpoint of the tag, or every checkpoint, is damaged or unfinished, or the
            first whole one has changes that no crash makes ([Note: damage or changes]), is not the same on
            all ranks ([Note: one checkpoint for all]) or is of another ZeRO stage, dtype, optimizer,
            scheduler or model, as far as DeepSpeed cannot load that. On every rank.
        RingMismatchError: the ranks ask for different tags, or with different options.
    """
    under_way.finish()
    wanted = {
        "load_module_strict": load_module_strict, "load_optimizer_states": load_optimizer_states,
        "load_lr_scheduler_states": load_lr_scheduler_states, "load_module_only": load_module_only,
        "custom_load_fn": custom_load_fn is not None,
    }  # fmt: skip
    require_alike("load_checkpoint", wanted)
    chosen = _choose(engine, Path(load_dir), tag, damaged)
    if chosen is None:
        return None, None
    if engine.zero_optimization_partition_weights() and not load_optimizer_states:
        _require_latest(Path(load_dir), chosen)
    universal = any(together(lambda: is_universal(Path(load_dir, chosen))))
    folder, optimizer = Path(load_dir, chosen), load_optimizer_states and not load_module_only
    _require_loadable(
        engine, folder,
        universal=universal, strict=load_module_strict, optimizer=optimizer, module=custom_load_fn is None,
        scheduler=load_lr_scheduler_states and not load_module_only,
    )  # fmt: skip
    typed = nullcontext() if custom_load_fn else deepspeed_errors_typed(folder, engine, optimizer)
    # DeepSpeed loads the kind of checkpoint that is there; the JSON's "load_universal" does not matter.
    with typed, weights_only_below(Path(load_dir)), applied(_universal.to(universal), engine=engine):
        if optimizer:
            _require_size(engine, folder, universal)
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


def _choose(engine: DeepSpeedEngine, root: Path, tag: str | None, damaged: set[Path]) -> str | None:
    """Choose the tag to load, the same on every rank; None without a tag if there is nothing to load.

    Folders that are not whole are added to `damaged`.
    """
    tags = together(lambda: None if tag is None else require_plain_tag(str(tag), "tag"))
    if len(set(tags)) > 1:
        raise RingMismatchError(f"tag: expected the same on all ranks, got {tags} by rank; pass one tag")
    storage = find_storage(engine.local_rank, engine.use_node_local_storage())
    universal = bool(engine.load_universal_checkpoint())
    leads, damage = dist.get_rank() == 0, list[str]()
    proposals = _proposals(root, tags[0], universal, storage)
    for position, name in enumerate(proposals):
        folder = root / name
        _require_seen_by_all(folder, storage)
        if tag is not None:
            together(partial(require_folder, folder))
        together(partial(_require_unchanged, folder))
        faults = _faults_everywhere(folder, storage, universal)
        # The first whole one is taken; older ones are not read.
        if not faults:
            together(lambda: require_weights_only(folder, storage.select_share(files_in(folder))))  # noqa: B023
            left = [tag for tag in unfinished_tags(root) if tag != name] if leads else []
            if left:
                text = "unfinished in %s and not used: %s (no manifest); taking %s"
                log.error(text, root, ", ".join(left), name)
            return name
        damage += [f"checkpoint {name}:", *faults]
        damaged.add(folder.resolve())
        after = proposals[position + 1 : position + 2]
        then = f"trying {after[0]} instead" if after else "and there is no other to try"
        if leads:
            log.error("checkpoint %s is damaged, %s: %s", name, then, "; ".join(faults))
    if damage:
        which = "every checkpoint" if tag is None else "the one asked for"
        raise RingCheckpointError(
            "\n".join([f"expected a whole checkpoint in {root}, got damage in {which}:", *damage])
        )
    return None


def _require_unchanged(folder: Path) -> None:
    if os.path.lexists(folder) and (changes := changes_by_others(folder)):
        raise RingCheckpointError("\n".join([f"{folder} was changed by somebody:", *changes]))


# [Note: one checkpoint for all] Ranks may be given other paths, or another folder under the same path on
# another host. So all ranks look for the file `latest` and the folder, and the digests of their manifests are
# compared: of all ranks, or with node-local storage of the ranks of each host.
def _check_agreed(storage: Storage, check: Callable[[], None]) -> None:
    """Call a check that comes to one result on all ranks of a storage. Collective."""
    if len(storage.ranks) == dist.get_world_size():
        check()
    else:
        together(check)


def _require_seen_by_all(folder: Path, storage: Storage) -> None:
    """Raise RingCheckpointError if some ranks see the folder and others do not. Collective."""
    seen = together(lambda: (str(folder), os.path.lexists(folder)))

    def check() -> None:
        blind = [rank for rank in storage.ranks if not seen[rank][1]]
        if 0 < len(blind) < len(storage.ranks):
            raise RingCheckpointError(
                f"checkpoint {folder.name}: expected every rank to see its folder, got no {seen[blind[0]][0]}"
                f" on {len(blind)} of {len(storage.ranks)}, rank {blind[0]} first; {_SHARE}"
            )

    _check_agreed(storage, check)


_SHARE = (
    'give all ranks one path to one folder, shared between the hosts, or with "checkpoint":'
    ' {"use_node_local_storage": true} a whole checkpoint on every host'
)


def _require_one_checkpoint(storage: Storage, digests: Sequence[tuple[str, str]]) -> None:
    """Raise RingCheckpointError unless the ranks that share a storage have read one manifest.

    `digests` has the digest and the folder of each rank.
    """
    # Other hosts' checkpoints differ in their files where each has its own.
    rank = next((rank for rank in storage.ranks if digests[rank][0] != digests[storage.ranks[0]][0]), None)
    if rank is not None:
        first = storage.ranks[0]
        raise RingCheckpointError(
            f"expected one checkpoint, got {digests[first][1]} and {digests[rank][1]} on {rank}; {_SHARE}"
        )


def _require_loadable(engine: DeepSpeedEngine, folder: Path, **wanted: bool) -> None:
    """Raise RingCheckpointError on every rank for what DeepSpeed cannot load. Collective."""

    def compare() -> None:
        training = read_manifest(folder).training if (folder / MANIFEST).exists() else None
        if training is not None:
            require_loadable(folder, training, engine, **wanted)

    together(compare)


def _require_size(engine: DeepSpeedEngine, folder: Path, universal: bool) -> None:
    """Raise RingCheckpointError for a checkpoint of another number of ranks, or another kind. Collective."""
    stage, world = engine.zero_optimization_stage(), dist.get_world_size()
    if universal:
        stage_saved = max(together(lambda: read_stage(folder)))
        if (stage == 3) != (stage_saved == 3) or stage == 0:
            raise RingCheckpointError(
                f"{folder}: expected a universal checkpoint of ZeRO {stage}, got one of ZeRO {stage_saved}"
            )
    elif stage and (saved := max(together(lambda: count_ranks(folder)))) not in (0, world):
        raise RingCheckpointError(
            f"{folder}: expected a checkpoint of {world} ranks, got one of {saved}; convert it with"
            f" `ds-ring resize-checkpoint {folder.parent} --world-size {world}`"
        )


def _require_latest(root: Path, chosen: str) -> None:
    """Require that `latest` names the tag: DeepSpeed 0.19.8 reads the weights of `latest` for every tag."""
    named = together(lambda: read_latest(root) if dist.get_rank() == 0 else None)[0]
    if named != chosen:
        raise RingCheckpointError(
            f"{root}: ZeRO 3 takes the weights that '{LATEST}' names with load_optimizer_states=False,"
            f" expected that to be {chosen}, got {named}; load the optimizer states, too, or write it there"
        )


def _proposals(root: Path, tag: str | None, universal: bool, storage: Storage) -> list[str]:
    """Return tags in the order in which to try them. Collective."""
    if tag is not None:
        return [tag]
    name = LATEST_UNIVERSAL if universal else LATEST
    named = together(lambda: read_latest(root, name))
    _require_one_latest(root / name, named, storage)
    newest = named[0]
    if newest is None and universal:
        raise RingCheckpointMissingError(f"{root}: expected a file '{name}', got none; pass a tag")
    if universal or newest is None:
        if newest is None and dist.get_rank() == 0:
            sealed = [tag for tag in earlier_tags(root, "") if not tag.startswith(".")]
            hint = f"; whole checkpoints are there: pass tag={sealed[0]!r}" if sealed else ""
            log.warning("no file '%s' in %s, nothing is loaded%s", LATEST, root, hint)
        return [] if newest is None else [newest]
    return together(lambda: [newest, *earlier_tags(root, newest)] if dist.get_rank() == 0 else [])[0]


def _require_one_latest(path: Path, named: Sequence[str | None], storage: Storage) -> None:
    """Raise RingCheckpointError where ranks do not find the same tag in `latest`."""
    # With storage of their own hosts may have been cut short at different tags, but not have none at all.
    compared = named if len(storage.ranks) == len(named) else [tag is None for tag in named]
    odd_rank = next((rank for rank, tag in enumerate(compared) if tag != compared[0]), None)
    if odd_rank is not None:
        got = f"got {named[0] or 'none'} on rank 0 and {named[odd_rank] or 'none'} on rank {odd_rank}"
        raise RingCheckpointError(f"{path}: expected the same tag on all ranks, {got}; {_SHARE}")


def _faults_everywhere(folder: Path, storage: Storage, universal: bool) -> list[str]:
    """Return the faults of a checkpoint on all storages, each fault once. Collective."""
    if universal and not any(together((folder / MANIFEST).exists)):
        if dist.get_rank() == 0:
            log.error("%s is a universal checkpoint without %s: it is loaded unverified", folder, MANIFEST)
        sizes = together(lambda: str([(path, status.st_size) for path, status in walk_entries(folder)]))
        _check_agreed(
            storage, lambda: _require_one_checkpoint(storage, [(text, str(folder)) for text in sizes])
        )
        return []
    everyones = together(
        lambda: (find_faults(folder, storage.select_share), read_digest(folder), str(folder))
    )
    faults = list(dict.fromkeys(fault for rank_faults, *_ in everyones for fault in rank_faults))
    if not faults:
        digests = [(digest, where) for _, digest, where in everyones]
        _check_agreed(storage, lambda: _require_one_checkpoint(storage, digests))
    return faults
