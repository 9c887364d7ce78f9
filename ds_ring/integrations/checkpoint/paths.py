"""Check the names and files that a checkpoint may consist of: plain tags and regular files.

Owns the walk over a checkpoint's folder and the opening of its files. A folder of checkpoints may be shared
with others: a symbolic link would lead out of it, a FIFO would be waited for and a device read without end.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from ds_ring.errors import RingCheckpointError

_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
    stat.S_IFREG: "a regular file",
}
_MOST_NAME_BYTES = 255  # of one file name, on every usual file system


def kind_of(mode: int) -> str:
    """Return what a file's mode says it is, in words."""
    return _KINDS.get(stat.S_IFMT(mode), "something else")


def is_plain_name(name: str) -> bool:
    """Return whether `name` is that of one visible file in the folder where it stands."""
    return (
        bool(name)
        and not name.startswith(".")
        and "/" not in name
        and name.isprintable()
        and len(name.encode(errors="replace")) <= _MOST_NAME_BYTES
    )


def is_plain_path(path: str) -> bool:
    """Return whether `path` has forward slashes only and stays below the folder that it starts from."""
    return path.isprintable() and all(part not in ("", ".", "..") for part in path.split("/"))


def require_plain_tag(tag: str, whence: str) -> str:
    """Return `tag`, or raise RingCheckpointError that names it and where it comes from."""
    if not is_plain_name(tag):
        raise RingCheckpointError(
            f"{whence}: expected the plain name of a checkpoint's folder, got {_shortened(tag)}; a tag has no"
            " slash, no dot in front and at most 255 bytes"
        )
    return tag


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading; nothing else is opened, no link followed, nothing waited for.

    Raises:
        RingCheckpointError: it is something else. OSError: it cannot be opened.
    """
    _require_regular(path, os.lstat(path).st_mode)
    # Between the two calls another program could put something else there: neither flag waits or follows.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _require_regular(path, os.fstat(descriptor).st_mode)
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_small(path: Path, most_bytes: int) -> bytes:
    """Return a small regular file's bytes."""
    with open_regular(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise RingCheckpointError(f"{path}: expected at most {most_bytes} bytes, got more")
    return data


def entries_of(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the path and the status of everything below `folder` but folders; no link is followed."""
    todo = [""]
    while todo:
        inside = todo.pop()
        with os.scandir(folder / inside) as found:
            for entry in sorted(found, key=lambda entry: entry.name):
                path = f"{inside}/{entry.name}" if inside else entry.name
                if entry.is_dir(follow_symlinks=False):
                    todo.append(path)
                else:
                    yield path, entry.stat(follow_symlinks=False)


def is_folder(path: Path) -> bool:
    """Return whether `path` is a folder by itself, not through a link."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def _require_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise RingCheckpointError(
            f"{path}: expected a regular file, got {kind_of(mode)}; put the file itself there, or remove it"
        )


def _shortened(text: str) -> str:
    return repr(text) if len(text) <= 80 else f"{text[:60]!r}... of {len(text)} characters"
