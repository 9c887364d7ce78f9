"""Refusals of checkpoint code that need no ranks: what cannot be read, written or converted."""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_ring.checkpoint import load, pickles, resize
from ds_ring.checkpoint import manifest as manifest_module
from ds_ring.checkpoint import save as save_module
from ds_ring.checkpoint.compatible import (
    _model_problem,
    _optimizer_problem,
    _scheduler_problem,
    _stage_problem,
    _states_after_a_step,
    deepspeed_errors_typed,
    describe_training,
)
from ds_ring.checkpoint.manifest import (
    LOCK,
    MANIFEST,
    FolderLocks,
    Storage,
    Training,
    accept_checkpoint,
    changes_by_others,
    find_faults,
    make_latest,
    read_latest,
    record_files,
    verify_checkpoint,
    write_manifest,
)
from ds_ring.checkpoint.save import BackgroundSave, _Writes, exchange_reports, give_its_name, save_checkpoint
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


def trained(**changes: Any) -> Training:
    """What a checkpoint of AdamW at ZeRO 1 is of, with changes."""
    facts: dict[str, Any] = {
        "zero_stage": 1, "dtype": "float32", "wrapper": "DeepSpeedZeroOptimizer", "optimizer": "AdamW",
        "settings": (("betas", "lr"),), "states": ("exp_avg", "exp_avg_sq"), "scheduler": "StepLR",
        "scheduler_states": ("gamma", "last_epoch"), "shapes": {"a": (2, 3)}, "frozen": (),
    }  # fmt: skip
    return Training(**facts | changes)


MODULE: Any = SimpleNamespace(module=torch.nn.Linear(2, 2))
SGD: Any = SimpleNamespace(optimizer=torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], momentum=0.5))
BARE_DTYPE = {"zero_stage": 0, "wrapper": ""}
# What was saved, what loads it, and what is said; "" where it goes on.
# By night tests/dist/test_resume_otherwise.py compares with what DeepSpeed does.
ANOTHER_RUN: dict[str, tuple[Callable[[Training], str], dict[str, Any], str]] = {
    "weights of 3 at 1": (lambda mine: _stage_problem(trained(zero_stage=3), mine, False), {},
        'expected a checkpoint of ZeRO 1, got one of ZeRO 3; set "stage": 3 .* what its zero_to_fp32'),
    "weights of 0 at 1": (lambda mine: _stage_problem(trained(zero_stage=0), mine, False), {}, ""),
    "stage 0 at 1": (lambda mine: _stage_problem(trained(zero_stage=0), mine, True), {},
        "expected a checkpoint of ZeRO 1, got one of ZeRO 0; .*load_module_only=True"),
    "stage 2 at 1": (lambda mine: _stage_problem(trained(zero_stage=2), mine, True), {}, ""),
    "fp32 as bf16": (lambda mine: _stage_problem(trained(**BARE_DTYPE), mine, True),
        BARE_DTYPE | {"dtype": "bfloat16"},
        r"optimizer states of bfloat16 \(no wrapper\), got float32 \(no wrapper\); set the dtype back"),
    "weights of fp32 as bf16": (lambda mine: _stage_problem(trained(), mine, False),
        {"dtype": "bfloat16"}, ""),
    "a deeper model": (lambda mine: _model_problem(trained(), mine, MODULE, True),
        {"shapes": {"a": (2, 3), "b": (1,)}},
        "expected 2 tensors of the model, got 1 without b; build .*load_module_strict=False"),
    "another model": (lambda mine: _model_problem(trained(), mine, MODULE, True), {"shapes": {"b": (1,)}},
        "got 1 without b and with a; build"),
    "a deeper model's weights": (lambda mine: _model_problem(trained(), mine, MODULE, False),
        {"shapes": {"a": (2, 3), "b": (1,)}}, ""),
    "no optimizer": (lambda mine: _optimizer_problem(trained(frozen=("b",)), mine, ENGINE, False),
        {"optimizer": ""}, ""),
    "no optimizer saved": (lambda mine: _optimizer_problem(trained(optimizer=""), mine, ENGINE, False),
        {"frozen": ("b",)}, ""),
    "a frozen weight": (lambda mine: _optimizer_problem(trained(), mine, ENGINE, False), {"frozen": ("b",)},
        "expected 1 frozen parameters, got 0 frozen, of which differ b; freeze the same ones"),
    "groups": (lambda mine: _optimizer_problem(trained(), mine, ENGINE, False), {"settings": ((), ())},
        "expected 2 groups of parameters, got 1 of AdamW; make the same groups"),
    "AdamW as Adam": (lambda mine: _optimizer_problem(trained(), mine, ENGINE, False),
        {"optimizer": "Adam"}, ""),
    "AdamW as Adamax": (lambda mine: _optimizer_problem(trained(), mine, ENGINE, False),
        {"optimizer": "Adamax", "states": ("exp_inf",)},
        "expected the states of Adamax, exp_inf, got those of AdamW, exp_avg, exp_avg_sq; use AdamW again"),
    "a universal one as SGD": (lambda mine: _optimizer_problem(trained(), mine, SGD, True),
        {"optimizer": "SGD", "settings": (("momentum",),), "states": ()},
        "expected the states of SGD, momentum_buffer, got those of AdamW"),
    "a scheduler anew": (lambda mine: _scheduler_problem(trained(), mine), {"scheduler": ""}, ""),
    "another scheduler": (lambda mine: _scheduler_problem(trained(), mine),
        {"scheduler": "WarmupLR", "scheduler_states": ("last_batch_iteration", "x")},
        "of the scheduler WarmupLR, got those of StepLR, without last_batch_iteration; use that one again"),
    "a scheduler of like states": (lambda mine: _scheduler_problem(trained(), mine),
        {"scheduler": "CosineLR", "scheduler_states": ("eta_min", "last_epoch")}, ""),
}  # fmt: skip


