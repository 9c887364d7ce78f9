"""Damaged and unfinished checkpoints are never loaded: training goes on from the one before, to the last bit.

One run of six steps saves after two and four. Each case gets a copy, spoils something, and starts a new engine
on it; the losses must equal the uninterrupted run's exactly. Two gloo ranks, a ring of two, ZeRO 1 and 3.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ds_ring.checkpoint.manifest import accept_checkpoint
from tests.dist.checkpoint_ranks import (
    SIZE,
    background_writer,
    die_in_mid_save,
    load_and_train,
    load_refused,
    lose_a_hop,
    save_refused,
    train_and_save,
    two_hosts,
)
from tests.dist.deepspeed_ranks import json_config
from tests.dist.harness import first_in_time, run_ranks, run_ranks_collect

STEPS, OLDER, NEWER = 6, "global_step2", "global_step4"
UNFINISHED = f".{NEWER}.saving"
MODEL, SHARD = "*mp_rank_00_model_states.pt", "*zero_pp_rank_1_mp_rank_00_optim_states.pt"
MANIFEST = "ds_ring_manifest.json"
SECONDS = 1.0


class Whole(NamedTuple):
    """The uninterrupted run at one ZeRO stage."""

    config: dict[str, Any]
    folder: Path
    losses: list[float]


@pytest.fixture(scope="module", params=[1, 3], ids=["zero1", "zero3"])
def whole(request, rank_pool, tmp_path_factory) -> Whole:
    folder = tmp_path_factory.mktemp("checkpoints")
    config = json_config(2, SIZE.samples, request.param)
    first, second = rank_pool(2).run(train_and_save, config, str(folder), STEPS, (2, 4))
    assert first == second
    assert len(first) == STEPS
    return Whole(config, folder, first)


@pytest.fixture
def copied(whole: Whole, tmp_path: Path) -> Path:
    """A copy of the run's checkpoints, to be spoilt."""
    return Path(shutil.copytree(whole.folder, tmp_path / "checkpoints"))


def item(folder: Path, pattern: str) -> Path:
    return sorted(folder.glob(pattern))[-1]


