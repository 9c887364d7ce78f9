"""The manifest by itself: what it sees, what it does not mind, the order of checkpoints, the command."""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_ring.checkpoint import manifest as manifest_module
from ds_ring.checkpoint.manifest import (
    MANIFEST,
    FileRecord,
    Storage,
    accept_checkpoint,
    earlier_tags,
    files_in,
    find_faults,
    read_latest,
    read_manifest,
    record_files,
    require_forward,
    unfinished_tags,
    verify_checkpoint,
    write_manifest,
)
from ds_ring.errors import RingCheckpointError, RingCheckpointMissingError
from ds_ring.written_files import write_at_once
from ds_ring_launcher.cli import main
from tests.clock import unqueued_seconds


def checkpoint(root: Path, tag: str = "global_step4", steps: int = 4) -> Path:
    folder = root / tag
    (folder / "offloaded").mkdir(parents=True)
    (folder / "mp_rank_00_model_states.pt").write_bytes(bytes(range(256)) * 8)
    (folder / "offloaded" / "swap.bin").write_bytes(b"x" * 100)
    write_manifest(folder, record_files(folder, files_in(folder)), steps)
    return folder


def test_what_it_lists(tmp_path):
    manifest = read_manifest(checkpoint(tmp_path))
    found = {record.path: record.bytes for record in manifest.files}
    assert found == {"mp_rank_00_model_states.pt": 2048, "offloaded/swap.bin": 100}
    assert manifest.global_steps == 4


def test_every_single_bit_counts(tmp_path):
    folder = checkpoint(tmp_path)
    path = folder / "offloaded" / "swap.bin"
    for place, bit in {(place, place % 8) for place in range(100)} | {(50, bit) for bit in range(8)}:
        data = bytearray(b"x" * 100)
        data[place] ^= 1 << bit
        path.write_bytes(data)
        assert len(find_faults(folder)) == 1
    path.write_bytes(b"x" * 100)
    assert find_faults(folder) == []


def test_every_single_bit_of_the_manifest_counts(tmp_path):
    folder = checkpoint(tmp_path)
    whole = (folder / MANIFEST).read_bytes()
    unseen = []
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= 1 << place % 8
        (folder / MANIFEST).write_bytes(data)
        if not find_faults(folder):
            unseen.append(place)
    assert all(whole[place : place + 1].isspace() for place in unseen), "only the layout may change unseen"


@pytest.mark.parametrize("size", [0, 1, 50, 99])
def test_every_truncation_counts(tmp_path, size):
    folder = checkpoint(tmp_path)
    os.truncate(folder / "offloaded" / "swap.bin", size)
    assert find_faults(folder) == [
        f"{folder / 'offloaded' / 'swap.bin'}: expected 100 bytes, got {size}: truncated"
    ]


def test_shares_of_the_ranks_are_all_files(tmp_path):
    folder = checkpoint(tmp_path)
    (folder / "mp_rank_00_model_states.pt").write_bytes(bytes(2048))
    (folder / "offloaded" / "swap.bin").write_bytes(b"y" * 100)
    assert len(find_faults(folder)) == 2
    assert [len(find_faults(folder, Storage((0, 1, 2), rank).select_share)) for rank in range(3)] == [1, 1, 0]


def with_paths(folder: Path, *paths: str) -> None:
    """A manifest whose digest is right and that names these paths, too: its writer can do that."""
    files = [*read_manifest(folder).files, *(FileRecord(path=one, bytes=9, sha256="0" * 64) for one in paths)]
    write_manifest(folder, files, 4)


def larger_than_the_disk(folder: Path) -> None:
    """A file of nothing but holes, and a manifest that says so: to read it would take hours."""
    disk = os.statvfs(folder)
    size = disk.f_blocks * disk.f_frsize + (1 << 20)
    os.truncate(folder / "offloaded" / "swap.bin", size)
    model, swap = read_manifest(folder).files
    write_manifest(folder, [model, swap.model_copy(update={"bytes": size})], 4)


def replace(folder: Path, make: Callable[[Path], object]) -> None:
    path = folder / "offloaded" / "swap.bin"
    path.unlink()
    make(path)


def listen(path: Path) -> None:
    os.chdir(path.parent)  # the path itself may be longer than a socket's may be
    socket.socket(socket.AF_UNIX).bind(path.name)


STRANGERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "one file more": (lambda folder: (folder / "x.pt").touch(), "x.pt: expected only the files that"),
    "one file more below": (lambda folder: (folder / "offloaded" / "y").touch(),
        "offloaded/y: expected only"),
    "a link to a file": (lambda folder: replace(folder, lambda path: path.symlink_to("/etc/passwd")),
        "swap.bin: expected a regular file, got a symbolic link"),
    "a link to nothing": (lambda folder: replace(folder, lambda path: path.symlink_to("nowhere")),
        "swap.bin: expected a regular file, got a symbolic link"),
    "a link to a folder": (lambda folder: (folder / "more").symlink_to("/"),
        "more: expected a regular file, got a symbolic link"),
    "a FIFO": (lambda folder: replace(folder, os.mkfifo), "swap.bin: expected a regular file, got a FIFO"),
    "a socket": (lambda folder: replace(folder, listen), "swap.bin: expected a regular file, got a socket"),
    "a link to a device": (lambda folder: replace(folder, lambda path: path.symlink_to("/dev/zero")),
        "swap.bin: expected a regular file, got a symbolic link"),
    "a manifest that is a FIFO": (lambda folder: (folder / MANIFEST).unlink() or os.mkfifo(folder / MANIFEST),
        f"{MANIFEST}: expected a regular file, got a FIFO"),
    "a manifest that is a link": (
        lambda folder: (folder / MANIFEST).unlink() or (folder / MANIFEST).symlink_to("/dev/zero"),
        f"{MANIFEST}: expected a regular file, got a symbolic link",
    ),
    "a manifest of a gigabyte": (lambda folder: os.truncate(folder / MANIFEST, 1 << 30),
        f"{MANIFEST}: expected at most 67108864 bytes, got more"),
    "a file larger than its disk": (lambda folder: larger_than_the_disk(folder), "that its disk can hold"),
    "a path upwards": (lambda folder: with_paths(folder, "../latest"), "got '../latest'"),
    "a path upwards inside": (lambda folder: with_paths(folder, "offloaded/../../x"),
        "got 'offloaded/../../x'"),
    "an absolute path": (lambda folder: with_paths(folder, "/etc/passwd"), "got '/etc/passwd'"),
    "no path": (lambda folder: with_paths(folder, ""), "got ''"),
    "a path with a zero": (lambda folder: with_paths(folder, "a\0b"), "got 'a\\x00b'"),
    "a file that is missing": (lambda folder: with_paths(folder, "z.pt"),
        "z.pt: expected 9 bytes, got no file"),
    "a folder that is a link": (
        lambda folder: folder.rename(folder.with_name("real")) and folder.symlink_to("real"),
        "global_step4: expected the folder of a checkpoint, got a symbolic link",
    ),
    "a folder that is a file": (lambda folder: folder.rename(folder.with_name("real")) and folder.touch(),
        "global_step4: expected the folder of a checkpoint, got a regular file"),
}  # fmt: skip


@pytest.mark.parametrize("stranger", STRANGERS)
def test_the_manifest_names_every_file_and_no_other(tmp_path, monkeypatch, stranger):
    """And nothing is followed, waited for or read without end."""
    monkeypatch.chdir(tmp_path)
    plant, words = STRANGERS[stranger]
    plant(checkpoint(tmp_path))
    started = unqueued_seconds()
    with pytest.raises(RingCheckpointError) as caught:
        verify_checkpoint(tmp_path, "global_step4")
    assert unqueued_seconds() - started < 1.0
    assert words in str(caught.value)
    assert not isinstance(caught.value, RingCheckpointMissingError)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make a device")
