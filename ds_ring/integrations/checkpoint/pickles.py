"""Read a checkpoint's pickled files without running code from them: torch's `weights_only`.

DeepSpeed 0.19.8 loads every file with `weights_only=False`, in its checkpoint engine and, for universal
checkpoints, by itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from types import SimpleNamespace
from typing import Any
from zipfile import is_zipfile

import numpy as np
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from numpy._core import multiarray

from ds_ring.errors import RingCheckpointError
from ds_ring.integrations.checkpoint.manifest import open_regular
from ds_ring.integrations.deepspeed.engine import DEEPSPEED

# What DeepSpeed's own states hold at ZeRO 0 to 3, measured: nothing of it does more than keep numbers.
_DEEPSPEED = (ZeroStageEnum, fragment_address, LossScaler, DynamicLossScaler)
# Client states hold numpy's random state, or numbers that came out of numpy. Arrays of objects are refused.
_NUMPY: tuple[type[Any], ...] = (np.ndarray, np.dtype, *{type(np.dtype(code)) for code in "?bhilqBHILQefdFD"})
_NUMPY_FUNCTIONS: tuple[tuple[Callable[..., Any], str], ...] = tuple(
    (function, f"{module}.{function.__name__}")
    for function in (multiarray._reconstruct, multiarray.scalar)
    for module in ("numpy._core.multiarray", "numpy.core.multiarray")  # of numpy 2, of numpy 1
)
_BEFORE_PYTHON_3_11_4 = "builtins.getattr"  # by which members of an Enum were pickled


def _member(owner: Any, name: str) -> ZeroStageEnum:
    """Stand for getattr in a pickle, where it can only name a stage of ZeRO."""
    if owner is not ZeroStageEnum or name not in ZeroStageEnum.__members__:
        raise UnpicklingError(f"Weights only: GLOBAL {_BEFORE_PYTHON_3_11_4}")
    return ZeroStageEnum[name]


_ALLOWED: list[Any] = [*_DEEPSPEED, *_NUMPY, *_NUMPY_FUNCTIONS, (_member, _BEFORE_PYTHON_3_11_4)]


# [Note: weights only] A pickle may call any function while it is read. A manifest does not help, because
# whoever can write a file into the folder can write its manifest. So before any rank hands the folder to
# DeepSpeed, the ranks together read every file by torch's restricted unpickler, mapped, so that only the
# pickle is read. While DeepSpeed loads, `torch.load` is restricted for all files of the folder, whoever calls
# it.
def require_weights_only(folder: Path, paths: Iterable[str]) -> None:
    """Read those of `paths` below `folder` that torch has pickled, without running anything from them.

    Raises:
        RingCheckpointError: a file names a class or function that is none of torch's, DeepSpeed's or numpy's
            ([Note: weights only]), or cannot be read.
    """
    for path in (folder / name for name in paths if name.endswith(".pt")):
        open_regular(path).close()
        try:
            with torch.serialization.safe_globals(_ALLOWED):
                # The older format cannot be mapped: such a file is read as a whole.
                torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
        except Exception as error:  # the unpickler meets arbitrary bytes, and raises what they make
            text = str(error)
            named = re.search(r"(?:GLOBAL|got <class|type) '?([\w.]+)", text)
            if "eights" not in text or named is None:  # "Weights only load failed", "WeightsUnpickler error"
                first_line = text.partition("\n")[0][:200]
                raise RingCheckpointError(
                    f"{path}: expected a file of torch.save, got {type(error).__name__}: {first_line}"
                ) from None
            raise RingCheckpointError(
                f"{path}: expected tensors, numbers, strings and containers of them, got {named.group(1)},"
                " which loading would run; if it is yours and you trust the file, call"
                " torch.serialization.add_safe_globals([...]) with it before saving and loading, or keep"
                " plain values in the client state"
            ) from None


@contextmanager
def weights_only_below(root: Path) -> Iterator[None]:
    """Restrict `torch.load` to `weights_only=True` for files below `root`, whatever its caller says."""
    inside = os.path.abspath(root)

    def restricted(load: Callable[..., Any], f: Any, *args: Any, **options: Any) -> Any:
        if isinstance(f, str | os.PathLike) and Path(os.path.abspath(f)).is_relative_to(inside):
            options["weights_only"] = True
        return load(f, *args, **options)

    load = {"checkpoint.weights_only": SimpleNamespace(around_load=restricted)}
    with torch.serialization.safe_globals(_ALLOWED), DEEPSPEED.applied(load):
        yield
