"""The manifest by itself: what it sees, what it does not mind, the order of checkpoints, the command."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ds_ring.errors import RingCheckpointError
from ds_ring.integrations.atomic_file import write_at_once
from ds_ring.integrations.manifest import (
    MANIFEST,
    accept_checkpoint,
    earlier_tags,
    faults_of,
    files_in,
    read_latest,
    read_manifest,
    record_files,
    unfinished_tags,
    verify_checkpoint,
    write_manifest,
)
from ds_ring_launcher.cli import main


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
    for place in range(100):
        for bit in range(8):
            data = bytearray(b"x" * 100)
            data[place] ^= 1 << bit
            path.write_bytes(data)
            assert len(faults_of(folder)) == 1
    path.write_bytes(b"x" * 100)
    assert faults_of(folder) == []


def test_every_single_bit_of_the_manifest_counts(tmp_path):
    folder = checkpoint(tmp_path)
    whole = (folder / MANIFEST).read_bytes()
    unseen = []
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= 1 << place % 8
        (folder / MANIFEST).write_bytes(data)
        if not faults_of(folder):
            unseen.append(place)
    assert all(whole[place : place + 1].isspace() for place in unseen), "only the layout may change unseen"


@pytest.mark.parametrize("size", [0, 1, 50, 99])
def test_every_truncation_counts(tmp_path, size):
    folder = checkpoint(tmp_path)
    os.truncate(folder / "offloaded" / "swap.bin", size)
    assert faults_of(folder) == [
        f"{folder / 'offloaded' / 'swap.bin'}: expected 100 bytes, got {size}: truncated"
    ]


def test_shares_of_the_ranks_are_all_files(tmp_path):
    folder = checkpoint(tmp_path)
    (folder / "mp_rank_00_model_states.pt").write_bytes(bytes(2048))
    (folder / "offloaded" / "swap.bin").write_bytes(b"y" * 100)
    assert len(faults_of(folder)) == 2
    assert [len(faults_of(folder, share, 3)) for share in range(3)] == [1, 1, 0]


def test_a_file_more_does_not_matter(tmp_path):
    folder = checkpoint(tmp_path)
    (folder / "notes.txt").write_text("the good one")
    assert faults_of(folder) == []


def test_a_manifest_of_a_later_version_is_refused(tmp_path):
    folder = checkpoint(tmp_path)
    text = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(text | {"format": 2}))
    assert "damaged" in faults_of(folder)[0]


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
    assert faults_of(folder) == []
    with pytest.raises(RingCheckpointError, match=f"no {MANIFEST} yet"):
        accept_checkpoint(tmp_path, "global_step120")
    with pytest.raises(RingCheckpointError, match="check the tag"):
        accept_checkpoint(tmp_path, "nothing")


def test_the_command(tmp_path, capsys):
    folder = checkpoint(tmp_path)
    assert main(["verify-checkpoint", str(tmp_path)]) == 2
    assert "expected a file 'latest', got none; pass a tag" in capsys.readouterr().err
    (tmp_path / "latest").write_text("global_step4")
    assert main(["verify-checkpoint", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "whole: 2 files, 2,148 bytes, after step 4\n"
    (folder / "offloaded" / "swap.bin").unlink()
    assert main(["verify-checkpoint", str(tmp_path), "--tag", "global_step4"]) == 2
    assert "swap.bin: expected 100 bytes, got no file" in capsys.readouterr().err
    (folder / MANIFEST).unlink()
    assert main(["verify-checkpoint", str(tmp_path), "--accept"]) == 2
    assert "--tag" in capsys.readouterr().err
    assert main(["verify-checkpoint", str(tmp_path), "--tag", "global_step4", "--accept"]) == 0
    assert main(["verify-checkpoint", str(tmp_path), "--", "--steps"]) == 2
