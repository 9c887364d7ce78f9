"""Record and compare size and sha256 of one file of a checkpoint.

Owns the hashing. Which files belong to a checkpoint is manifest.py's.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from ds_ring.errors import RingCheckpointError
from ds_ring.integrations.checkpoint.paths import open_regular

HASHING_THREADS = 4  # hashlib lets other threads run; more would only fight over the disk

_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Strict(BaseModel):
    """Take nothing unknown from a file and convert nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class FileRecord(Strict):
    """Describe one file of a checkpoint; `path` is relative to the tag's folder, with forward slashes."""

    # A path that leads out of the folder is refused where the manifest is used (`strangers_in`): whoever
    # wrote it may have written a digest that fits.

    path: str
    bytes: Annotated[int, Field(ge=0)]
    sha256: _Sha256


def record_file(folder: Path, path: str) -> FileRecord:
    """Return size and sha256 of a file just written, which is brought to the disk on the way. May raise
    OSError.
    """
    with open_regular(folder / path) as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
        return FileRecord(path=path, bytes=os.fstat(file.fileno()).st_size, sha256=sha256)


def record_files(folder: Path, paths: Iterable[str]) -> list[FileRecord]:
    """Return `record_file` of several, in their order."""
    with ThreadPoolExecutor(HASHING_THREADS) as threads:
        return list(threads.map(lambda path: record_file(folder, path), paths))


def fault_of_size(folder: Path, record: FileRecord, size: int | None) -> str:
    """Return what is wrong with a size; None stands for no file, "" for nothing wrong."""
    if size is None:
        return f"{folder / record.path}: expected {record.bytes} bytes, got no file"
    if size == record.bytes:
        return ""
    how = "truncated" if size < record.bytes else "too long"
    return f"{folder / record.path}: expected {record.bytes} bytes, got {size}: {how}"


def fault_of_content(folder: Path, record: FileRecord) -> str:
    """Return what is wrong with a file of the right size, read as a whole; "" for nothing."""
    try:
        with open_regular(folder / record.path) as file:
            got = hashlib.file_digest(file, "sha256").hexdigest()
    except RingCheckpointError as error:
        return str(error)
    except OSError as error:
        return f"{folder / record.path}: expected to read {record.bytes} bytes, got {error.strerror}"
    if got == record.sha256:
        return ""
    return f"{folder / record.path}: expected sha256 {record.sha256}, got {got}: its contents changed"
