"""Write and read the manifest of a checkpoint, `ds_ring_manifest.json`: its files, their sizes and sha256.

Only regular files are opened, because a folder of checkpoints may be shared with others: a symbolic link
would lead out of it, a FIFO would be waited for, a device read without end. Imports no deepspeed.

A folder of checkpoints is locked for one job, as long as it may save there (`FolderLocks`). The lock is
`filelock`'s on `.ds_ring_lock`, which is the kernel's (flock): that of a job that ended, however it ended, is
gone. On NFS, Linux makes it a lock of the server's, which a client that crashed may keep until the server's
lease ends (minutes). A file system without locks gets a warning. `.ds_ring_lock.json` names the owner.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ds_ring.errors import RingCheckpointError, RingCheckpointMissingError, RingMismatchError
from ds_ring.written_files import replace_text, write_at_once

_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
    stat.S_IFREG: "a regular file",
}
HASHING_THREADS = 4  # hashlib lets other threads run; more would only fight over the disk
MANIFEST = "ds_ring_manifest.json"
LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
NO_TAG = "(unreadable)"  # what a torn `latest` names
_MAX_MANIFEST_BYTES = 1 << 26  # of some 400 000 files
_MAX_LATEST_BYTES = 4096
_FAULTS_NAMED = 20


def not_regular(path: Path, mode: int, expected: str = "a regular file") -> str:
    """Return an error's text about a file that should be something else."""
    kind = _KINDS.get(stat.S_IFMT(mode), "something else")
    return f"{path}: expected {expected}, got {kind}; put {expected} there, or remove it"


def require_plain_tag(tag: str, whence: str) -> str:
    """Return `tag`, or raise RingCheckpointError that names it and where it comes from."""
    if (
        not tag
        or not tag.isprintable()
        or tag[0] == "."
        or "/" in tag
        or len(tag.encode(errors="replace")) > 255
    ):
        got = repr(tag) if len(tag) <= 80 else f"{tag[:60]!r}... of {len(tag)} characters"
        raise RingCheckpointError(
            f"{whence}: expected the plain name of a checkpoint's folder, got {got}; a tag has no slash,"
            " no dot in front and at most 255 bytes"
        )
    return tag


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading; nothing else is opened, no link followed, nothing waited for.

    Raises:
        RingCheckpointError: it is something else. OSError: it cannot be opened.
    """
    mode, descriptor = os.lstat(path).st_mode, None
    if stat.S_ISREG(mode):
        # Meanwhile another program could put something else there: neither flag waits or follows.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(mode):
            return os.fdopen(descriptor, "rb")
        os.close(descriptor)
    raise RingCheckpointError(not_regular(path, mode))


def read_small(path: Path, most_bytes: int) -> bytes:
    with open_regular(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise RingCheckpointError(f"{path}: expected at most {most_bytes} bytes, got more")
    return data


def walk_entries(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the path and the status of everything below `folder` but folders; no link is followed."""
    todo = [""]
    while todo:
        inside = todo.pop()
        with os.scandir(folder / inside) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
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


class Strict(BaseModel):
    """Take nothing unknown from a file and convert nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class FileRecord(Strict):
    """Describe one file of a checkpoint; `path` is relative to the tag's folder, with forward slashes."""

    path: str
    bytes: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def _digest(file: BufferedReader) -> str:
    sha256 = hashlib.sha256()  # hashlib.file_digest is not in Python 3.10
    while block := file.read(1 << 20):
        sha256.update(block)
    return sha256.hexdigest()


def record_files(folder: Path, paths: Iterable[str]) -> list[FileRecord]:
    """Return size and sha256 of files just written, and bring them to the disk. May raise OSError."""

    def record(path: str) -> FileRecord:
        with open_regular(folder / path) as file:
            sha256 = _digest(file)
            os.fsync(file.fileno())
            return FileRecord(path=path, bytes=os.fstat(file.fileno()).st_size, sha256=sha256)

    with ThreadPoolExecutor(HASHING_THREADS) as threads:
        return list(threads.map(record, paths))


