"""Lock a folder of checkpoints for one job, as long as it may save there.

The lock is `filelock`'s on `.ds_ring_lock`, which is the kernel's (flock): that of a job that ended, however
it ended, is gone. On NFS, Linux makes it a lock of the server's, which a client that crashed may keep until
the server's lease ends (minutes). A file system without locks gets a warning. `.ds_ring_lock.json` says who
has it.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ds_ring.errors import RingCheckpointError
from ds_ring.integrations.checkpoint.manifest import read_small
from ds_ring.replaced_file import replace_text

log = logging.getLogger(__name__)
LOCK, OWNER = ".ds_ring_lock", ".ds_ring_lock.json"
_MOST_BYTES = 4096
_NO_LOCKS_HERE = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
_TOKEN = secrets.token_hex(8)  # with the pid: this process, on whatever host and after whatever restart


# [Note: fencing] A job that is started again may find the lock held by its own earlier attempt: by a rank
# that is stopped, or whose host is cut off from the launcher. Then the newer attempt removes the lock file,
# locks a new one, and names itself in the owner's file. If the older rank wakes up, it finds another owner,
# before it takes a checkpoint's name as well as before it begins to save, and is refused.
class FolderLocks:
    """Hold the folders that one engine saves in until the engine is gone.

    Args:
        attempt: the name of the run (any text) and which attempt of it this is, from 1; None where no
            launcher starts the job again.
    """

    def __init__(self, attempt: tuple[str, int] | None = None) -> None:
        self._attempt = attempt
        self._locks: dict[Path, FileLock] = {}  # by folder

    def claim(self, folder: Path) -> None:
        """Lock `folder` for this process; again by the same process is fine.

        Raises:
            RingCheckpointError: another process holds it. OSError: the lock file cannot be written.
        """
        folder = folder.resolve()
        # A singleton: engines of one process share the lock, and a forked child (a data loader's worker) has
        # none of it.
        lock = FileLock(
            folder / LOCK, blocking=False, is_singleton=True, thread_local=False, fallback_to_soft=False
        )
        if (folder in self._locks or lock.is_locked) and self._is_ours(folder):
            self._locks[folder] = lock
            return
        lock.release(force=True)  # of a folder that was removed, or that a newer attempt has taken over
        try:
            try:
                lock.acquire()
            except Timeout:
                self._require_older(folder)
                (folder / LOCK).unlink(missing_ok=True)
                lock.acquire()
        except OSError as error:
            if error.errno not in _NO_LOCKS_HERE:
                raise OSError(error.errno, error.strerror, str(folder / LOCK)) from None
            log.warning("%s has no locks (%s): a second job that saves here is not noticed", folder, error)
        run, attempt = self._attempt or (None, None)
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "token": _TOKEN}
        owner |= {"since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "run": run, "attempt": attempt}
        replace_text(folder / OWNER, json.dumps(owner) + "\n")
        self._locks[folder] = lock

    def require_still(self, folder: Path) -> None:
        """Raise RingCheckpointError if a newer attempt has taken the folder over since it was claimed."""
        folder = folder.resolve()
        if self._attempt is not None and folder in self._locks and not self._is_ours(folder):
            raise RingCheckpointError(
                f"{folder}: expected this to be the job's newest attempt, got a newer one that saves here"
                " now; this one was taken for lost, and its checkpoint is not used"
            )

    def _is_ours(self, folder: Path) -> bool:
        owner = _owner_of(folder)
        return (owner.get("pid"), owner.get("token")) == (os.getpid(), _TOKEN) and (folder / LOCK).exists()

    def _require_older(self, folder: Path) -> None:
        """Raise RingCheckpointError unless the owner is an earlier attempt of this run ([Note: fencing])."""
        owner = _owner_of(folder)
        run, attempt = self._attempt or (None, 0)
        if run is not None and owner.get("run") == run and owner["attempt"] < attempt:
            return
        who = f"process {owner.get('pid', '?')} on {owner.get('host', 'another host')}"
        raise RingCheckpointError(
            f"{folder}: expected no other job that saves here, got {who}, which has saved since"
            f" {owner.get('since', 'an unknown time')}; end that job, or save into another folder"
        )


def _owner_of(folder: Path) -> dict[str, Any]:
    """Return what the owner's file says; nothing where it cannot be read."""
    try:
        owner = json.loads(read_small(folder / OWNER, _MOST_BYTES))
    except (OSError, ValueError, RecursionError, RingCheckpointError):
        return {}
    return owner if isinstance(owner, dict) else {}
