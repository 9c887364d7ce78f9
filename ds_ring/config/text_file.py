"""Read and write small text files: regular ones, of bounded size, in UTF-8. Knows no format.

A pipe, a device or a socket is refused before it is opened: to open a FIFO waits for its writer, and to read
/dev/zero never ends. The paths come from users, the texts from whoever wrote the file.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from ds_ring.config.messages import config_error, sentence

MOST_BYTES = 4 * 2**20
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def read_small(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """Return the text of the file `path`, without a byte order mark.

    Raises:
        RingConfigError: it is no regular file, larger than `most_bytes`, not UTF-8, or cannot be read.
        FileNotFoundError, IsADirectoryError: that; the caller knows what was expected.
    """
    label = _short(path)
    try:
        _require_regular(os.stat(path), label)
        # Whoever swaps a pipe in between makes nobody wait.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with open(handle, "rb") as file:
            _require_regular(os.fstat(handle), label)
            data = file.read(most_bytes + 1)
    except (FileNotFoundError, IsADirectoryError):
        raise
    except (OSError, ValueError) as error:  # no permission, a name that is too long, a NUL in the name
        said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        what = sentence("a file that can be read", said, "give the path of a file")
        raise config_error(label, what) from None
    if len(data) > most_bytes:
        got, most = f"more than {most_bytes:,} bytes", f"a file of at most {most_bytes:,} bytes"
        raise config_error(label, sentence(most, got, "is this the right file?"))
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        got = f"the byte {error.object[error.start]:#04x} at offset {error.start}"
        raise config_error(label, sentence("text in UTF-8", got, "save the file as UTF-8")) from None


def is_file(path: Path) -> bool:
    """Return whether there is a regular file, also where the name is none that a file can have."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


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


def _require_regular(found: os.stat_result, label: str) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError
    if not stat.S_ISREG(found.st_mode):
        got = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise config_error(label, sentence("a regular file", got, "write its contents to a file first"))


def _short(path: Path) -> str:
    text = str(path)
    if not text.isprintable():
        text = repr(text)
    return text if len(text) <= 200 else f"{text[:100]}...{text[-90:]}"