@pytest.mark.parametrize("case", ANOTHER_RUN)
def test_a_run_of_another_kind(case: str) -> None:
    compare, changes, words = ANOTHER_RUN[case]
    problem = compare(trained(**changes))
    assert re.search(words, problem) if words else problem == ""


def test_an_engine_without_an_optimizer() -> None:
    engine: Any = SimpleNamespace(
        optimizer=None, lr_scheduler=None, module=torch.nn.Linear(2, 3),
        zero_optimization_stage=lambda: 0, get_data_types=lambda: (torch.bfloat16, None),
    )  # fmt: skip
    shapes = {"weight": (3, 2), "bias": (3,)}
    bare = {
        "wrapper": "",
        "optimizer": "",
        "settings": (),
        "states": (),
        "scheduler": "",
        "scheduler_states": (),
    }
    assert describe_training(engine) == trained(zero_stage=0, dtype="bfloat16", shapes=shapes, **bare)


def test_an_optimizer_that_no_defaults_make_is_not_compared() -> None:
    class Unusual(torch.optim.SGD):
        def __init__(self, params: Any, rule: str) -> None:
            super().__init__(params, lr=0.1)

    engine: Any = SimpleNamespace(optimizer=Unusual([torch.nn.Parameter(torch.ones(1))], "a"))
    assert _states_after_a_step(engine) == ()


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


def test_swapped_tensors_that_cannot_be_copied_are_named_later(tmp_path: Path) -> None:
    writes = _Writes(tmp_path, None)
    for name in ("a", "b"):
        assert writes._save_swapped(shutil.copytree, str(tmp_path / "none"), str(tmp_path / name)) is None
    with pytest.raises(RingCheckpointError, match=r"/a: cannot be written: FileNotFoundError: .*none"):
        writes.records()


def test_what_bears_a_checkpoints_name_is_removed_or_set_aside(tmp_path: Path) -> None:
    """Removed if it is a checkpoint, too; else it may be all that somebody has."""
    folder = sealed(tmp_path)
    for number in range(3):
        hidden = tmp_path / ".tag.saving"
        hidden.mkdir()
        (hidden / str(number)).touch()
        give_its_name(hidden, folder)
    assert {path.name: [*map(str, sorted(os.listdir(path)))] for path in tmp_path.iterdir()} == {
        "tag": ["2"], "tag.unsealed": ["0"], "tag.unsealed2": ["1"],
    }  # fmt: skip