@pytest.mark.parametrize("name", ["latest", "global_step4/offloaded/swap.bin", f"global_step4/{MANIFEST}"])
def test_a_device_is_not_opened(tmp_path, name):
    checkpoint(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    try:
        os.mknod(tmp_path / name, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero
    except OSError as error:
        pytest.skip(f"no device can be made here: {error}")
    with pytest.raises(RingCheckpointError, match="expected a regular file, got a device"):
        verify_checkpoint(tmp_path, None if name == "latest" else "global_step4")


LATEST = {
    "upwards": ("../global_step4", "got '../global_step4'"),
    "absolute": ("/tmp/global_step4", "got '/tmp/global_step4'"),
    "below": ("a/global_step4", "got 'a/global_step4'"),
    "here": (".", "got '.'"),
    "hidden": (".global_step4.saving", "got '.global_step4.saving'"),
    "long": ("x" * 300, "of 300 characters"),
    "huge": ("x" * 5000, "expected at most 4096 bytes, got more"),
}


@pytest.mark.parametrize("case", LATEST)
def test_a_latest_that_is_no_plain_name(tmp_path, case):
    checkpoint(tmp_path)
    text, words = LATEST[case]
    (tmp_path / "latest").write_text(text)
    with pytest.raises(RingCheckpointError) as caught:
        verify_checkpoint(tmp_path)
    assert "latest: expected" in str(caught.value) and words in str(caught.value)
    if case not in ("huge", "long"):
        with pytest.raises(RingCheckpointError, match="tag: expected the plain name"):
            verify_checkpoint(tmp_path, text)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir])
def test_a_latest_that_is_no_file(tmp_path, make):
    checkpoint(tmp_path)
    make(tmp_path / "latest")
    with pytest.raises(RingCheckpointError, match="latest: expected a regular file, got a"):
        verify_checkpoint(tmp_path)


def test_what_is_not_there_is_told_from_damage(tmp_path):
    with pytest.raises(RingCheckpointMissingError, match="expected a file 'latest', got none"):
        verify_checkpoint(tmp_path)
    checkpoint(tmp_path)
    with pytest.raises(RingCheckpointMissingError, match="check the tag: global_step4 is there"):
        verify_checkpoint(tmp_path, "best")


def test_a_manifest_of_a_later_version_is_refused(tmp_path):
    folder = checkpoint(tmp_path)
    text = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(text | {"format": 2}))
    assert "damaged" in find_faults(folder)[0]


def test_a_folder_that_was_renamed_or_moved_is_whole(tmp_path):
    checkpoint(tmp_path).rename(tmp_path / "best")
    assert verify_checkpoint(tmp_path, "best").global_steps == 4


def test_older_ones_come_newest_first_and_later_ones_not_at_all(tmp_path):
    for tag, steps in (("a", 30), ("b", 10), ("c", 20), ("d", 40)):
        checkpoint(tmp_path, tag, steps)
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "mp_rank_00_model_states.pt").write_bytes(b"")
    assert earlier_tags(tmp_path, "a") == ["c", "b"]
    assert earlier_tags(tmp_path, "half") == ["d", "a", "c", "b"]
    assert unfinished_tags(tmp_path) == ["half"]


@pytest.mark.parametrize("text", ["", " \n", "\0\0", "step\x1b4"])
def test_a_torn_latest_names_nothing(tmp_path, text):
    (tmp_path / "latest").write_text(text)
    with pytest.raises(RingCheckpointError, match="check the tag"):
        verify_checkpoint(tmp_path)


