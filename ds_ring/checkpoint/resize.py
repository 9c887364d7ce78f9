"""Convert a checkpoint to DeepSpeed's universal form, which any number of ranks can load, with a manifest.

The universal checkpoint is written next to its source, and becomes `latest`. DeepSpeed 0.19.8 converts ZeRO
1, 2 and 3.

[Note: a folder is loaded by its kind]
A folder is loaded as the kind of checkpoint that it has; the JSON's "load_universal" does not matter.
Otherwise a job that is started again would load the conversion, and not a checkpoint that it saved since.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint import ds_to_universal

from ds_ring.checkpoint.manifest import (
    LATEST,
    LATEST_UNIVERSAL,
    Attempt,
    FolderLocks,
    files_in,
    is_universal,
    record_files,
    tag_in,
    verify_checkpoint,
    write_manifest,
)
from ds_ring.checkpoint.pickles import require_weights_only, weights_only_below
from ds_ring.checkpoint.save import give_its_name
from ds_ring.errors import RingCheckpointError, RingError
from ds_ring.written_files import write_at_once

log = logging.getLogger(__name__)

SUFFIX = "-universal"
_ADAM = {"exp_avg", "exp_avg_sq"}  # of the universal form, besides the weights and the step


def count_ranks(folder: Path) -> int:
    """Return how many ranks saved the optimizer states in `folder`; 0 if there are none (ZeRO 0)."""
    name = re.compile(r"zero_pp_rank_(\d+)_mp_rank_\d+_optim_states\.pt$")
    matches = (name.search(path) for path in files_in(folder))
    return max((int(match.group(1)) + 1 for match in matches if match), default=0)


def read_stage(folder: Path) -> int:
    """Return the ZeRO stage that the universal checkpoint in `folder` was made from.

    Raises:
        RingCheckpointError: it has none of DeepSpeed's states.
    """
    with _typed_errors(folder):
        state = torch.load(folder / "zero" / "optimizer_state.pt", map_location="cpu", mmap=True)
        return int(state.get("zero_stage", state.get("optimizer_state_dict", {}).get("zero_stage", 0)))


@contextlib.contextmanager
def _typed_errors(folder: Path) -> Iterator[None]:
    """Make a RingCheckpointError of what states that are none of DeepSpeed's raise where they are read."""
    try:
        yield
    except RingError:
        raise
    except Exception as error:
        raise RingCheckpointError(
            f"{folder}: expected DeepSpeed's states, got {type(error).__name__}: {error!s:.200}"
        ) from None