class Training(Strict):
    """Say what a checkpoint is of: stage, dtype, optimizer, scheduler and model."""

    zero_stage: Annotated[int, Field(ge=0, le=3)]
    dtype: str  # of the model: "float32", "float16", "bfloat16"
    wrapper: str  # class of DeepSpeed's optimizer around the own one; "" for none
    optimizer: str  # class; "" for none
    settings: tuple[tuple[str, ...], ...]  # names, by group of parameters
    states: tuple[str, ...]  # names of a parameter's states; none before the first step
    scheduler: str  # class; "" for none
    scheduler_states: tuple[str, ...]  # names
    shapes: dict[str, tuple[int, ...]]  # of the state dict's tensors
    frozen: tuple[str, ...]  # names of parameters


class Manifest(Strict):
    """List all files of a checkpoint."""

    format: Literal[1] = 1  # another number is another version's
    global_steps: int  # optimizer steps done, which puts the checkpoints of a run in order
    saved_unix_seconds: float  # distinguishes checkpoints of one step
    files: tuple[FileRecord, ...]  # sorted by path
    training: Training | None = (
        None  # unknown of a checkpoint that was accepted, or saved by an older version
    )
    digest: str = ""  # sha256 of everything above

    def compute_digest(self) -> str:
        # Without `training` where there is none, as older versions count.
        text = self.model_dump_json(exclude={"digest"}, exclude_none=True)
        return hashlib.sha256(text.encode()).hexdigest()


def files_in(folder: Path) -> Iterator[str]:
    """Yield relative paths of all files below `folder` but the manifest and what NFS keeps of removed files.

    Raises:
        RingCheckpointError: something is no regular file, or its name is none that a manifest can hold.
    """
    left_out = _left_out(folder)
    for path, status in walk_entries(folder):
        if not stat.S_ISREG(status.st_mode):
            raise RingCheckpointError(not_regular(folder / path, status.st_mode))
        if not path.isprintable():
            raise RingCheckpointError(f"{folder}: expected names in printable UTF-8, got {path!r}; rename it")
        if not left_out(path):
            yield path


# [Note: sealed] The manifest is written last, after every file of every rank, so a folder without one was
# never finished: it needs no other mark. It carries a digest of itself: a flipped bit in it is not taken for
# damage to the files.
def write_manifest(
    folder: Path, files: Iterable[FileRecord], global_steps: int, training: Training | None = None
) -> Manifest:
    """Write the manifest of the checkpoint in `folder` ([Note: sealed])."""
    files, now = tuple(sorted(files, key=lambda record: record.path)), time.time()
    manifest = Manifest(global_steps=global_steps, saved_unix_seconds=now, files=files, training=training)
    manifest = manifest.model_copy(update={"digest": manifest.compute_digest()})
    write_at_once(folder / MANIFEST, manifest.model_dump_json(indent=1, exclude_none=True) + "\n")
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest in `folder`; RingCheckpointError where there is none to trust."""
    require_folder(folder)
    try:
        manifest = Manifest.model_validate_json(read_small(folder / MANIFEST, _MAX_MANIFEST_BYTES))
    except FileNotFoundError:
        raise RingCheckpointError(
            f"{folder}: expected {MANIFEST}, got none: saving was cut short, or ds_ring did not write it;"
            f" seal it with `ds-ring verify-checkpoint {folder.parent} --tag {folder.name} --accept`"
        ) from None
    except (OSError, ValidationError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error.strerror
        raise RingCheckpointError(f"{folder / MANIFEST}: damaged, cannot be read: {reason}") from None
    if manifest.digest != manifest.compute_digest():
        raise RingCheckpointError(f"{folder / MANIFEST}: damaged, its own digest does not match")
    return manifest


def read_digest(folder: Path) -> str:
    """Return the digest of the manifest in `folder`; "" where there is none to trust."""
    try:
        return read_manifest(folder).digest
    except RingCheckpointError:
        return ""


def require_folder(folder: Path) -> None:
    """Raise RingCheckpointMissingError, with the tags that are there, unless `folder` is one.

    RingCheckpointError where a link or a file has that name.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise RingCheckpointError(not_regular(folder, folder.lstat().st_mode, "the folder of a checkpoint"))
    if not folder.is_dir():
        there = [tag for tag in earlier_tags(folder.parent, "") if not tag.startswith(".")]
        hint = f": {', '.join(there[:5])} {'are' if there[1:] else 'is'} there" if there else ""
        raise RingCheckpointMissingError(f"{folder}: expected a checkpoint, got none; check the tag{hint}")


