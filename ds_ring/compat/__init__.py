"""Differences between the versions of other packages, one module for each package.

A module here probes for a feature; no other module compares a version or calls `hasattr` on another package.
This file names packages that are missing, and looks at those that others have imported.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from ds_ring.errors import RingConfigError

# The extra of ds_ring that installs a package; torch and numpy come with ds_ring itself.
EXTRAS = {
    "pydantic": "", "pydantic_core": "",
    "deepspeed": "deepspeed",
    "filelock": "launch", "psutil": "launch", "rich": "launch",
    "shtab": "launch", "tqdm": "launch", "yaml": "launch",
    "transformers": "train", "safetensors": "train",
    "accelerate": "trainers", "trl": "trainers", "peft": "trainers",
    "megatron": "megatron",
    "matplotlib": "plot",
}  # fmt: skip


def make_missing_error(what: str, package: str, extra: str | None = None) -> RingConfigError:
    """Return the error that names a missing package and the command that installs it."""
    extra = EXTRAS.get(package) if extra is None else extra
    command = f"pip install 'ds_ring[{extra}]'" if extra else f"pip install {package.replace('_', '-')}"
    return RingConfigError(f"{what} needs {package}: {command}")


def require(package: str, what: str) -> Any:
    """Import a module of a package that ds_ring does not need by itself.

    Raises:
        RingConfigError: it is not installed; `what` needs it.
    """
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        missing = (error.name or package).partition(".")[0]
        raise make_missing_error(what, missing) from error


def get_imported(module: str, name: str, default: Any = None) -> Any:
    """Return an object of a module that has been imported, else the default; nothing is imported for it."""
    return getattr(sys.modules.get(module), name, default)
