"""Lock a folder of checkpoints for one job, as long as it may save there.

Owns the file `.ds_ring_lock`. The kernel's lock on it (flock) is the claim: that of a job that ended, however
it ended, is gone. What the file says is for the message only. On NFS, Linux makes it a lock of the server's,
which a client that crashed may keep until the server's lease ends (minutes). A file system without locks gets
a warning.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import stat
import time
import weakref
from functools import partial
from pathlib import Path
from typing import Any

from ds_ring.errors import RingCheckpointError
from ds_ring.integrations.checkpoint.manifest import kind_of

__all__ = ["LOCK", "FolderLocks"]

log = logging.getLogger(__name__)
LOCK = ".ds_ring_lock"
_MOST_BYTES = 4096
_NO_LOCKS_HERE = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


# [Note: fencing] A job that is started again may find the lock held by its own attempt before: by a rank
# that is stopped, or whose host is cut off from the launcher. Then the newer attempt puts a new lock file in
# the place of the old one. If the older rank wakes up, it finds that the file is not the one that it has
# locked, before it takes a checkpoint's name as well as before it begins to save, and is refused.
class FolderLocks:
    """Hold the folders that one engine saves in until the engine is gone.

    Args:
        attempt: which run this is (any text of its own) and which attempt of it, from 1; None where no
            launcher starts the job again.
    """

    def __init__(self, attempt: tuple[str, int] | None = None) -> None:
        self._attempt = attempt
        self._held: dict[Path, int] = {}  # descriptors by folder
        weakref.finalize(self, _close_all, self._held)
        # A worker process of a data loader must not keep the claim of a job that has ended.
        os.register_at_fork(after_in_child=partial(_let_go, weakref.ref(self)))

    def claim(self, folder: Path) -> None:
        """Lock `folder` for this process; again by the same process is fine.

        Raises:
            RingCheckpointError: another process holds it. OSError: the lock file cannot be written.
        """
        folder = folder.resolve()
        if folder in self._held and _is_still(self._held[folder], folder / LOCK):
            return
        descriptor = _open(folder / LOCK)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write(descriptor, self._owner())
        except BlockingIOError:
            owner = _read(descriptor)
            os.close(descriptor)
            if not self._is_before(owner):
                _refuse_another(folder, owner)
                return  # another engine of this process holds it; asked again before the next save
            descriptor = self._replace(folder / LOCK)
        except OSError as error:
            if error.errno not in _NO_LOCKS_HERE:
                os.close(descriptor)
                raise OSError(error.errno, error.strerror, str(folder / LOCK)) from None
            log.warning(
                "%s: the file system has no locks (%s): a second job that saves here is not noticed",
                folder,
                error,
            )
        before = self._held.pop(folder, None)
        if before is not None:
            os.close(before)
        self._held[folder] = descriptor

    def require_still(self, folder: Path) -> None:
        """Raise RingCheckpointError if a newer attempt has taken the folder over since it was claimed."""
        folder = folder.resolve()
        held = None if self._attempt is None else self._held.get(folder)
        if held is not None and not _is_still(held, folder / LOCK):
            raise RingCheckpointError(
                f"{folder}: expected this to be the job's newest attempt, got a newer one that saves here"
                " now; this one was taken for lost, and its checkpoint is not used"
            )

    def _owner(self) -> dict[str, Any]:
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        run, attempt = self._attempt or (None, None)
        return _identity() | {"since": since, "run": run, "attempt": attempt}

    def _is_before(self, owner: dict[str, Any]) -> bool:
        """Return whether the owner is an earlier attempt of this run ([Note: fencing])."""
        if self._attempt is None or owner.get("run") != self._attempt[0]:
            return False
        return isinstance(owner.get("attempt"), int) and owner["attempt"] < self._attempt[1]

    def _replace(self, path: Path) -> int:
        """Put a new lock file, locked by this process, in the place of the old one; return its descriptor."""
        new = path.with_name(f"{path.name}.{os.getpid()}")
        new.unlink(missing_ok=True)
        descriptor = _open(new)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _write(descriptor, self._owner())
        os.replace(new, path)
        return descriptor


def _open(path: Path) -> int:
    if os.path.lexists(path) and not stat.S_ISREG(mode := os.lstat(path).st_mode):
        raise RingCheckpointError(
            f"{path}: expected ds_ring's lock, a regular file, got {kind_of(mode)}; remove it"
        )
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)


def _refuse_another(folder: Path, owner: dict[str, Any]) -> None:
    """Raise unless the owner is this very process: host, start of the machine, pid, start of the process."""
    if {key: owner.get(key) for key in _identity()} == _identity():
        return
    who = f"process {owner.get('pid', '?')} on {owner.get('host', 'another host')}"
    raise RingCheckpointError(
        f"{folder}: expected no other job that saves here, got {who}, which has saved since"
        f" {owner.get('since', 'an unknown time')}; end that job, or save into another folder"
    )


def _identity() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "boot": _text(Path("/proc/sys/kernel/random/boot_id")),
        "pid": os.getpid(),
        "started": _text(Path("/proc/self/stat")).rpartition(")")[2].split()[19:20],
    }


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _write(descriptor: int, owner: dict[str, Any]) -> None:
    data = (json.dumps(owner) + "\n").encode()
    os.pwrite(descriptor, data, 0)
    os.ftruncate(descriptor, len(data))


def _read(descriptor: int) -> dict[str, Any]:
    try:
        owner = json.loads(os.pread(descriptor, _MOST_BYTES, 0))
    except (OSError, ValueError, RecursionError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _is_still(descriptor: int, path: Path) -> bool:
    """Return False once somebody has removed the lock file, or the folder, and perhaps made it anew."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except OSError:
        return False


def _close_all(held: dict[Path, int]) -> None:
    while held:
        os.close(held.popitem()[1])


def _let_go(locks: weakref.ref[FolderLocks]) -> None:
    alive = locks()
    if alive is not None:
        _close_all(alive._held)  # this process's copies; the parent keeps its own, and with them the lock
