"""Refusals of checkpoint code that need no ranks: what cannot be read, written or converted."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_ring.checkpoint import load, pickles, resize
from ds_ring.checkpoint import manifest as manifest_module
from ds_ring.checkpoint.compatible import _states_after_a_step, deepspeed_errors_typed
from ds_ring.checkpoint.manifest import (
    LOCK,
    MANIFEST,
    FolderLocks,
    Storage,
    accept_checkpoint,
    make_latest,
    read_latest,
    record_files,
    verify_checkpoint,
    write_manifest,
)
from ds_ring.checkpoint.save import exchange_reports, save_checkpoint
from ds_ring.errors import RingCheckpointError, RingCheckpointMissingError, RingConfigError, RingPeerError
from ds_ring.limits import Limit
from tests.one_rank import one_rank_mesh

ENGINE: Any = SimpleNamespace(optimizer=None)


BARE = [KeyError("momentum"), AssertionError(), FileNotFoundError(2, "No such file")]
LOST = [RingPeerError(0, None, 1, "gone"), RuntimeError("Connection reset by peer")]


@pytest.mark.parametrize("error", BARE)
def test_a_bare_error_of_deepspeed_gets_a_type(tmp_path: Path, error: Exception) -> None:
    words = f"cannot load it: {type(error).__name__}.*load it with the JSON"
    with pytest.raises(RingCheckpointError, match=words), deepspeed_errors_typed(tmp_path, ENGINE, True):
        raise error


@pytest.mark.parametrize("error", LOST)
def test_a_lost_rank_is_no_checkpoint_of_another_kind(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)) as caught, deepspeed_errors_typed(tmp_path, ENGINE, True):
        raise error
    assert caught.value is error


def test_an_optimizer_that_has_lost_settings_is_named_before_its_first_step(tmp_path: Path) -> None:
    engine: Any = SimpleNamespace(optimizer=torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))
    words = "expected the settings of SGD, got some without momentum"
    with pytest.raises(RingCheckpointError, match=words), deepspeed_errors_typed(tmp_path, engine, True):
        del engine.optimizer.param_groups[0]["momentum"]


def test_states_are_those_of_the_optimizers_own_settings() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    for amsgrad, states in ((False, ()), (True, ("max_exp_avg_sq",))):
        engine: Any = SimpleNamespace(optimizer=torch.optim.AdamW([parameter], amsgrad=amsgrad))
        assert _states_after_a_step(engine) == ("exp_avg", "exp_avg_sq", *states, "step")


def test_a_members_stand_in_names_stages_alone() -> None:
    with pytest.raises(Exception, match=r"GLOBAL builtins\.getattr"):
        pickles._member(torch.Tensor, "numpy")


def test_what_is_no_file_is_not_accepted(tmp_path: Path) -> None:
    folder = tmp_path / "tag"
    folder.mkdir()
    os.mkfifo(folder / "a.pt")
    with pytest.raises(RingCheckpointError, match="expected a regular file, got a FIFO"):
        accept_checkpoint(tmp_path, "tag")


def test_what_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(RingCheckpointError, match="latest: cannot be read: Not a directory"):
        read_latest(path)

    def fail(folder: Path) -> list[str]:
        raise OSError(5, "Input/output error", str(folder))

    (tmp_path / "tag").mkdir()
    monkeypatch.setattr(manifest_module, "changes_by_others", fail)
    with pytest.raises(RingCheckpointError, match="tag: cannot be read: Input/output error"):
        verify_checkpoint(tmp_path, "tag")


def sealed(root: Path, **files: object) -> Path:
    folder = root / "tag"
    folder.mkdir(parents=True)
    for name, state in files.items():
        torch.save(state, folder / f"{name}.pt")
    write_manifest(folder, record_files(folder, [path.name for path in folder.iterdir()]), 4)
    return folder


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    sealed(tmp_path)
    (tmp_path / "latest" / "full").mkdir(parents=True)
    with pytest.raises(RingCheckpointError, match=r"latest.* cannot be written: Is a directory"):
        make_latest(tmp_path, "tag")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / LOCK).symlink_to(tmp_path / "nothing")
    with pytest.raises(OSError, match="symbolic links"):
        FolderLocks().claim(tmp_path / "other")
    assert not (tmp_path / "nothing").exists()


def test_no_folder_to_save_into() -> None:
    under_way: Any = None
    with pytest.raises(RingConfigError, match="save_dir: expected the path of a folder, got ''; pass one"):
        save_checkpoint(ENGINE, "", locks=FolderLocks(), under_way=under_way)


def test_a_folder_without_a_universal_checkpoint(tmp_path: Path) -> None:
    words = "expected a file 'latest_universal', got none; pass a tag"
    (tmp_path / "saved").mkdir()
    with one_rank_mesh("gloo", tmp_path), pytest.raises(RingCheckpointMissingError, match=words):
        load._proposals(tmp_path / "saved", None, True, Storage((0,), 0))


def test_reports_of_a_save_in_the_background(tmp_path: Path) -> None:
    limit = Limit(0.1, "checkpoint_timeout_seconds")

    def fail() -> list[Any]:
        raise OSError(28, "No space left on device")

    for rank in (0, 1):
        (tmp_path / f".{rank}").touch()
    with pytest.raises(RingCheckpointError, match=r"rank 1: OSError: .*No space left"):
        exchange_reports(tmp_path, Storage((0, 1), 1), fail, limit)
    (tmp_path / "1.json").unlink()
    with pytest.raises(RingCheckpointError, match=r"expected a report in .*none of 1"):
        exchange_reports(tmp_path, Storage((0, 1), 0), list, limit)


def stage1(states: dict[str, Any]) -> dict[str, Any]:
    return {"zero_stage": 1, "base_optimizer_state": {"state": {0: states}}}


def stage3(*groups: dict[str, Any]) -> dict[str, Any]:
    adam = {"exp_avg": 1, "exp_avg_sq": 2, "step": 3}
    return {"zero_stage": 3, "optimizer_state_dict": {"state": {0: adam}, "param_groups": list(groups)}}


FROZEN = {"frozen_param_shapes": {"a": 1}}
CANNOT_BE_CONVERTED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another optimizer": (stage1({"momentum_buffer": 1}), {},
        r"with the states .*, got \['momentum_buffer'\]"),
    "no step yet": (stage1({}), {}, "expected an optimizer .*, got none"),
    "groups at ZeRO 3": (stage3({"lr": 1}, {"lr": 2}), {}, "expected equal groups at ZeRO 3, got 2"),
    "frozen weights at ZeRO 3": (stage3({"lr": 1}), FROZEN, "no frozen weights at ZeRO 3"),
    "another program's": ({"zero_stage": "x"}, {}, "expected DeepSpeed's states, got ValueErr"),
    "no states": ({}, {}, "expected DeepSpeed's states, got KeyError: 'zero_stage'"),
}  # fmt: skip


@pytest.mark.parametrize("case", CANNOT_BE_CONVERTED)
def test_what_deepspeed_would_convert_to_something_else(tmp_path: Path, case: str) -> None:
    optimizer, model, words = CANNOT_BE_CONVERTED[case]
    states = {"zero_pp_rank_0_mp_rank_00_optim_states": {"optimizer_state_dict": optimizer}}
    sealed(tmp_path, mp_rank_00_model_states=model, **states)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RingCheckpointError, match=words):
        resize.resize_checkpoint(tmp_path, "tag")
    assert [path for path in sorted(tmp_path.rglob("*")) if not path.name.startswith(".")] == before


def test_where_a_conversion_cannot_be_written_is_named(tmp_path: Path) -> None:
    """Of the folder's lock here; below a file there, which DeepSpeed's converter meets."""
    optimizer = stage3({"lr": 1}) | {"fp32_flat_groups": [torch.zeros(0)]}
    states = {"zero_pp_rank_0_mp_rank_00_optim_states": {"optimizer_state_dict": optimizer}}
    folder = sealed(tmp_path, zero_pp_rank_0_mp_rank_00_model_states={"param_shapes": [{}]}, **states)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        resize._convert(folder, tmp_path / "file" / "new", 1)
    (tmp_path / LOCK).symlink_to(tmp_path / "nothing")
    with pytest.raises(RingCheckpointError, match=r"cannot be written: .*symbolic links"):
        resize.resize_checkpoint(tmp_path, "tag")


def test_sizes_are_asked_of_deepspeeds_states_alone(tmp_path: Path) -> None:
    folder = sealed(tmp_path, mp_rank_00_model_states={"ds_config": 3, "dp_world_size": 1})
    with pytest.raises(RingCheckpointError, match="expected DeepSpeed's states, got TypeError"):
        resize.count_step_samples(tmp_path, "tag")
    (folder / "zero").mkdir()
    torch.save(torch.nn.Linear, folder / "zero" / "optimizer_state.pt")
    with (
        pickles.weights_only_below(folder),
        pytest.raises(RingCheckpointError, match="Linear, which loading"),
    ):
        resize.read_stage(folder)
    assert (folder / MANIFEST).exists()