def truncate(root: Path, pattern: str) -> str:
    path = item(root / NEWER, pattern)
    size = path.stat().st_size
    os.truncate(path, size // 2)
    return f"{path.name}: expected {size} bytes, got {size // 2}: truncated"


def flip_a_bit(root: Path, pattern: str, where: float = 0.5) -> str:
    """One bit, at `where` of the file."""
    path = item(root / NEWER, pattern)
    data = bytearray(path.read_bytes())
    data[int(len(data) * where)] ^= 4
    path.write_bytes(data)
    return f"{path.name}: damaged" if path.name == MANIFEST else f"{path.name}: expected sha256"


def remove(root: Path, pattern: str) -> str:
    path = item(root / NEWER, pattern)
    path.unlink()
    return "got none: saving was cut short" if path.name == MANIFEST else f"{path.name}: expected"


def append(root: Path) -> str:
    path = item(root / NEWER, SHARD)
    path.write_bytes(path.read_bytes() + b"\0")
    return f"{path.name}: expected {path.stat().st_size - 1} bytes"


def write_latest(root: Path, text: str) -> str:
    (root / "latest").write_text(text)
    shutil.rmtree(root / NEWER)
    return "expected a checkpoint, got none"


DAMAGE = {
    "model truncated": partial(truncate, pattern=MODEL),
    "optimizer shard truncated": partial(truncate, pattern=SHARD),
    "model emptied": lambda root: item(root / NEWER, MODEL).write_bytes(b"") or "got 0: truncated",
    "bit of the model": partial(flip_a_bit, pattern=MODEL),
    "first byte of the model": partial(flip_a_bit, pattern=MODEL, where=0.0),
    "bit of the optimizer": partial(flip_a_bit, pattern=SHARD),
    "bit near the optimizer's end": partial(flip_a_bit, pattern=SHARD, where=0.99),
    "model removed": partial(remove, pattern=MODEL),
    "optimizer shard removed": partial(remove, pattern=SHARD),
    "a byte too many": append,
    "manifest removed": partial(remove, pattern=MANIFEST),
    "manifest truncated": lambda root: truncate(root, MANIFEST) and f"{MANIFEST}: damaged",
    "bit of the manifest": partial(flip_a_bit, pattern=MANIFEST),
    "latest torn": partial(write_latest, text=""),
    "latest torn to zeros": partial(write_latest, text="\0\0\0"),
    "latest names nothing": partial(write_latest, text="global_step9"),
}


@pytest.mark.night
def test_an_undamaged_checkpoint_is_the_newest(whole, copied, rank_pool):
    for resumed in rank_pool(2).run(load_and_train, whole.config, str(copied), STEPS):
        assert (resumed.folder, resumed.state) == (NEWER, {"seen": 4})
        assert resumed.losses == whole.losses[4:]
        assert resumed.logged == ""


@pytest.mark.day("zero1-latest torn", "zero3-model removed")
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_seen_and_the_one_before_goes_on_exactly(whole, copied, rank_pool, damage):
    says = DAMAGE[damage](copied)
    results = rank_pool(2).run(load_and_train, whole.config, str(copied), STEPS)
    for resumed in results:
        assert (resumed.folder, resumed.state) == (OLDER, {"seen": 2})
        assert resumed.losses == whole.losses[2:], "not the curve of the uninterrupted run"
    assert says in results[0].logged
    assert f"trying {OLDER} instead" in results[0].logged


@pytest.mark.night
def test_four_ranks_and_two_replicas_take_the_same_one(rank_pool, tmp_path):
    """The shard of the last rank is spoilt; the ranks that did not read it go back as well."""
    config = json_config(2, SIZE.samples, 2)
    losses = rank_pool(4).run(train_and_save, config, str(tmp_path), STEPS, (2, 4))[0]
    flip_a_bit(tmp_path, "*zero_pp_rank_3_mp_rank_00_optim_states.pt")
    for resumed in rank_pool(4).run(load_and_train, config, str(tmp_path), STEPS):
        assert resumed.folder == OLDER
        assert resumed.losses == losses[2:]


@pytest.mark.day("zero1-latest")
@pytest.mark.parametrize("where", ["shard", "manifest", "latest"])
def test_a_rank_killed_in_mid_save(whole, tmp_path, rank_pool, where):
    """SIGKILL while a file is half-written: `latest` still names the one before, and that one is used."""
    shutil.copytree(whole.folder / OLDER, tmp_path / OLDER)
    (tmp_path / "latest").write_text(OLDER)
    outcomes = run_ranks_collect(die_in_mid_save, 2, whole.config, str(tmp_path), 4, where, grace_s=2)
    dead = 1 if where == "shard" else 0
    assert outcomes[dead].message == "exit code -9", outcomes[dead].report
    assert (tmp_path / "latest").read_text() == OLDER
    assert (tmp_path / NEWER / MANIFEST).exists() == (where == "latest")
    if where == "shard":
        sizes = {path.name: path.stat().st_size for path in (tmp_path / UNFINISHED).iterdir()}
        full = {path.name: path.stat().st_size for path in (whole.folder / NEWER).iterdir()}
        assert any(0.4 < size / full[name] < 0.6 for name, size in sizes.items()), "no half-written file"
    results = rank_pool(2).run(load_and_train, whole.config, str(tmp_path), STEPS)
    for resumed in results:
        assert resumed.folder == OLDER
        assert resumed.losses == whole.losses[2:]
    unused = f"not used: {UNFINISHED} (no manifest); taking {OLDER}"
    assert (unused in results[0].logged) == (where != "latest")


@pytest.mark.day("zero1")
def test_a_rank_killed_while_the_newest_is_written_anew(whole, copied, rank_pool):
    """`latest` names the very tag that was being written: the one of before is there, and whole."""
    outcomes = run_ranks_collect(die_in_mid_save, 2, whole.config, str(copied), 4, "shard", grace_s=2)
    assert outcomes[1].message == "exit code -9", outcomes[1].report
    assert (copied / "latest").read_text() == NEWER
    for resumed in rank_pool(2).run(load_and_train, whole.config, str(copied), STEPS):
        assert resumed.folder == NEWER
        assert resumed.losses == whole.losses[4:]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.day("3")
def test_after_a_hop_that_failed_no_step_is_made_and_nothing_is_saved(tmp_path, stage):
    """(The step added what happened to be in memory, and a checkpoint of it was sealed.)"""
    config = json_config(2, SIZE.samples, stage, gradient_accumulation_steps=2)
    for result in run_ranks(lose_a_hop, 2, config, str(tmp_path)):
        assert set(result.refusals) == {"step", "save", "background", "16 bit"}
        for said in result.refusals.values():
            assert said.startswith("RingPeerError: ring rank ") and "its device failed" in said, result
        assert not result.changed and result.steps == 1
        assert result.waits[0] == 0 and result.waits[1] == 1 < result.waits[2]  # where results last
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["global_step1"]


def refused(rank_pool, fn, *args):
    """Three tries for the time."""
    return first_in_time(
        lambda: rank_pool(2).run(fn, *args), lambda result: all(item.seconds < SECONDS for item in result)
    )


def check_refusals(result, error: str, *says: str) -> None:
    for one_rank in result:
        assert one_rank.error == error, one_rank
        assert one_rank.seconds < SECONDS, one_rank
        for words in says:
            assert words in one_rank.text, one_rank.text


@pytest.mark.alone
@pytest.mark.parametrize("damage", ["optimizer shard truncated", "bit of the model", "manifest removed"])
@pytest.mark.covering(1)
def test_a_damaged_tag_asked_for_is_an_error_on_every_rank(whole, copied, rank_pool, damage):
    says = DAMAGE[damage](copied)
    result = refused(rank_pool, load_refused, whole.config, str(copied), [NEWER, NEWER])
    check_refusals(result, "RingCheckpointError", says, NEWER, "the one asked for")


@pytest.mark.alone
@pytest.mark.day("zero3")
def test_no_checkpoint_that_verifies(whole, copied, rank_pool):
    says = DAMAGE["bit of the optimizer"](copied)
    item(copied / OLDER, MODEL).unlink()
    result = refused(rank_pool, load_refused, whole.config, str(copied), [None, None])
    check_refusals(result, "RingCheckpointError", says, NEWER, OLDER, "got damage in every checkpoint")


@pytest.mark.alone
@pytest.mark.day("zero1")
def test_ranks_that_ask_for_different_tags(whole, copied, rank_pool):
    result = refused(rank_pool, load_refused, whole.config, str(copied), [NEWER, OLDER])
    check_refusals(result, "RingMismatchError", "tag: expected the same on all ranks", NEWER, OLDER)


@pytest.mark.alone
@pytest.mark.day("zero1")
def test_ranks_that_save_different_tags(whole, tmp_path, rank_pool):
    places = [(str(tmp_path), tag) for tag in (NEWER, OLDER)]
    result = refused(rank_pool, save_refused, whole.config, places)
    check_refusals(result, "RingMismatchError", "tag: expected the same on all ranks", NEWER, OLDER)
    assert not list(tmp_path.iterdir())


@pytest.mark.alone
@pytest.mark.day("zero1")
def test_a_tag_that_is_not_there(whole, copied, rank_pool):
    result = refused(rank_pool, load_refused, whole.config, str(copied), ["best", "best"])
    check_refusals(
        result, "RingCheckpointMissingError", "best: expected a checkpoint, got none", f"{OLDER} are there"
    )


@pytest.mark.day("zero3")
def test_the_comparison_sees_a_lost_optimizer_state(whole, copied, rank_pool):
    options = {"load_optimizer_states": False}
    for resumed in rank_pool(2).run(load_and_train, whole.config, str(copied), STEPS, None, options):
        assert resumed.folder == NEWER
        assert resumed.losses != whole.losses[4:]


@pytest.mark.day("zero1")
def test_an_empty_folder_is_deepspeeds_none(whole, tmp_path, rank_pool):
    for resumed in rank_pool(2).run(load_and_train, whole.config, str(tmp_path), 1):
        assert (resumed.folder, resumed.state) == ("", None)
        assert resumed.losses == whole.losses[:1]


@pytest.mark.alone
@pytest.mark.day("zero1")
def test_hosts_that_do_not_share_the_folder(whole, tmp_path, rank_pool):
    places = [(str(tmp_path / name), "tag") for name in ("a", "b")]
    result = refused(rank_pool, save_refused, whole.config, places)
    check_refusals(
        result, "RingCheckpointError", "bytes of rank 1, got", "on rank 0", "use_node_local_storage"
    )


@pytest.mark.night
def test_node_local_storage_has_a_manifest_on_every_host(rank_pool, tmp_path):
    """Damage on one host's disk only, and both hosts go one back."""
    config = json_config(2, SIZE.samples, 1, checkpoint={"use_node_local_storage": True})
    folders = [str(tmp_path / name) for name in ("a", "b")]
    results = rank_pool(2).run(two_hosts, config, folders, STEPS)
    shared = rank_pool(2).run(train_and_save, json_config(2, SIZE.samples, 1), str(tmp_path / "c"), STEPS, ())
    for folder in folders:
        assert Path(folder, "latest").read_text() == f"global_step{STEPS - 1}"
    for resumed in results:
        assert resumed.folder == f"global_step{STEPS - 2}"
        assert resumed.losses == shared[0][STEPS - 2 :]
    assert "optim_states.pt: expected" in results[0].logged


@pytest.mark.alone
def test_a_writer_in_the_background_is_refused(rank_pool):
    result = refused(rank_pool, background_writer, json_config(2, SIZE.samples, 1))
    check_refusals(result, "RingConfigError", "are complete when save_checkpoint returns", "decoupled")


@pytest.mark.day("zero3")
def test_a_universal_checkpoint_is_made_and_loaded(whole, copied, rank_pool):
    """The manifest does not disturb DeepSpeed's converter."""
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", str(copied / NEWER), "--output_folder", str(copied / "universal")]
    command += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (copied / "latest_universal").write_text("universal")
    config = whole.config | {"checkpoint": {"load_universal": True}}
    results = rank_pool(2).run(load_and_train, config, str(copied), STEPS)
    for resumed in results:
        assert resumed.losses == pytest.approx(whole.losses[4:], rel=1e-6)
    assert "loaded unverified" in results[0].logged

    accept_checkpoint(copied, "universal")
    assert rank_pool(2).run(load_and_train, config, str(copied), 4)[0].logged == ""
    weights = sorted((copied / "universal" / "zero").rglob("fp32.pt"))[0]
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 4
    weights.write_bytes(data)
    result = refused(rank_pool, load_refused, config, str(copied), [None, None])
    check_refusals(result, "RingCheckpointError", "fp32.pt: expected sha256")
