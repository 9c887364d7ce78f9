"""Versions of other packages that nobody has tried: a line in the log, not a refusal."""

from __future__ import annotations

import functools
import logging
import re
import sys
from importlib.metadata import PackageNotFoundError, version

log = logging.getLogger(__name__)

# The highest versions that `python tools/version_matrix.py` was run with (tools/results/versions.md).
HIGHEST = {
    "torch": "2.15", "deepspeed": "0.19", "transformers": "5.24", "accelerate": "1.15", "trl": "1.16",
    "peft": "0.21",
}  # fmt: skip


def list_untried() -> list[str]:
    """Return the packages that have been imported in a later minor version than was tried."""
    untried = []
    for package in HIGHEST.keys() & sys.modules.keys():
        try:
            installed = version(package)
        except PackageNotFoundError:  # a folder on the path
            continue
        if _minor(installed) > _minor(HIGHEST[package]):
            untried.append(f"{package} {installed} (tried: up to {HIGHEST[package]})")
    return sorted(untried)


@functools.lru_cache(maxsize=1)  # once a process
def note_untried() -> None:
    """Log the packages whose versions nobody has tried."""
    if untried := list_untried():
        log.warning(
            "not tried with this ds_ring: %s; `ds-ring check-model` compares your model with one process",
            ", ".join(untried),
        )


def _minor(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)[:2]]
