"""The manifest of a checkpoint: which files belong to it, their sizes and sha256. Knows no deepspeed.

Owns the file `ds_ring_manifest.json` in a tag's folder and the order of the checkpoints of a run. Who hashes
what on which rank, and what follows from damage, is checkpoint.py's.

[Note: sealed] The manifest is written last, after every file of every rank, so a folder without one was never
finished: it needs no other mark. It carries a digest of itself: a flipped bit in it is not taken for damage
to the files.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ds_ring.errors import RingCheckpointError
from ds_ring.integrations.atomic_file import write_at_once

MANIFEST = "ds_ring_manifest.json"
LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
NO_TAG = "(unreadable)"  # what a torn `latest` names
_HASHING_THREADS = 4  # hashlib lets other threads run; more would only fight over the disk

_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class FileRecord(_Strict):
    """One file of a checkpoint; `path` is relative to the tag's folder, with forward slashes."""

    path: str
    bytes: Annotated[int, Field(ge=0)]
    sha256: _Sha256


class Manifest(_Strict):
    """All files of a checkpoint.

    Attributes:
        format: 1; another number is another version's.
        global_steps: optimizer steps done, which puts the checkpoints of a run in order.
        saved_unix_seconds: when; tells checkpoints of one step apart.
        files: sorted by path.
        digest: sha256 of everything above.
    """

    format: Annotated[int, Field(ge=1, le=1)] = 1
    global_steps: int
    saved_unix_seconds: float
    files: tuple[FileRecord, ...]
    digest: str = ""

    def digest_of_the_rest(self) -> str:
        return hashlib.sha256(self.model_dump_json(exclude={"digest"}).encode()).hexdigest()