def resize_checkpoint(
    directory: str | os.PathLike[str],
    tag: str | None = None,
    workers: int = 1,
    attempt: Attempt | None = None,
) -> str:
    """Convert a checkpoint for any number of ranks; return the new tag, `latest` from now on.

    The checkpoint that it is made from is verified first and stays as it is. However the conversion is cut
    short, `latest` names a whole checkpoint. Needs memory for the largest parameter and disk space for twice
    the optimizer's states.

    Args:
        directory: what `save_checkpoint` was given.
        tag: which checkpoint; None for the one that `latest` names.
        workers: processes that convert.
        attempt: that of `FolderLocks`, where a launcher converts for the next attempt of a run.

    Raises:
        RingCheckpointMissingError: there is no such checkpoint.
        RingCheckpointError: it is not whole, needs no conversion (ZeRO 0, or universal already), DeepSpeed
            cannot convert it (another optimizer than Adam's kind, frozen weights or groups of parameters with
            settings of their own at ZeRO 3), another job saves in `directory`, or a file cannot be written.
    """
    root = Path(directory)
    tag = tag_in(root, tag)
    folder, manifest = root / tag, verify_checkpoint(root, tag)
    universal = is_universal(folder)
    if universal or not count_ranks(folder):
        kind = "a universal one" if universal else "one without ZeRO's optimizer states (ZeRO 0)"
        raise RingCheckpointError.wrong(
            f"{folder}", "one of ZeRO 1, 2 or 3", kind, "any number of ranks loads it"
        )
    require_weights_only(folder, files_in(folder))
    new, work = tag + SUFFIX, root / f".{tag}.resizing"
    try:
        FolderLocks(attempt).claim(root)
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        with weights_only_below(root):
            with _typed_errors(folder):
                _require_convertible(folder)
            _convert(folder, work / new, workers)
        files = record_files(work / new, files_in(work / new))
        write_manifest(work / new, files, manifest.global_steps, manifest.training)
        give_its_name(work / new, root / new)
        write_at_once(root / LATEST_UNIVERSAL, new)
        write_at_once(root / LATEST, new)
    except OSError as error:
        raise RingCheckpointError(f"{error.filename or root}: cannot be written: {error.strerror}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return new


def count_step_samples(directory: str | os.PathLike[str], tag: str | None = None) -> int:
    """Return the samples of an optimizer step by the JSON of a checkpoint: of all replicas together.

    Raises:
        RingCheckpointMissingError, RingCheckpointError: there is no such checkpoint, or it is not whole.
    """
    root = Path(directory)
    folder = root / tag_in(root, tag)
    verify_checkpoint(root, folder.name)
    require_weights_only(folder, files_in(folder))
    with weights_only_below(root), _typed_errors(folder):
        state = _load_one(folder, "model_states.pt")
        config, ranks = state["ds_config"], max(count_ranks(folder), int(state["dp_world_size"]))
        if "train_batch_size" in config:
            return int(config["train_batch_size"])
        micro = int(config["train_micro_batch_size_per_gpu"])
        micro *= int(config.get("gradient_accumulation_steps", 1))
        return micro * ranks // int(config.get("sequence_parallel_size", 1))


def _require_convertible(folder: Path) -> None:
    """Raise RingCheckpointError for what DeepSpeed would convert to something else without a word."""
    optimizer = _load_one(folder, "optim_states.pt")["optimizer_state_dict"]
    stage3 = int(optimizer["zero_stage"]) == 3
    states = optimizer["optimizer_state_dict" if stage3 else "base_optimizer_state"]
    per_parameter = [set(state) - {"step"} for state in states["state"].values()]
    if any(names != _ADAM for names in per_parameter):
        got = sorted(set().union(*per_parameter)) or "none"
        raise RingCheckpointError(
            f"{folder}: expected an optimizer with the states {sorted(_ADAM)}, got {got}"
        )
    if not stage3:
        return
    groups = [
        {key: value for key, value in group.items() if key != "params"} for group in states["param_groups"]
    ]
    if any(group != groups[0] for group in groups):
        raise RingCheckpointError(
            f"{folder}: expected equal groups at ZeRO 3, got {len(groups)} different ones; use ZeRO 2"
        )
    if _load_one(folder, "model_states.pt").get("frozen_param_shapes"):
        raise RingCheckpointError.wrong(f"{folder}", "no frozen weights at ZeRO 3", "some", "use ZeRO 2")


def _load_one(folder: Path, ending: str) -> dict[str, Any]:
    path = folder / sorted(name for name in files_in(folder) if name.endswith(ending))[0]
    loaded: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True)
    return loaded


def _convert(source: Path, target: Path, workers: int) -> None:
    """Run DeepSpeed's converter; log its output if it fails."""
    options = argparse.Namespace(
        input_folder=str(source), output_folder=str(target), num_extract_workers=workers,
        num_merge_workers=workers, keep_temp_folder=False, strict=True, inject_missing_state=True,
    )  # fmt: skip
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            ds_to_universal.main(options)
    except OSError:
        raise
    except Exception as error:  # its assertions, and errors of any type for an unknown file
        log.error("DeepSpeed's converter printed:\n%s", printed.getvalue())
        raise RingCheckpointError(
            f"{source}: DeepSpeed cannot convert: {type(error).__name__}: {error}"
        ) from error
