"""Write small files that are there as a whole or not at all, whatever happens meanwhile."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_at_once(path: Path, text: str) -> None:
    """Write a small file so that after any crash all of the old text or all of the new one is there."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)  # mkstemp's file is its owner's only
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Write the names in `folder` to the disk: a rename is lost with the power otherwise."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
