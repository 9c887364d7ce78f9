"""Write small files at once.

A file is written under another name and renamed (`replaced`): a reader sees the old contents or the new ones.
`write_at_once` also keeps one of them through a crash of the machine; `replace_text` is cheaper and does not.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def write_at_once(path: Path, text: str) -> None:
    """Write a small file so that after any crash all of the old text or all of the new one is there."""
    with replaced(path, lasting=True) as file:
        file.write(text.encode())
    sync_folder(path.parent)


def replace_text(path: Path, text: str) -> None:
    """Replace a small file at once: a reader sees the old text or the new one.

    For figures and pages that are renewed: after a crash of the machine both texts may be lost. What must not
    be lost is written by `write_at_once`.

    Raises:
        OSError: it cannot be written; the old file stays.
    """
    with replaced(path) as file:
        file.write(text.encode())


# [Note: planted links] Somebody who may write into a folder can put a link there under a name that ds_ring
# will write to, and let it change a file elsewhere. So a new file gets a random name that must not exist yet,
# and is then renamed: a link of the final name is replaced and not followed. Modes follow the umask.
@contextmanager
def replaced(path: Path, lasting: bool = False) -> Iterator[BinaryIO]:
    """Yield a new file for bytes, which takes the place of `path` when the block has ended without an error.

    With `lasting` its contents are on the disk before that.

    Raises:
        OSError: it cannot be written; what had the name before stays.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with open(handle, "wb") as file:
            yield file
            if lasting:
                file.flush()
                os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def append_text(path: Path, text: str) -> None:
    """Append to a regular file, which is made where there is none; a link is not followed.

    Raises:
        OSError: it cannot be written, or is something else.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(path, flags, 0o666), "ab") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "expected a regular file", str(path))
        file.write(text.encode())


def sync_folder(folder: Path) -> None:
    """Write the names in `folder` to the disk: a rename is lost with the power otherwise."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
