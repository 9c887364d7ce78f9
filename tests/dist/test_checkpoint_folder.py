"""The folder of a job's checkpoints: full disks, read-only disks, a second job, strangers' files, planted code.

Two gloo ranks, a ring of two; whatever happens, every rank raises the same error and the checkpoint before is
loaded. What the manifest sees by itself stands in tests/unit/checkpoint/test_manifest.py.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_ring import RingMesh
from ds_ring.checkpoint.manifest import (
    MANIFEST,
    OWNER,
    Storage,
    files_in,
    find_storage,
    read_latest,
    record_files,
    verify_checkpoint,
    write_manifest,
)
from ds_ring_launcher.cli import main
from tests.clock import wait_until
from tests.dist.checkpoint_ranks import (
    SIZE,
    Planted,
    go_back_and_save,
    hold_the_folder,
    load_and_train,
    load_refused,
    save_on,
    save_with_state,
    train_and_save,
)
from tests.dist.deepspeed_ranks import json_config
from tests.dist.harness import RankPool
from tests.machine import make_read_only, small_disk

OLDER, NEWER = "global_step2", "global_step4"
ERROR = "RingCheckpointError"


def config(stage: int) -> dict[str, Any]:
    return json_config(2, SIZE.samples, stage)


@pytest.fixture(scope="module")
def saved(rank_pool, tmp_path_factory) -> Callable[[int], tuple[Path, list[float]]]:
    """`saved(stage)`: a folder with checkpoints after steps 2 and 4, and the losses of six steps."""
    built: dict[int, tuple[Path, list[float]]] = {}

    def of(stage: int) -> tuple[Path, list[float]]:
        if stage not in built:
            folder = tmp_path_factory.mktemp(f"zero{stage}")
            built[stage] = folder, rank_pool(2).run(train_and_save, config(stage), str(folder), 6, (2, 4))[0]
        return built[stage]

    return of


def size_of(folder: Path) -> int:
    """In whole pages, as the disks of these tests count."""
    return sum((path.stat().st_size // 4096 + 1) * 4096 for path in folder.rglob("*"))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """`disk(bytes)`: a file system of that size, mounted."""
    mounted = []

    def of(size_bytes: int) -> Path:
        mounted.append(small_disk(tmp_path, size_bytes))
        mounted[-1].__enter__()
        return tmp_path

    yield of
    for item in mounted:
        item.__exit__(None, None, None)


def check(result: list[Any], *words: str) -> None:
    for item in result:
        assert item.error == ERROR, item
        assert all(word in item.text for word in words), item.text


def copy_older(saved, stage: int, target: Path) -> list[float]:
    """Put the older checkpoint there as the newest; return the losses of the run."""
    folder, losses = saved(stage)
    shutil.copytree(folder / OLDER, target / OLDER)
    (target / "latest").write_text(OLDER)
    return losses


def check_goes_on(rank_pool, stage: int, folder: Path, losses: list[float], tag: str) -> None:
    """The checkpoint before is the one that `latest` names, is loaded, and training goes on exactly."""
    assert (folder / "latest").read_text() == tag
    for resumed in rank_pool(2).run(load_and_train, config(stage), str(folder), 6):
        assert resumed.folder == tag
        assert resumed.losses == losses[int(tag.removeprefix("global_step")) :]
        assert resumed.logged == ""  # nothing unfinished lies about


@pytest.mark.night
@pytest.mark.needs("mounts")
@pytest.mark.parametrize("tag", [NEWER, OLDER], ids=["another tag", "the same tag"])
def test_a_full_disk_leaves_the_checkpoint_before(rank_pool, saved, disk, tag):
    """Room for one checkpoint and a half: DeepSpeed alone leaves the other rank in a barrier."""
    small = disk(size_of(saved(3)[0] / OLDER) * 3 // 2 + 4 * 4096)
    losses = copy_older(saved, 3, small)
    check(rank_pool(2).run(save_on, config(3), str(small), tag), str(small), "cannot be written")
    assert not list(small.glob(".*.saving")), "what was written of it is left, and the disk stays full"
    check_goes_on(rank_pool, 3, small, losses, OLDER)


@pytest.mark.night
def test_a_limit_of_file_sizes_does_the_same(rank_pool, saved, tmp_path):
    """On rank 1 only: where no disk can be mounted, and as on a host whose own disk is full."""
    losses = copy_older(saved, 1, tmp_path)
    result = rank_pool(2).run(save_on, config(1), str(tmp_path), NEWER, most_bytes=5000)
    check(result, "rank 1: ", "optim_states.pt: cannot be written")
    check_goes_on(rank_pool, 1, tmp_path, losses, OLDER)


@pytest.mark.needs("mounts")
def test_a_read_only_folder_is_an_error_on_every_rank(rank_pool, saved, disk):
    small = disk(1 << 24)
    losses = copy_older(saved, 1, small)
    make_read_only(small)
    check(rank_pool(2).run(save_on, config(1), str(small), NEWER), "rank 0: ", "Read-only file system")
    check_goes_on(rank_pool, 1, small, losses, OLDER)


def test_a_second_job_in_the_same_folder_is_refused(rank_pool, tmp_path):
    """Until the first has ended, by kill -9 even, and though a process that it forked lives on."""
    with RankPool(2) as first:
        pid, child = first.run(hold_the_folder, config(1), str(tmp_path))[0]
        try:
            result = rank_pool(2).run(save_on, config(1), str(tmp_path), "second")
            check(result, "expected no other job that saves here", f"process {pid} on ")
            assert (tmp_path / "latest").read_text() == "first"
            assert first.run(hold_the_folder, config(1), str(tmp_path))[0][0] == pid, "the same job may"
            first.discard()
            result = rank_pool(2).run(save_on, config(1), str(tmp_path), "second")
            assert [item.error for item in result] == ["", ""], result
            assert (tmp_path / "latest").read_text() == "second"
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("background", [False, True])
def test_planted_links_are_not_written_through(rank_pool, tmp_path, background):
    """Of every name that a save writes to: what they lead to stays as it is."""
    victim, folder = tmp_path / "victim", tmp_path / "checkpoints"
    victim.write_text("precious")
    folder.mkdir()
    names = (OWNER, "zero_to_fp32.py", "zero_to_torch.py")
    for name in names if background else ("latest", *names):  # read_latest follows none
        (folder / name).symlink_to(victim)
    result = rank_pool(2).run(save_on, config(1), str(folder), "tag", background=background)
    assert [item.error for item in result] == ["", ""], result
    rank_pool(2).resume()
    wait_until(lambda: read_latest(folder) == "tag", 20.0)
    assert victim.read_text() == "precious"
    assert not [path for path in folder.rglob("*") if path.is_symlink()]
    assert os.access(folder / "zero_to_fp32.py", os.X_OK)
    verify_checkpoint(folder)

    (tmp_path / "elsewhere").mkdir()
    for name in (".saving", ".saving.reports"):
        (folder / f".new{name}").symlink_to(tmp_path / "elsewhere")
        result = rank_pool(2).run(save_on, config(1), str(folder), "new", background=background)
        (folder / f".new{name}").unlink()
        if background or name == ".saving":
            check(result, "rank 0: ", "File exists")
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.night
def test_latest_goes_back_by_a_command_alone(rank_pool, saved, tmp_path, capsys):
    """(A run that began anew set it from step 4 to step 1, and replaced the first one's checkpoint.)"""
    folder, losses = saved(1)
    copy = Path(shutil.copytree(folder, tmp_path / "checkpoints"))
    files = sorted(path.relative_to(copy) for path in copy.rglob("*"))
    for background in (False, True):
        result = rank_pool(2).run(save_on, config(1), str(copy), OLDER, background=background, steps=1)
        check(result, "expected to save after step 4 or later", "names global_step4, got step 1")
    assert sorted(path.relative_to(copy) for path in copy.rglob("*")) == files
    check_goes_on(rank_pool, 1, copy, losses, NEWER)

    command = ["verify-checkpoint", str(copy), "--make-latest", "--tag"]
    assert main(command[:-1]) == 2 and "--make-latest: expected --tag" in capsys.readouterr().err
    assert main([*command, "nothing"]) == 3 and (copy / "latest").read_text() == NEWER
    assert main([*command, OLDER]) == 0
    check_goes_on(rank_pool, 1, copy, losses, OLDER)
    second = tmp_path / "of nobody"  # the ranks of the pool hold the first one
    shutil.copytree(copy, second, ignore=lambda *_: [".ds_ring_lock"])
    result = rank_pool(2).run(save_on, config(1), str(second), "global_step3", steps=3)
    assert [item.error for item in result] == ["", ""] and (second / "latest").read_text() == "global_step3"
    assert main([*command[:1], str(second), *command[2:], NEWER]) == 1
    assert "expected no other job that saves here" in capsys.readouterr().err


def test_a_run_that_went_back_past_damage_saves_on(rank_pool, saved, tmp_path):
    """What `latest` names is lost: nothing is set back."""
    copy = Path(shutil.copytree(saved(1)[0], tmp_path / "checkpoints"))
    path = sorted((copy / NEWER).glob("*optim_states.pt"))[0]
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    result = rank_pool(2).run(go_back_and_save, config(1), str(copy))
    assert [item.error for item in result] == ["", ""], result
    assert (copy / "latest").read_text() == "global_step3"


def plant_and_seal(folder: Path, pattern: str) -> None:
    """As somebody who may write there would: the sums in the manifest are right."""
    plant_in(folder, pattern)
    (folder / MANIFEST).unlink()
    write_manifest(folder, record_files(folder, list(files_in(folder))), 4)


def plant_in(folder: Path, pattern: str) -> None:
    """Code in a pickled file."""
    path = sorted(folder.rglob(pattern))[-1]
    state = torch.load(path, weights_only=False)
    state["planted"] = Planted(str(folder.parent / "was run"))
    torch.save(state, path)


def add_a_shard(folder: Path) -> None:
    shutil.copy(sorted(folder.glob("*model_states.pt"))[0], folder / "mp_rank_01_model_states.pt")


def put_a_fifo(folder: Path) -> None:
    path = sorted(folder.glob("*optim_states.pt"))[-1]
    path.unlink()
    os.mkfifo(path)


STRANGERS = {
    "code in the model": (1, partial(plant_and_seal, pattern="*model_states.pt"), "got posix.system, which loading would run"),
    "code in the optimizer": (3, partial(plant_and_seal, pattern="*optim_states.pt"), "got posix.system, which loading would run"),
    "one file more": (1, add_a_shard, "mp_rank_01_model_states.pt: expected only the files that"),
    "a FIFO": (3, put_a_fifo, "expected a regular file, got a FIFO"),
    "latest elsewhere": (1, lambda folder: (folder.parent / "latest").write_text("../other/global_step4"),
        "expected the plain name of a checkpoint's folder, got '../other/global_step4'"),
}  # fmt: skip


@pytest.mark.parametrize("stranger", STRANGERS)
def test_what_no_crash_leaves_is_refused_on_every_rank(rank_pool, saved, tmp_path, stranger):
    """And nothing is run, followed or waited for; going one back would not help against it."""
    stage, plant, words = STRANGERS[stranger]
    copy = Path(shutil.copytree(saved(stage)[0], tmp_path / "checkpoints"))
    plant(copy / NEWER)
    check(rank_pool(2).run(load_refused, config(stage), str(copy), [None, None]), words)
    assert not (copy / "was run").exists()


@pytest.mark.day("optimizer_state.pt")
@pytest.mark.parametrize("pattern", ["fp32.pt", "optimizer_state.pt"])
def test_code_in_a_universal_checkpoint_is_not_run(rank_pool, universal, tmp_path, pattern):
    """It has no manifest: what its files hold is looked at all the same."""
    copy = Path(shutil.copytree(universal, tmp_path / "checkpoints"))
    plant_in(copy / "universal", pattern)
    result = rank_pool(2).run(
        load_refused, config(1) | {"checkpoint": {"load_universal": True}}, str(copy), [None, None]
    )
    check(result, f"{pattern}: ", "got posix.system, which loading would run")
    assert not (copy / "was run").exists()


@pytest.fixture(scope="module")
def universal(saved, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("universal")
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", str(saved(1)[0] / NEWER), "--output_folder", str(folder / "universal")]
    command += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "latest_universal").write_text("universal")
    return folder


def test_a_client_state_that_could_not_be_loaded_is_refused_when_it_is_saved(rank_pool, tmp_path):
    result = rank_pool(2).run(save_with_state, config(1), str(tmp_path), "a path")
    check(result, "got pathlib.PosixPath, which loading would run", "add_safe_globals")
    assert not (tmp_path / "latest").exists()
    result = rank_pool(2).run(save_with_state, config(1), str(tmp_path), "a lambda")
    check(result, "cannot be written: ")
    result = rank_pool(2).run(save_with_state, config(1), str(tmp_path), "random states")
    assert [item.error for item in result] == ["", ""], result


@pytest.mark.night
def test_zero_3_takes_weights_from_latest_only(rank_pool, saved, tmp_path):
    """Without optimizer states DeepSpeed reads those that `latest` names, not those of the tag."""
    copy = Path(shutil.copytree(saved(3)[0], tmp_path / "checkpoints"))
    options = {"load_optimizer_states": False}
    result = rank_pool(2).run(load_refused, config(3), str(copy), [OLDER, OLDER], options)
    check(result, f"expected that to be {OLDER}, got {NEWER}")


def storage_of(rank: int, world_size: int, local_ranks: list[int]) -> tuple[Storage, Storage]:
    RingMesh.from_world(world_size).close()
    return find_storage(local_ranks[rank], node_local=False), find_storage(local_ranks[rank], node_local=True)


def test_ranks_of_a_host_share_its_own_storage(rank_pool: RankPool) -> None:
    """Three ranks on the first host, one on the second."""
    for rank, (shared, local) in enumerate(rank_pool(4).run(storage_of, [0, 1, 2, 0])):
        assert shared == Storage((0, 1, 2, 3), rank)
        assert local == Storage((0, 1, 2) if rank < 3 else (3,), rank)
        assert local.leads == (rank in (0, 3))
