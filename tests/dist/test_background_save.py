"""Checkpoints that are written in the background: what they hold is the state at the call, to the last bit."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_ring.checkpoint.manifest import (
    MANIFEST,
    FolderLocks,
    Storage,
    read_latest,
    record_files,
    verify_checkpoint,
)
from ds_ring.checkpoint.save import (
    HostCopy,
    _make_room,
    _seal,
    _seal_later,
    _Writes,
    exchange_reports,
    give_its_name,
)
from ds_ring.errors import RingCheckpointError
from ds_ring.limits import Limit
from tests.clock import wait_until
from tests.dist.checkpoint_ranks import SIZE, load_and_train, start_engine, train_to
from tests.dist.deepspeed_ranks import json_config
from tests.dist.harness import Failure, catch_failure
from tests.machine import small_disk

STEPS = 5
SLOW_SECONDS = 0.1


def save_and_go_on(
    rank: int, world_size: int, config: dict[str, Any], folder: str
) -> tuple[list[float], list[Any]]:
    """Save after steps 2 and 4, slowly; the losses, and what was there right after each call."""
    engine, seen = start_engine(config), []
    write = engine.checkpoint_engine.save

    def slowly(state_dict: Any, path: str) -> Any:
        time.sleep(SLOW_SECONDS)
        return write(state_dict, path)

    engine.checkpoint_engine.save = slowly

    def save(step: int) -> None:
        if step in (2, 4):
            assert engine.save_checkpoint(folder, client_state={"seen": step}, background=True) is True
            seen.append(read_latest(Path(folder)) if os.path.exists(f"{folder}/latest") else None)

    return train_to(engine, STEPS, save), seen  # the engine goes: its thread ends the last one


@pytest.mark.night
@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_holds_the_state_at_the_call(rank_pool: Any, tmp_path: Path, stage: int) -> None:
    config = json_config(2, SIZE.samples, stage)
    losses, seen = rank_pool(2).run(save_and_go_on, config, str(tmp_path))[0]
    assert seen == [None, "global_step2"]  # not there yet; the second call waited for the first
    rank_pool(2).resume()
    wait_until(lambda: read_latest(tmp_path) == "global_step4", 20.0)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        "global_step2",
        "global_step4",
    ]
    for tag, first in (("global_step2", 2), ("global_step4", 4)):
        assert verify_checkpoint(tmp_path, tag).global_steps == first
        resumed = rank_pool(2).run(load_and_train, config, str(tmp_path), STEPS, tag)[0]
        assert resumed.losses == losses[first:] and resumed.state == {"seen": first}


def fill_up(rank: int, world_size: int, config: dict[str, Any], folder: str, script: bool) -> Failure:
    """Save once; fill the disk, or let rank 0 alone fail at the script that DeepSpeed copies; save again."""
    engine = start_engine(config)
    train_to(engine, 1)
    engine.save_checkpoint(folder)
    if script:

        def full(folder: str) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        engine._copy_recovery_script = full
    elif rank == 0:
        with open(f"{folder}/ballast", "wb", buffering=0) as file:
            try:
                while file.write(bytes(1 << 12)):
                    pass
            except OSError:
                pass
    torch.distributed.barrier()
    train_to(engine, 2)

    def save_twice() -> None:
        engine.save_checkpoint(folder, background=True)
        engine.save_checkpoint(folder)

    return catch_failure(save_twice)


@pytest.mark.needs("mounts")
@pytest.mark.parametrize("script", [False, True])
@pytest.mark.day("True")
def test_a_full_disk_is_told_by_the_next_save_on_every_rank(
    rank_pool: Any, tmp_path: Path, script: bool
) -> None:
    with small_disk(tmp_path, 4 << 20):
        result = rank_pool(2).run(fill_up, json_config(2, SIZE.samples, 1), str(tmp_path), script)
        assert [item.error for item in result] == ["RingCheckpointError"] * 2, result
        assert all("rank 0: " in item.text and "No space left" in item.text for item in result) or not script
        assert read_latest(tmp_path) == "global_step1"
        verify_checkpoint(tmp_path, "global_step1")
        assert [path.name for path in tmp_path.iterdir() if "saving" in path.name] == []


def test_a_report_that_was_cut_short_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / ".0").touch()
    (tmp_path / "1.json").write_text('{"files": [{"pa')
    with pytest.raises(RingCheckpointError, match=r"rank 1: its report .* cut short"):
        exchange_reports(tmp_path, Storage((0, 1), 0), list, Limit(1.0, "a key"))
    assert not tmp_path.exists()


def test_a_report_that_comes_later_is_seen_soon(tmp_path: Path) -> None:
    (tmp_path / ".0").touch()
    (tmp_path / ".1").write_text('{"files": []}')
    began = time.monotonic()
    threading.Timer(0.05, (tmp_path / ".1").rename, [tmp_path / "1.json"]).start()
    assert exchange_reports(tmp_path, Storage((0, 1), 0), list, Limit(60.0, "a key")) == {0: [], 1: []}
    assert time.monotonic() < began + 5


def test_a_rank_that_does_not_lead_a_storage_leaves_the_checkpoint_to_the_one_that_does(
    tmp_path: Path,
) -> None:
    hidden, reports = tmp_path / ".tag.saving", tmp_path / ".tag.saving.reports"
    hidden.mkdir()
    reports.mkdir()
    (reports / ".1").touch()
    of, storage, locks = (3, None), Storage((0, 1), 1), FolderLocks()
    _seal_later(_Writes(hidden, None), tmp_path / "tag", of, True, storage, locks, Limit(1.0, "a key"))
    assert [path.name for path in reports.iterdir()] == ["1.json"]
    assert not (tmp_path / "tag").exists() and not (tmp_path / "latest").exists()


def test_reports_of_a_save_that_was_cut_short_are_gone(tmp_path: Path) -> None:
    hidden, reports = tmp_path / ".tag.saving", tmp_path / ".tag.saving.reports"
    for folder in (hidden, reports):
        folder.mkdir()
        (folder / "1.json").write_text('{"files": []}')
    _make_room(tmp_path, hidden, FolderLocks(), (0, 1))
    assert [*hidden.iterdir()] == [] and sorted(path.name for path in reports.iterdir()) == [".0", ".1"]


def test_a_checkpoint_stays_where_the_new_one_cannot_take_its_name(tmp_path: Path) -> None:
    (tmp_path / "tag").mkdir()
    (tmp_path / "tag" / MANIFEST).touch()
    with pytest.raises(FileNotFoundError):
        give_its_name(tmp_path / ".tag.saving", tmp_path / "tag")
    assert [path.name for path in tmp_path.iterdir()] == ["tag"] and (tmp_path / "tag" / MANIFEST).exists()


def test_a_file_that_its_leader_sees_otherwise_is_not_sealed(tmp_path: Path) -> None:
    """Of a folder that hosts do not share, or whose views differ."""
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    reports = {0: [], 1: record_files(tmp_path, ["a"])}
    for seen in (b"123", None):
        path.write_bytes(seen) if seen else path.unlink()
        got = "3 bytes" if seen else "no such file"
        with pytest.raises(
            RingCheckpointError, match=f"expected 5 bytes of rank 1, got {got} on rank 0; share"
        ):
            _seal(tmp_path, Storage((0, 1), 0), reports, 1)
    assert not (tmp_path / MANIFEST).exists()


def test_a_copy_shares_what_the_original_shares() -> None:
    flat = torch.arange(6.0)
    state = {"a": flat[:3].view(3, 1), "b": [flat[3:], (flat.int(), 7)], "p": torch.nn.Parameter(flat[1:2])}
    state["sparse"] = flat.to_sparse()
    copied = HostCopy()(state)
    flat.zero_()
    state["sparse"].values().zero_()
    assert copied["sparse"].to_dense().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert copied["a"].flatten().tolist() == [0.0, 1.0, 2.0] and copied["b"][0].tolist() == [3.0, 4.0, 5.0]
    assert copied["a"].untyped_storage().data_ptr() == copied["b"][0].untyped_storage().data_ptr()
    assert copied["b"][1][1] == 7 and isinstance(copied["p"], torch.nn.Parameter)


def test_tensors_that_are_gone_after_their_copy_share_nothing() -> None:
    copy = HostCopy()
    copies = [copy(torch.full((1 << 12,), float(number))) for number in range(8)]  # at one address perhaps
    assert [x.unique().tolist() for x in copies] == [[float(number)] for number in range(8)]