def record_file(folder: Path, path: str) -> FileRecord:
    """Size and sha256 of a file just written, which is brought to the disk on the way. May raise OSError."""
    with open(folder / path, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
        return FileRecord(path=path, bytes=os.fstat(file.fileno()).st_size, sha256=sha256)


def record_files(folder: Path, paths: Iterable[str]) -> list[FileRecord]:
    """`record_file` of several, in their order."""
    with ThreadPoolExecutor(_HASHING_THREADS) as threads:
        return list(threads.map(lambda path: record_file(folder, path), paths))


def files_in(folder: Path) -> Iterator[str]:
    """Relative paths of all files below `folder`, the manifest and its unfinished copies left out."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith((MANIFEST, f".{MANIFEST}")):
            yield path.relative_to(folder).as_posix()


def write_manifest(folder: Path, files: Iterable[FileRecord], global_steps: int) -> Manifest:
    """Seal the checkpoint in `folder` ([Note: sealed])."""
    files = tuple(sorted(files, key=lambda record: record.path))
    manifest = Manifest(global_steps=global_steps, saved_unix_seconds=time.time(), files=files)
    manifest = manifest.model_copy(update={"digest": manifest.digest_of_the_rest()})
    write_at_once(folder / MANIFEST, manifest.model_dump_json(indent=1) + "\n")
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """The manifest in `folder`; RingCheckpointError where there is none to trust."""
    if not folder.is_dir():
        raise RingCheckpointError(f"{folder}: expected the folder of a checkpoint, got none; check the tag")
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise RingCheckpointError(
            f"{folder}: expected {MANIFEST}, got none: saving was cut short, or the checkpoint was not"
            " written through ds_ring; if you know it to be whole, seal it with"
            f" `ds-ring verify-checkpoint {folder.parent} --tag {folder.name} --accept`"
        ) from None
    except (OSError, ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise RingCheckpointError(f"{folder / MANIFEST}: damaged, cannot be read: {reason}") from None
    if manifest.digest != manifest.digest_of_the_rest():
        raise RingCheckpointError(f"{folder / MANIFEST}: damaged, its own digest does not match")
    return manifest


def faults_of(folder: Path, share: int = 0, shares: int = 1) -> list[str]:
    """What is wrong with the checkpoint in `folder`: one sentence for each fault, with expected and got.

    Every caller looks at all sizes; hashes are divided: share `share` of `shares` reads its part of them.
    """
    try:
        manifest = read_manifest(folder)
    except RingCheckpointError as error:
        return [str(error)]
    wrong_sizes = [text for record in manifest.files if (text := _fault_of_size(folder, record))]
    if wrong_sizes:
        return wrong_sizes  # no need to read gigabytes any more
    by_size = sorted(manifest.files, key=lambda record: -record.bytes)
    with ThreadPoolExecutor(_HASHING_THREADS) as threads:
        found = threads.map(lambda record: _fault_of_content(folder, record), by_size[share::shares])
    return [text for text in found if text]


def verify_checkpoint(directory: str | os.PathLike[str], tag: str | None = None) -> Manifest:
    """Read a whole checkpoint and compare it with its manifest, in this process alone.

    Args:
        directory: what `save_checkpoint` was given.
        tag: which checkpoint; None for the one that `latest` names.

    Raises:
        RingCheckpointError: it is not whole; the message names each file, what was expected and was got.
    """
    root = Path(directory)
    tag = read_latest(root) if tag is None else tag
    if tag is None:
        raise RingCheckpointError(f"{root}: expected a file '{LATEST}', got none; pass a tag")
    faults = faults_of(root / tag)
    if faults:
        raise RingCheckpointError("\n".join([f"checkpoint {tag} in {root} is damaged:", *faults]))
    return read_manifest(root / tag)


def accept_checkpoint(directory: str | os.PathLike[str], tag: str) -> Manifest:
    """Seal a checkpoint that was written without a manifest, as it is now; its user knows that it is whole.

    Its place in the order of checkpoints follows from the number at the end of the tag (global_step120).

    Raises:
        RingCheckpointError: there is no such checkpoint, or it has a manifest.
    """
    folder = Path(directory, tag)
    files = list(files_in(folder)) if folder.is_dir() else []
    if not files:
        raise RingCheckpointError(f"{folder}: expected the folder of a checkpoint, got none; check the tag")
    if (folder / MANIFEST).exists():
        raise RingCheckpointError(f"{folder}: expected no {MANIFEST} yet, got one; it says what was saved")
    number = re.search(r"\d+$", tag)
    return write_manifest(folder, record_files(folder, files), int(number.group()) if number else -1)


def read_latest(root: Path, name: str = LATEST) -> str | None:
    """The tag that the file `name` in `root` holds, NO_TAG if that is no text; None without that file."""
    try:
        tag = (root / name).read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None
    return tag if tag.isprintable() and tag else NO_TAG


def earlier_tags(root: Path, tag: str) -> list[str]:
    """Tags of sealed checkpoints older than `tag`, newest first; all others where `tag` tells no age."""
    ages = {folder.name: age for folder in _folders(root) if (age := _age(folder)) is not None}
    limit = ages.pop(tag, None)
    kept = [name for name in ages if limit is None or ages[name] < limit]
    return sorted(kept, key=ages.__getitem__, reverse=True)


def unfinished_tags(root: Path) -> list[str]:
    """Folders that hold a checkpoint's files and no manifest. Universal checkpoints have none either."""
    return [
        folder.name
        for folder in _folders(root)
        if not (folder / MANIFEST).exists() and not (folder / "zero").is_dir() and any(folder.glob("*.pt"))
    ]


def _folders(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []


def _age(folder: Path) -> tuple[int, float] | None:
    try:
        manifest = read_manifest(folder)
    except RingCheckpointError:
        return None
    return manifest.global_steps, manifest.saved_unix_seconds


def _fault_of_size(folder: Path, record: FileRecord) -> str:
    try:
        size = (folder / record.path).stat().st_size
    except OSError as error:
        return f"{folder / record.path}: expected {record.bytes} bytes, got no file ({error.strerror})"
    if size == record.bytes:
        return ""
    how = "truncated" if size < record.bytes else "too long"
    return f"{folder / record.path}: expected {record.bytes} bytes, got {size}: {how}"


def _fault_of_content(folder: Path, record: FileRecord) -> str:
    try:
        with open(folder / record.path, "rb") as file:
            got = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"{folder / record.path}: expected to read {record.bytes} bytes, got {error.strerror}"
    if got == record.sha256:
        return ""
    return f"{folder / record.path}: expected sha256 {record.sha256}, got {got}: its contents changed"
