"""Read a checkpoint's pickled files without running code from them: torch's `weights_only`.

DeepSpeed 0.19.8 loads every file with `weights_only=False`, in its checkpoint engine and, for universal
checkpoints, by itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from numpy._core import multiarray

from ds_ring.checkpoint.manifest import open_regular
from ds_ring.checkpoint.stand_ins import NotAllowed, read_legacy, read_zip
from ds_ring.data.engine import DEEPSPEED
from ds_ring.errors import RingCheckpointError
from ds_ring.patches import applied, patch

# What DeepSpeed's own states hold at ZeRO 0 to 3, measured: nothing of it does more than keep numbers.
_DEEPSPEED = (ZeroStageEnum, fragment_address, LossScaler, DynamicLossScaler)
# Client states hold numpy's random state, or numbers that came out of numpy. Arrays of objects are refused.
_NUMPY: tuple[type[Any], ...] = (np.ndarray, np.dtype, *{type(np.dtype(code)) for code in "?bhilqBHILQefdFD"})
_NUMPY_FUNCTIONS: tuple[tuple[Callable[..., Any], str], ...] = tuple(
    (function, f"{module}.{function.__name__}")
    for function in (multiarray._reconstruct, multiarray.scalar)
    for module in ("numpy._core.multiarray", "numpy.core.multiarray")  # of numpy 2, of numpy 1
)
_MARK = (
    "if it is yours and you trust the file, call torch.serialization.add_safe_globals([...]) with it before"
    " saving and loading, or "
)
_SHOWN_CHARACTERS = 200
_ZIP = b"PK\x03\x04"  # by which torch itself distinguishes its formats
_BEFORE_PYTHON_3_11_4 = "builtins.getattr"  # by which members of an Enum were pickled


def _member(owner: Any, name: str) -> ZeroStageEnum:
    """Stand for getattr in a pickle, where it can only name a stage of ZeRO."""
    if owner is not ZeroStageEnum or name not in ZeroStageEnum.__members__:
        raise UnpicklingError(f"Weights only: GLOBAL {_BEFORE_PYTHON_3_11_4}")
    return ZeroStageEnum[name]


_ALLOWED: list[Any] = [
    *_DEEPSPEED,
    *_NUMPY,
    *_NUMPY_FUNCTIONS,
    (bytes, "builtins.bytes"),
    (_member, _BEFORE_PYTHON_3_11_4),
]


# [Note: weights only] A pickle may call any function while it is read. A manifest does not help, because a
# process that can write a file into the folder can write its manifest. So before any rank passes the folder
# to DeepSpeed, the ranks together read every file into stand-ins ([Note: pickles as stand-ins] in
# stand_ins.py) and then by torch's restricted unpickler, mapped, so that only the pickle is read. While
# DeepSpeed loads, so is each file of the folder that is passed to `torch.load`.
def require_weights_only(folder: Path, paths: Iterable[str]) -> None:
    """Read those of `paths` below `folder` that torch has pickled, without running anything from them.

    Raises:
        RingCheckpointError: a file names a class or function that is none of torch's, DeepSpeed's or numpy's
            ([Note: weights only]), calls one otherwise than these do, or cannot be read.
    """
    for path in (folder / name for name in paths if name.endswith(".pt")):
        require_stand_ins(path)
        try:
            with torch.serialization.safe_globals(_ALLOWED):
                # The older format cannot be mapped: such a file is read as a whole.
                torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))
        except Exception as error:  # unseen by `require_stand_ins`: an integer gradient
            raise RingCheckpointError(_unread(path, error)) from None


def require_stand_ins(path: Path) -> None:
    """Read the pickles of a file of torch.save without calling what they name: [Note: pickles as stand-ins].

    Raises:
        RingCheckpointError: as `require_weights_only`.
    """
    ours = {_get_name(symbol) for symbol in _ALLOWED}
    trusted = {_get_name(symbol) for symbol in torch.serialization.get_safe_globals()} - ours
    with open_regular(path) as file:
        try:
            if file.read(len(_ZIP)) == _ZIP:
                read_zip(file, trusted)
            else:
                read_legacy(file, trusted)
        except NotAllowed as error:
            name = str(error)[:_SHOWN_CHARACTERS]
            name = name if name.isprintable() else repr(name)
            mark = "" if name.startswith(("torch.", "numpy.")) else _MARK
            raise RingCheckpointError(
                f"{path}: expected tensors, numbers, strings and containers of them, got {name}, which"
                f" loading would run; {mark}keep plain values in the client state"
            ) from None
        except Exception as error:  # the parsers of zip files and pickles raise what arbitrary bytes make
            raise RingCheckpointError(_unread(path, error)) from None


def _unread(path: Path, error: Exception) -> str:
    text = str(error).partition("\n")[0][:_SHOWN_CHARACTERS]
    text = text if text.isprintable() else repr(text)
    return f"{path}: expected a file of torch.save, got {type(error).__name__}: {text}"


def _is_zip(path: Path) -> bool:
    with open_regular(path) as file:
        return file.read(len(_ZIP)) == _ZIP


def _get_name(safe_global: Any) -> str:
    """Return the full name by which torch's unpickler finds what was marked as safe."""
    if isinstance(safe_global, tuple):
        return str(safe_global[1])
    return f"{safe_global.__module__}.{safe_global.__qualname__}"


@patch(
    DEEPSPEED.imported("torch"), "load", stage="around_load", feature="checkpoint.weights_only",
    reason="weights_only=True for every file of the checkpoint, whoever calls it",
)  # fmt: skip
def _load_restricted(inside: str, load: Callable[..., Any], f: Any, *args: Any, **options: Any) -> Any:
    if isinstance(f, str | os.PathLike) and Path(os.path.abspath(f)).is_relative_to(inside):
        require_stand_ins(Path(f))
        options["weights_only"] = True
    return load(f, *args, **options)


@contextmanager
def weights_only_below(root: Path) -> Iterator[None]:
    """Restrict `torch.load` to `weights_only=True` for files below `root`, against its caller if need be."""
    restricted = partial(_load_restricted, os.path.abspath(root))
    with torch.serialization.safe_globals(_ALLOWED), applied(restricted):
        yield