def test_writing_at_once_leaves_the_old_text_when_it_fails(tmp_path, monkeypatch):
    write_at_once(tmp_path / "latest", "old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_at_once(tmp_path / "latest", "new")
    assert read_latest(tmp_path) == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["latest"], "a temporary file is left"


def test_accepting_a_checkpoint_of_before(tmp_path):
    folder = checkpoint(tmp_path, "global_step120")
    (folder / MANIFEST).unlink()
    assert accept_checkpoint(tmp_path, "global_step120").global_steps == 120
    assert find_faults(folder) == []
    with pytest.raises(RingCheckpointError, match=f"no {MANIFEST} yet"):
        accept_checkpoint(tmp_path, "global_step120")
    with pytest.raises(RingCheckpointError, match="check the tag"):
        accept_checkpoint(tmp_path, "nothing")


def test_the_command(tmp_path, capsys):
    folder = checkpoint(tmp_path)
    assert main(["verify-checkpoint", str(tmp_path)]) == 3  # not there; 1: not whole; 2: wrong input
    assert "expected a file 'latest', got none; pass a tag" in capsys.readouterr().err
    (tmp_path / "latest").write_text("global_step4")
    assert main(["verify-checkpoint", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "whole: 2 files, 2,148 bytes, after step 4\n"
    assert main(["verify-checkpoint", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"files": 2, "bytes": 2148, "global_steps": 4}
    (folder / "offloaded" / "swap.bin").unlink()
    assert main(["verify-checkpoint", str(tmp_path), "--tag", "nothing"]) == 3
    assert "no such checkpoint" in capsys.readouterr().err
    assert main(["verify-checkpoint", str(tmp_path), "--tag", "global_step4"]) == 1
    assert "swap.bin: expected 100 bytes, got no file" in capsys.readouterr().err
    (folder / MANIFEST).unlink()
    assert main(["verify-checkpoint", str(tmp_path), "--accept"]) == 2
    assert "--tag" in capsys.readouterr().err
    assert main(["verify-checkpoint", str(tmp_path), "--tag", "global_step4", "--accept"]) == 0
    assert main(["verify-checkpoint", str(tmp_path), "--", "--steps"]) == 2


EXTRA = (
    f"{MANIFEST}.pt", f"{MANIFEST}_optim_states.pt", f".{MANIFEST}.0123456789abcdef", "offloaded/" + MANIFEST,
    ".nfs", ".nfs0001.pt", ".nfs" + "0" * 24,
)  # fmt: skip


@pytest.mark.parametrize("name", EXTRA)
def test_a_file_that_looks_like_one_of_ours_or_of_nfs_is_seen(tmp_path, name):
    """(It was in no manifest, no pickle of it was looked at, and the checkpoint was called whole.)"""
    folder = checkpoint(tmp_path)
    (folder / name).write_bytes(b"more")
    with pytest.raises(RingCheckpointError, match=r"expected only the files that .* names, got one more"):
        verify_checkpoint(tmp_path, "global_step4")
    (folder / MANIFEST).unlink()
    assert name in {record.path for record in accept_checkpoint(tmp_path, "global_step4").files}
    verify_checkpoint(tmp_path, "global_step4")


def test_what_nfs_keeps_is_left_out_on_nfs_alone(tmp_path, monkeypatch):
    folder = checkpoint(tmp_path)
    device = folder.lstat().st_dev
    mounts = tmp_path / "mounts"
    line = f"36 35 {os.major(device)}:{os.minor(device)} / /mnt rw,noatime master:1 - {{}} server:/a rw"
    for kind, nfs in (("nfs4", True), ("ext4", False)):
        mounts.write_text(
            f"1 0 0:9999 / / rw - ext4 a rw\nbroken\n{line.format(kind)}\n".replace("broken\n", "")
        )
        assert manifest_module._is_on_nfs(folder, mounts) is nfs
    assert not manifest_module._is_on_nfs(folder, tmp_path / "nothing")
    mounts.write_text("broken")
    assert not manifest_module._is_on_nfs(folder, mounts)
    monkeypatch.setattr(manifest_module, "_is_on_nfs", lambda folder: True)
    (folder / "offloaded" / (".nfs" + "0a" * 12)).touch()
    verify_checkpoint(tmp_path, "global_step4")
    (folder / (".nfs" + "0a" * 12 + ".pt")).touch()
    with pytest.raises(RingCheckpointError, match="got one more"):
        verify_checkpoint(tmp_path, "global_step4")


def test_a_name_that_is_not_utf_8(tmp_path, capsys):
    folder = checkpoint(tmp_path)
    odd = os.fsdecode(os.fsencode(folder) + b"/\xff.bin")
    Path(odd).touch()
    command = ["verify-checkpoint", str(tmp_path), "--tag", "global_step4"]
    assert main(command) == 1 and "got one more" in capsys.readouterr().err
    (folder / MANIFEST).unlink()
    assert main([*command, "--accept"]) == 1
    assert "expected names in printable UTF-8, got '\\udcff.bin'; rename it" in capsys.readouterr().err
    assert not (folder / MANIFEST).exists()
    os.rename(odd, folder / "more.bin")
    moved = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    os.mkdir(moved)
    folder.rename(Path(moved, "global_step4"))
    assert main(["verify-checkpoint", moved, "--tag", "global_step4", "--accept", "--make-latest"]) == 0
    assert main(["verify-checkpoint", str(tmp_path), "--tag", os.fsdecode(b"\xff")]) == 2


def test_a_save_of_the_step_of_latest_is_no_step_back(tmp_path):
    checkpoint(tmp_path)
    (tmp_path / "latest").write_text("global_step4")
    require_forward(tmp_path, 4)
    with pytest.raises(RingCheckpointError, match="expected to save after step 4 or later"):
        require_forward(tmp_path, 3)
    require_forward(tmp_path, 3, damaged=[(tmp_path / "global_step4").resolve()])
