"""Hold the folder of a run for one launcher, as long as it lives; a second launch of the run is refused.

Two files of the run's folder (`ssh: false`: one of each for every host, as each has a launcher of its own):

    .launcher.lock      locked by the kernel (flock), which gives it up however the launcher ends
    launcher.json       {"at", "since", "host", "pid", "processes", "started", "token", "ended"} of the
                        launcher, renewed every BEAT_SECONDS; `ended` once it has left in order

[Note: one launcher]
A lock that is held ends the second launch at once. One that is free means that no launcher of this kernel
lives, and of no other host either where the file system keeps locks for all of them, as NFS does. Some keep
them for each host (Lustre with `localflock`), some keep none. So where launcher.json is another kernel's, or
that of a container whose processes are not seen here, its beat decides: one that is older than STALE_BEATS by
the clock of the file system is a dead launcher's, and a younger one is watched until it moves. No clocks of
two hosts are compared. Where there are no locks at all, process id and start time tell a dead launcher here.
"""

from __future__ import annotations

import errno
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from ds_ring.errors import RingConfigError
from ds_ring.health.joining import presence

from .process import say
from .run_folder import launcher_file, make_folder, write_json
from .run_records import LauncherRecord, read_record

BEAT_SECONDS = 5.0
STALE_BEATS = 3
_OWNER_SECONDS = 2.0  # a launcher that has just got the lock writes its name a moment later
_LOOK_SECONDS = 0.2
_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class RunInUseError(RingConfigError):
    """Another launcher holds the folder of the run; the message has its number and host."""


@contextmanager
def run_held(run: Path, node_rank: int = 0) -> Iterator[str]:
    """Hold the run's folder inside the block; yield the launcher's token, which no other launcher has.

    Args:
        run: `run_folder` of the cluster YAML; made where it is not there.
        node_rank: which host this is, where each has a launcher of its own; else 0.

    Raises:
        RunInUseError: another launcher holds it.
        RingConfigError: the folder cannot be made or written to.
    """
    make_folder(run)
    path, lock_path = launcher_file(run, node_rank), run / f".{launcher_file(run, node_rank).stem}.lock"
    lock = FileLock(lock_path, blocking=False, thread_local=False, fallback_to_soft=False)
    try:
        locks_work = _acquire(lock, path)
        _require_dead(path, lock_path, locks_work)
        beat = _Beat(path)
        beat.start()
        try:
            yield beat.token
        finally:
            beat.end()
    finally:
        lock.release(force=True)


def _acquire(lock: FileLock, path: Path) -> bool:
    """Lock the file; return False where the file system has no locks."""
    try:
        lock.acquire()
    except Timeout:
        raise _in_use(path, _owner_in_time(path)) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS_HERE:
            raise RingConfigError.wrong(
                "run_folder", "a folder to write to", f"{lock.lock_file}: {error.strerror}", "use another"
            ) from None
        say(f"{path.parent} has no locks ({error.strerror}): only its {path.name} keeps a second launch away")
        return False
    return True


def _owner_in_time(path: Path) -> LauncherRecord | None:
    """Return launcher.json's record of the launcher that holds the lock, once it is written."""
    deadline = time.monotonic() + _OWNER_SECONDS
    while True:
        owner = read_record(path, LauncherRecord)
        if (
            owner is not None and not owner.ended and is_alive_here(owner) is not False
        ) or time.monotonic() > deadline:
            return owner
        time.sleep(_LOOK_SECONDS / 4)


def _require_dead(path: Path, lock_path: Path, locks_work: bool) -> None:
    """Raise RunInUseError if launcher.json is of a launcher that lives ([Note: one launcher])."""
    owner = read_record(path, LauncherRecord)
    if owner is None or owner.ended:
        return
    if owner.processes == presence().processes:
        if not locks_work and is_alive_here(owner):
            raise _in_use(path, owner)
        return
    seen = _read_beat(path)
    with suppress(OSError):
        lock_path.touch()  # the file system's own time, now
        if lock_path.stat().st_mtime - seen[0] > STALE_BEATS * BEAT_SECONDS:
            return
    deadline = time.monotonic() + STALE_BEATS * BEAT_SECONDS
    while time.monotonic() < deadline:
        if _read_beat(path) != seen:
            raise _in_use(path, owner)
        time.sleep(_LOOK_SECONDS)


def _read_beat(path: Path) -> tuple[float, object]:
    try:
        with open(path, "rb") as file:  # opened: NFS then asks its server
            return os.fstat(file.fileno()).st_mtime, read_record(path, LauncherRecord)
    except OSError:
        return 0.0, None


def is_alive_here(owner: LauncherRecord | None) -> bool | None:
    """Return whether the process of a launcher lives; None where its processes are not seen from here."""
    if owner is None or owner.processes != presence().processes:
        return None
    try:
        return psutil.Process(owner.pid).create_time() == owner.started
    except (psutil.Error, TypeError, ValueError):
        return False


def _in_use(path: Path, owner: LauncherRecord | None) -> RunInUseError:
    owner = owner or LauncherRecord()
    who = f"process {owner.pid or '?'} on {owner.host or 'another host'}"
    when = "" if owner.since is None else f", at work since {owner.since}"
    return RunInUseError(
        f"run_folder: expected no other launcher of {path.parent}, got {who}{when}; `ds-ring status"
        f" {path.parent}` says how far it is. Wait for its end, end it, or name another run_folder"
    )


class _Beat:
    """Write launcher.json at the beginning, every BEAT_SECONDS, and at the end."""

    def __init__(self, path: Path) -> None:
        self.token = secrets.token_hex(16)
        self._path = path
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        here = presence()
        self._record = {"since": now, "host": os.uname().nodename, "pid": here.pid, "token": self.token}
        self._record |= {"processes": here.processes, "started": psutil.Process().create_time()}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="run lock", daemon=True)

    def start(self) -> None:
        self._write(ended=False)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join(timeout=10.0)  # a folder that does not answer must not hold the launcher
        if not self._thread.is_alive() and self._is_ours():
            self._write(ended=True)

    def _work(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            if not self._is_ours():
                say(f"error: another launcher has taken {self._path.parent}; ending this run")
                os.kill(os.getpid(), signal.SIGTERM)
                return
            self._write(ended=False)

    def _write(self, ended: bool) -> None:
        write_json(self._path, {"at": time.time(), **self._record, "ended": ended})

    def _is_ours(self) -> bool:
        """Return whether no other launcher has written there; a missing file is not another's."""
        record = read_record(self._path, LauncherRecord)
        return record is None or record.token in (None, self.token)