def changes_by_others(folder: Path) -> list[str]:
    """Return changes that no crash makes: files that the manifest does not name, links, FIFOs, bad paths."""
    # One sentence each. A person has to look at such a folder: going back one checkpoint would not help.
    if not is_folder(folder):
        return [not_regular(folder, folder.lstat().st_mode, "a folder")]
    names = dict(walk_entries(folder))
    faults = [
        not_regular(folder / path, status.st_mode)
        for path, status in names.items()
        if not stat.S_ISREG(status.st_mode)
    ]
    if faults or MANIFEST not in names:
        return _few(faults)
    try:
        manifest = read_manifest(folder)
    except RingCheckpointError:
        return []  # damage, which find_faults names
    known, left_out = {record.path for record in manifest.files}, _left_out(folder)
    disk = os.statvfs(folder)
    faults = [
        f"{folder / MANIFEST}: expected paths below its folder, got {path!r}; do not use this checkpoint"
        for path in sorted(known)
        if not path.isprintable() or {"", ".", ".."} & set(path.split("/"))
    ]
    faults += [
        f"{folder / path}: expected only the files that {MANIFEST} names, got one more; move it elsewhere"
        for path in names
        if path not in known and not left_out(path)
    ]
    faults += [
        f"{folder / path}: expected a file that its disk can hold, got {status.st_size} bytes; remove it"
        for path, status in names.items()
        if status.st_size > disk.f_blocks * disk.f_frsize > 0
    ]
    return _few(faults)


def find_faults(
    folder: Path, select_share: Callable[[list[FileRecord]], list[FileRecord]] = list
) -> list[str]:
    """Return the faults of the checkpoint in `folder`, one sentence each.

    Every caller looks at all sizes, and hashes the files that `select_share` selects.
    """
    try:
        manifest = read_manifest(folder)
    except RingCheckpointError as error:
        return [str(error)]
    sizes = {path: status.st_size for path, status in walk_entries(folder)}
    wrong_sizes = []
    for record in manifest.files:
        if (size := sizes.get(record.path)) is None:
            wrong_sizes.append(f"{folder / record.path}: expected {record.bytes} bytes, got no file")
        elif size != record.bytes:
            how = "truncated" if size < record.bytes else "too long"
            wrong_sizes.append(f"{folder / record.path}: expected {record.bytes} bytes, got {size}: {how}")
    if wrong_sizes:
        return _few(wrong_sizes)  # no need to read gigabytes any more

    def check_content(record: FileRecord) -> str:
        path = folder / record.path
        try:
            with open_regular(path) as file:
                got = _digest(file)
        except RingCheckpointError as error:
            return str(error)
        except OSError as error:
            return f"{path}: expected to read {record.bytes} bytes, got {error.strerror}"
        changed = f"{path}: expected sha256 {record.sha256}, got {got}: its contents changed"
        return "" if got == record.sha256 else changed

    by_size = sorted(manifest.files, key=lambda record: -record.bytes)
    with ThreadPoolExecutor(HASHING_THREADS) as threads:
        return [text for text in threads.map(check_content, select_share(by_size)) if text]


def verify_checkpoint(directory: str | os.PathLike[str], tag: str | None = None) -> Manifest:
    """Read a whole checkpoint and compare it with its manifest, in this process alone.

    Args:
        directory: what `save_checkpoint` was given.
        tag: which checkpoint; None for the one that `latest` names.

    Raises:
        RingCheckpointMissingError: there is no such tag, or no file `latest`.
        RingCheckpointError: it is not whole; the message names each file, what was expected and was got.
    """
    root = Path(directory)
    tag = tag_in(root, tag)
    require_folder(root / tag)
    try:
        faults = changes_by_others(root / tag) or find_faults(root / tag)
    except OSError as error:
        raise RingCheckpointError(f"{error.filename}: cannot be read: {error.strerror}") from None
    if faults:
        raise RingCheckpointError("\n".join([f"checkpoint {tag} in {root} is damaged:", *faults]))
    return read_manifest(root / tag)