def test_a_checkpoint_that_is_not_written_in_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The end of a script can only log it."""
    monkeypatch.setattr(save_module, "_REST_SECONDS", 0.0)
    wake, save = threading.Event(), BackgroundSave(Limit(0.01, "checkpoint_timeout_seconds"))
    save.start(wake.wait)
    save_module._wait_at_exit()
    wake.set()
    fault = r"not written within 0\.01 s \(checkpoint_timeout_seconds\)"
    assert re.search(f"the last checkpoint is not whole: .*{fault}", caplog.messages[-1])


def test_a_folder_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def acquire(self: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(manifest_module.FileLock, "acquire", acquire)
    FolderLocks().claim(tmp_path)
    assert re.search("has no locks .*No locks available.*: a second job", caplog.messages[-1])


def test_no_folder_to_save_into() -> None:
    under_way: Any = None
    with pytest.raises(RingConfigError, match="save_dir: expected the path of a folder, got ''; pass one"):
        save_checkpoint(ENGINE, "", locks=FolderLocks(), under_way=under_way)


def test_a_folder_without_a_universal_checkpoint(tmp_path: Path) -> None:
    words = "expected a file 'latest_universal', got none; pass a tag"
    (tmp_path / "saved").mkdir()
    with one_rank_mesh("gloo", tmp_path), pytest.raises(RingCheckpointMissingError, match=words):
        load._proposals(tmp_path / "saved", None, True, Storage((0,), 0))


def test_ranks_that_read_two_manifests() -> None:
    digests = [("a", "/here/1"), ("b", "/there/1")]
    load._require_one_checkpoint(Storage((0,), 0), digests)
    with pytest.raises(RingCheckpointError, match="one checkpoint, got /here/1 and /there/1 on 1; give"):
        load._require_one_checkpoint(Storage((0, 1), 0), digests)


def test_sizes_and_names_that_deepspeed_does_not_load(tmp_path: Path) -> None:
    engine: Any = SimpleNamespace(zero_optimization_stage=lambda: 3)
    states = {f"zero_pp_rank_{rank}_mp_rank_00_optim_states": {} for rank in range(2)}
    folder = sealed(tmp_path / "saved", **states)
    (folder / "zero").mkdir()
    torch.save({"zero_stage": 1}, folder / "zero" / "optimizer_state.pt")
    (tmp_path / "saved" / "latest").write_text("tag")
    with one_rank_mesh("gloo", tmp_path):
        with pytest.raises(RingCheckpointError, match=r"of 1 ranks, got one of 2; convert .* --world-size 1"):
            load._require_size(engine, folder, universal=False)
        with pytest.raises(RingCheckpointError, match="a universal checkpoint of ZeRO 3, got one of ZeRO 1"):
            load._require_size(engine, folder, universal=True)
        load._require_latest(tmp_path / "saved", "tag")
        with pytest.raises(RingCheckpointError, match=r"'latest' names .* that to be other, got tag"):
            load._require_latest(tmp_path / "saved", "other")


def test_what_another_program_puts_in_place_of_a_file(tmp_path: Path) -> None:
    """Of a folder a file; of a file a link, while the files are compared."""
    folder = sealed(tmp_path, a=1)
    size = (folder / "a.pt").stat().st_size
    (folder / "a.pt").unlink()
    (folder / "a.pt").symlink_to("/" * (size - 8) + "dev/zero")  # as long as the file was
    (fault,) = find_faults(folder)
    assert fault.startswith(f"{folder / 'a.pt'}: expected a regular file, got a symbolic link; put ")
    (tmp_path / "file").touch()
    (fault,) = changes_by_others(tmp_path / "file")
    assert fault.startswith(f"{tmp_path / 'file'}: expected a folder, got ")


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


def test_what_needs_no_conversion_or_has_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = sealed(tmp_path, mp_rank_00_model_states={})
    words = r"expected one of ZeRO 1, 2 or 3, got one without ZeRO's optimizer states \(ZeRO 0\); any number"
    with pytest.raises(RingCheckpointError, match=words):
        resize.resize_checkpoint(tmp_path, "tag")
    torch.save({}, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with pytest.raises(RingCheckpointError, match="tag: DeepSpeed cannot convert: KeyError"):
        resize._convert(folder, tmp_path / "new", 1)
    assert caplog.messages[-1].startswith("DeepSpeed's converter printed:")


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