def accept_checkpoint(directory: str | os.PathLike[str], tag: str) -> Manifest:
    """Write a manifest for a checkpoint that has none, as it is now; its user knows that it is whole."""
    # Its place in the order of checkpoints follows from the number at the end of the tag (global_step120).
    folder = Path(directory, require_plain_tag(tag, "tag"))
    files = list(files_in(folder)) if folder.is_dir() else []
    if not files:
        raise RingCheckpointMissingError(f"{folder}: expected a checkpoint, got none; check the tag")
    if (folder / MANIFEST).exists():
        raise RingCheckpointError(f"{folder}: expected no {MANIFEST} yet, got one; it says what was saved")
    number = re.search(r"\d+$", tag)
    return write_manifest(folder, record_files(folder, files), int(number.group()) if number else -1)


def read_latest(root: Path, name: str = LATEST) -> str | None:
    """Return the tag in the file `name`, NO_TAG if that is no text; None without that file."""
    try:
        data = read_small(root / name, _MAX_LATEST_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RingCheckpointError(f"{root / name}: cannot be read: {error.strerror}") from None
    tag = data.decode("utf-8", errors="replace").strip()
    torn = not tag or not tag.isprintable()  # by a crash; a path is nothing that a crash leaves
    return NO_TAG if torn else require_plain_tag(tag, str(root / name))


def tag_in(root: Path, tag: str | None) -> str:
    """Return the tag, the one that `latest` names for None; RingCheckpointError if it is not a plain name."""
    tag = read_latest(root) if tag is None else require_plain_tag(tag, "tag")
    if tag is None:
        raise RingCheckpointMissingError(f"{root}: expected a file '{LATEST}', got none; pass a tag")
    return tag


# [Note: latest goes forward] A run that starts in the folder of another would set `latest` back, and
# a job that resumes later would lose the training since. So a save is refused where `latest` names a whole
# checkpoint of a later step, before anything is written; `make_latest` is the way back.
def require_forward(root: Path, global_steps: int, damaged: Collection[Path] = ()) -> None:
    """Raise RingCheckpointError if `latest` names a checkpoint that is later than `global_steps`.

    `damaged` are folders that a load has gone past: there is nothing to lose in them.
    """
    try:
        tag = read_latest(root) or NO_TAG
        steps = read_manifest(root / tag).global_steps
    except RingCheckpointError:
        return  # nothing that is whole
    if steps > global_steps and (root / tag).resolve() not in damaged:
        raise RingCheckpointError(
            f"{root}: expected to save after step {steps} or later, since '{LATEST}' names {tag}, got step"
            f" {global_steps}; save elsewhere, or `ds-ring verify-checkpoint {root} --tag TAG --make-latest`"
        )


def make_latest(directory: str | os.PathLike[str], tag: str) -> Manifest:
    """Verify a checkpoint and write its tag into `latest`, whichever one that names.

    Raises:
        RingCheckpointMissingError: there is no such tag.
        RingCheckpointError: it is not whole, a job saves there, or `latest` cannot be written.
    """
    root, manifest = Path(directory), verify_checkpoint(directory, tag)
    try:
        FolderLocks().claim(root)
        write_at_once(root / LATEST, tag)
    except OSError as error:
        raise RingCheckpointError(f"{error.filename or root}: cannot be written: {error.strerror}") from None
    return manifest


def earlier_tags(root: Path, tag: str) -> list[str]:
    """Return tags of sealed checkpoints older than `tag`, newest first; all if `tag` has no known age."""
    ages = {}
    for folder in _folders(root):
        with suppress(RingCheckpointError):
            manifest = read_manifest(folder)
            ages[folder.name] = manifest.global_steps, manifest.saved_unix_seconds
    limit = ages.pop(tag, None)
    names = [name for name in ages if limit is None or ages[name] < limit]
    return sorted(names, key=ages.__getitem__, reverse=True)


def is_universal(folder: Path) -> bool:
    """Return whether the checkpoint in `folder` is one for any number of ranks."""
    return (folder / "zero").is_dir()


def unfinished_tags(root: Path) -> list[str]:
    """Return folders with a checkpoint's files and no manifest; universal checkpoints have none either."""
    return [
        folder.name
        for folder in _folders(root)
        if not (folder / MANIFEST).exists() and not is_universal(folder) and any(folder.glob("*.pt"))
    ]


def _folders(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if is_folder(path)) if root.is_dir() else []


def _left_out(folder: Path) -> Callable[[str], bool]:
    """Return which files no manifest names: itself, and on NFS what that keeps of a removed open file."""
    nfs_name = re.compile(r"\.nfs[0-9a-f]{24}") if _is_on_nfs(folder) else None
    return lambda path: path == MANIFEST or bool(nfs_name and nfs_name.fullmatch(path.rpartition("/")[2]))


def _is_on_nfs(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    with suppress(OSError, ValueError, IndexError):
        device = os.lstat(folder).st_dev
        for line in mounts.read_text(errors="replace").splitlines():
            fields = line.split()
            if fields[2] == f"{os.major(device)}:{os.minor(device)}":
                return fields[fields.index("-") + 1].startswith("nfs")
    return False


def _few(faults: list[str]) -> list[str]:
    """Return enough of the faults to act on."""
    left = len(faults) - _FAULTS_NAMED
    return faults if left <= 0 else [*faults[:_FAULTS_NAMED], f"and {left} more of this kind"]


# Collectives of saving and loading: ranks succeed or fail together.

T = TypeVar("T")


class Storage(NamedTuple):
    """List the world ranks that see the same files in a checkpoint's folder, and this rank."""

    ranks: tuple[int, ...]
    rank: int

    @property
    def leads(self) -> bool:
        """Whether this rank writes the files that are written once a storage."""
        return self.rank == self.ranks[0]

    def select_share(self, work: Iterable[T]) -> list[T]:
        """Return this rank's part of the work on this storage."""
        return list(work)[self.ranks.index(self.rank) :: len(self.ranks)]


def find_storage(local_rank: int, node_local: bool) -> Storage:
    """Return all ranks, or with node-local storage those of this host. Then they are consecutive, and this
    call is collective.
    """
    import torch.distributed as dist  # here, so that a lock or a manifest can be read without torch

    rank, world = dist.get_rank(), dist.get_world_size()
    if not node_local:
        return Storage(tuple(range(world)), rank)
    local_ranks = together(lambda: local_rank)
    starts = [start for start in range(world) if local_ranks[start] == 0]
    first = max((start for start in starts if start <= rank), default=0)
    end = min((start for start in starts if start > rank), default=world)
    return Storage(tuple(range(first, end)), rank)


def together(act: Callable[[], T]) -> list[T]:
    """Return the result of `act` on every rank, by rank. Collective; an error of one is raised on all.

    Raises:
        RingCheckpointMissingError: so did `act`, on every rank.
        RingCheckpointError: `act` could not read or write a file, or raised this error, on some rank.
    """
    from ds_ring.comm.groups import gather_objects

    try:
        mine: tuple[T | None, str, bool] = (act(), "", False)
    except (OSError, RingCheckpointError) as error:
        mine = (None, str(error), isinstance(error, RingCheckpointMissingError))
    everyones = gather_objects(mine)
    failed = [(rank, text, missing) for rank, (_, text, missing) in enumerate(everyones) if text]
    if failed:
        # Where some ranks see what others miss, a script must not take it for a run that has not begun.
        missing = len(failed) == len(everyones) and all(is_missing for *_, is_missing in failed)
        kind = RingCheckpointMissingError if missing else RingCheckpointError
        texts = "; ".join(f"rank {rank}: {text}" for rank, text, _ in failed)
        raise kind(f"checkpoint: expected every rank to succeed, got {texts}")
    return [value for value, *_ in everyones]


def require_alike(what: str, options: dict[str, Any]) -> None:
    """Raise RingMismatchError on every rank unless all ranks pass the same options. Collective."""
    everyones = together(lambda: options)
    odd_rank = next(
        (rank for rank, rank_options in enumerate(everyones) if rank_options != everyones[0]), None
    )
    if odd_rank is not None:
        first, second = everyones[0], everyones[odd_rank]
        name = next(name for name in first if first[name] != second[name])
        raise RingMismatchError(
            f"{what}: expected one {name}, got {first[name]!r} on rank 0, {second[name]!r} on {odd_rank}"
        )


log = logging.getLogger(__name__)
LOCK, OWNER = ".ds_ring_lock", ".ds_ring_lock.json"
_MAX_BYTES = 4096
_NO_LOCKS_HERE = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
_TOKEN = secrets.token_hex(8)  # with the pid, unique over hosts and restarts


class Attempt(NamedTuple):
    """Name one attempt of a run that a launcher starts.

    Attributes:
        run: the run's folder.
        number: from 1.
        launcher: the token of the launcher that started it, which no other one has; "" where none is known.
    """

    run: str
    number: int
    launcher: str

    def has_working_launcher(self) -> bool:
        """Return whether the launcher that started this attempt holds the run's folder now."""
        tokens = (_token_in(path) for path in sorted(Path(self.run).glob("launcher*.json")))
        return bool(self.launcher) and self.launcher in tokens


def attempt_in(folder: Path | None) -> Attempt | None:
    """Return the attempt whose folder a launcher has named; None where it has named none."""
    number = None if folder is None else re.fullmatch(r"attempt-(\d{1,9})", folder.name)
    if folder is None or number is None:
        return None
    return Attempt(str(folder.parent.resolve()), int(number[1]), _token_in(folder / "launcher.json"))


def _token_in(path: Path) -> str:
    token = _object_in(path).get("token")
    return token if isinstance(token, str) else ""


class _Owner(BaseModel):
    """The owner of the lock of a folder of checkpoints; unknown fields are ignored."""

    model_config = ConfigDict(strict=True)

    host: str = ""
    pid: int | None = None
    token: str = ""
    since: str = ""
    run: str | None = None
    attempt: int | None = None
    launcher: str = ""


# [Note: fencing] A job that is started again may find the lock held by its own earlier attempt: by a rank
# that is stopped, or whose host is cut off from the launcher. Then the newer attempt removes the lock file,
# locks a new one, and names itself in the owner's file. If the older rank wakes up, it finds another owner,
# before it takes a checkpoint's name as well as before it begins to save, and is refused. The launchers'
# tokens say which one is newer: one launcher has started both, or that of this attempt holds the run's
# folder, which no two launchers do at once, and the other's is gone.
class FolderLocks:
    """Hold the folders that one engine saves in until the engine is gone.

    Args:
        attempt: which attempt of which run this is; None where no launcher starts the job again.
    """

    def __init__(self, attempt: Attempt | None = None) -> None:
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
        run, number, launcher = self._attempt or (None, None, "")
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "token": _TOKEN, "since": since}
        owner |= {"run": run, "attempt": number, "launcher": launcher}
        replace_text(folder / OWNER, json.dumps(owner) + "\n")
        self._locks[folder] = lock

    def require_still(self, folder: Path) -> None:
        """Raise RingCheckpointError if a newer attempt has taken the folder over since it was claimed."""
        folder = folder.resolve()
        if self._attempt is not None and folder in self._locks and not self._is_ours(folder):
            raise RingCheckpointError(
                f"{folder}: expected this to be the job's newest attempt, got a newer one"
            )

    def _is_ours(self, folder: Path) -> bool:
        owner = _read_owner(folder)
        return (owner.pid, owner.token) == (os.getpid(), _TOKEN) and (folder / LOCK).exists()

    def _require_older(self, folder: Path) -> None:
        """Raise RingCheckpointError unless the owner is an earlier attempt of this run ([Note: fencing])."""
        owner, mine = _read_owner(folder), self._attempt
        if mine is not None and mine.launcher and owner.run == mine.run and owner.attempt is not None:
            of_one_launcher = owner.launcher == mine.launcher
            if owner.attempt < mine.number and (of_one_launcher or mine.has_working_launcher()):
                return
        who = f"process {'?' if owner.pid is None else owner.pid} on {owner.host or 'another host'}"
        raise RingCheckpointError(
            f"{folder}: expected no other job that saves here, got {who}, which has saved since"
            f" {owner.since or 'an unknown time'}; end that job, or save into another folder"
        )


def _read_owner(folder: Path) -> _Owner:
    """Return the contents of the owner's file; empty if it cannot be read."""
    try:
        return _Owner.model_validate(_object_in(folder / OWNER))
    except ValidationError:
        return _Owner()


def _object_in(path: Path) -> dict[str, Any]:
    """Return the JSON object in a small file; nothing where there is none."""
    try:
        value = json.loads(read_small(path, _MAX_BYTES))
    except (OSError, ValueError, RecursionError, RingCheckpointError):
        return {}
    return value if isinstance(value, dict) else {}
