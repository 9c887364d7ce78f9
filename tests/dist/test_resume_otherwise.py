"""Loading what another run saved: ranks that read different checkpoints, another stage, dtype, optimizer or model.

What DeepSpeed can load goes on with the losses of the run that saved it, or trains; all else is one typed error on
every rank, before anything is read. Two gloo ranks, a ring of two.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from ds_ring.checkpoint.manifest import MANIFEST, read_manifest, verify_checkpoint
from ds_ring.checkpoint.resize import resize_checkpoint
from tests.dist.checkpoint_ranks import SIZE, train_to
from tests.dist.deepspeed_ranks import build_model, json_config, skip_without, start_deepspeed
from tests.dist.harness import Failure, catch_failure

LR = 1e-2


class Setup(NamedTuple):
    """What an engine is made of."""

    stage: int = 1
    dtype: str = "fp32"
    optimizer: str = "adamw"
    scheduler: str = ""
    model: str = ""


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=LR),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=LR),
    "adamax": lambda model: torch.optim.Adamax(model.parameters(), lr=LR),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=LR),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=LR),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=LR),
    "groups": lambda model: torch.optim.AdamW(
        [{"params": [p for p in model.parameters() if (p.ndim > 1) == big]} for big in (True, False)], lr=LR
    ),
}
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
}
JSON_SCHEDULERS = {
    "warmup": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
    "decay": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 50}},
}


def engine_of(setup: Setup, universal: bool = False) -> Any:
    start_deepspeed()
    import ds_ring
    import ds_ring.models.attention  # registers the attention implementation

    extra: dict[str, Any] = {"checkpoint": {"load_universal": True}} if universal else {}
    if setup.dtype != "fp32":
        skip_without(setup.dtype)
        extra[setup.dtype] = {"enabled": True}
    if setup.scheduler in JSON_SCHEDULERS:
        extra["scheduler"] = JSON_SCHEDULERS[setup.scheduler]
    sizes = {"wide": {"hidden": 32}, "deep": {"layers": 2}}.get(setup.model, {})
    model = build_model(SIZE._replace(**sizes), "ds_ring")
    if setup.model == "frozen":
        next(model.parameters()).requires_grad_(False)
    optimizer = OPTIMIZERS[setup.optimizer](model)
    inputs: dict[str, Any] = {"optimizer": optimizer}
    if setup.scheduler in SCHEDULERS:
        inputs["lr_scheduler"] = SCHEDULERS[setup.scheduler](optimizer)
    return ds_ring.initialize(
        model=model, config=json_config(2, SIZE.samples, setup.stage, **extra), **inputs
    )[0]


def save(rank: int, world_size: int, setup: Setup, folder: str, steps: int = 2) -> list[float]:
    """Train, save, and train two steps more: their losses."""
    engine = engine_of(setup)
    train_to(engine, steps)
    engine.save_checkpoint(folder)
    return train_to(engine, steps + 2)


def load(
    rank: int,
    world_size: int,
    setup: Setup,
    folders: list[str],
    tags: tuple[str | None, str | None] = (None, None),
    universal: bool = False,
    **options: Any,
) -> Failure | list[float]:
    """Load `folders[rank]` and train two steps: their losses, or what was raised, by training, too."""
    engine = engine_of(setup, universal)
    if "ranks_differ_in" in options:
        options = {options["ranks_differ_in"]: bool(rank)}
    losses: list[float] = []

    def load_and_train() -> None:
        engine.load_checkpoint(folders[rank], tags[rank], **options)
        losses.extend(train_to(engine, engine.global_steps + 2))

    failure = catch_failure(load_and_train)
    return failure if failure.error else losses


@pytest.fixture(scope="module")
def saved(rank_pool, tmp_path_factory) -> Callable[..., tuple[Path, list[float]]]:
    """`saved(setup)`: a folder with a checkpoint after two steps, and the losses of two steps after it."""
    built: dict[tuple[Any, ...], tuple[Path, list[float]]] = {}

    def of(setup: Setup, copy: int = 0, steps: int = 2) -> tuple[Path, list[float]]:
        key = (setup, copy, steps)
        if key not in built:
            folder = tmp_path_factory.mktemp("saved")
            built[key] = folder, rank_pool(2).run(save, setup, str(folder), steps)[0]
        return built[key]

    return of


def loaded(rank_pool, setup: Setup, folders: Path | list[Path], *args: Any, **options: Any) -> list[Any]:
    both = [folders, folders] if isinstance(folders, Path) else folders
    return rank_pool(2).run(load, setup, [str(item) for item in both], *args, **options)


def check(result: list[Any], words: str, error: str = "RingCheckpointError") -> None:
    for item in result:
        assert isinstance(item, Failure), f"it went on: {item}"
        assert item.error == error and words in item.text, item


# Ranks that read something else.


@pytest.mark.night
@pytest.mark.situation("checkpoints", "ranks load different checkpoints of one tag")
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("tag", [None, "global_step2"])
def test_ranks_that_read_two_whole_checkpoints(rank_pool, saved, stage, tag) -> None:
    """(Each went on from its own: rank 0 trained on A and rank 1 on B.)"""
    folders = [saved(Setup(stage), copy)[0] for copy in (0, 1)]
    result = loaded(rank_pool, Setup(stage), folders, (tag, tag))
    check(result, f"expected one checkpoint, got {folders[0]}/global_step2 and ")
    assert all(f"{folders[1]}/global_step2 on 1; give all ranks one path" in item.text for item in result)


def test_the_same_checkpoint_under_two_paths_is_one(rank_pool, saved, tmp_path) -> None:
    folder, losses = saved(Setup())
    copy = Path(shutil.copytree(folder, tmp_path / "mounted elsewhere"))
    assert loaded(rank_pool, Setup(), [folder, copy]) == [losses, losses]


@pytest.mark.situation("checkpoints", "one rank does not see the folder of checkpoints")
@pytest.mark.parametrize("blind", [0, 1])
@pytest.mark.parametrize("tag", [None, "global_step2"])
def test_a_folder_that_one_rank_does_not_see(rank_pool, saved, tmp_path, blind, tag) -> None:
    """(Where it was rank 0, all ranks began afresh after a warning.)"""
    folders = [saved(Setup())[0]] * 2
    folders[blind] = tmp_path
    result = loaded(rank_pool, Setup(), folders, (tag, tag))
    check(result, "expected every rank to see its folder" if tag else "expected the same tag on all ranks")
    assert all(f"rank {blind}" in item.text for item in result)


OPTIONS = (
    "load_optimizer_states", "load_lr_scheduler_states", "load_module_only", "load_module_strict",
)  # fmt: skip


@pytest.mark.situation("checkpoints", "ranks load with different options")
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.day(OPTIONS[0])
def test_ranks_that_load_with_different_options(rank_pool, saved, option) -> None:
    result = loaded(rank_pool, Setup(), saved(Setup())[0], ranks_differ_in=option)
    check(result, f"load_checkpoint: expected one {option}, got False", "RingMismatchError")


# Another stage, dtype, optimizer, scheduler or model: what was saved, what loads it, and what is said; "" where
# it goes on.

ALONE, STATES = {"load_module_only": True}, {"load_optimizer_states": False}
TABLE: dict[str, tuple[Setup, Setup, dict[str, Any], str]] = {
    "stage 1 at 2": (Setup(1), Setup(2), {}, ""),
    "stage 2 at 1, bf16": (Setup(2, "bf16"), Setup(1, "bf16"), {}, ""),
    "stage 0 at 1": (Setup(0), Setup(1), {}, "expected a checkpoint of ZeRO 1, got one of ZeRO 0; set"),
    "stage 2 at 0": (Setup(2), Setup(0), {}, "expected a checkpoint of ZeRO 0, got one of ZeRO 2; set"),
    "stage 0 at 3": (Setup(0), Setup(3), {}, "expected a checkpoint of ZeRO 3, got one of ZeRO 0; set"),
    "stage 3 at 1": (Setup(3), Setup(1), {}, "load what its zero_to_fp32 makes"),
    "weights of 3 at 2": (Setup(3), Setup(2), ALONE, "expected a checkpoint of ZeRO 2, got one of ZeRO 3"),
    "weights of 1 at 3": (Setup(1), Setup(3), STATES, "expected a checkpoint of ZeRO 3, got one of ZeRO 1"),
    "weights of 0 at 2": (Setup(0), Setup(2), ALONE, ""),
    "weights of 2 at 0, bf16": (Setup(2), Setup(0, "bf16"), STATES, ""),
    "weights in bf16 at 3": (Setup(3), Setup(3, "bf16"), ALONE, ""),
    "bf16 as fp32": (Setup(1, "bf16"), Setup(1), {}, "expected optimizer states of float32"),
    "fp32 as bf16": (Setup(0), Setup(0, "bf16"), {}, "got float32 (no wrapper); set the dtype back"),
    "fp32 as bf16 at 3": (Setup(3), Setup(3, "bf16"), {}, "load_module_only=True"),
    "AdamW as Adam": (Setup(), Setup(optimizer="adam"), {}, ""),
    "AdamW as SGD": (Setup(), Setup(optimizer="sgd"), {}, "expected the settings of SGD, got those of AdamW,"),
    "SGD as AdamW at 0": (Setup(0, "fp32", "sgd"), Setup(0), {}, "without amsgrad, betas"),
    "SGD as AdamW at 3": (Setup(3, "fp32", "sgd"), Setup(3), {}, "use SGD again, or load the weights alone"),
    "AdamW as RMSprop": (Setup(), Setup(optimizer="rmsprop"), {}, "settings of RMSprop"),
    "AdamW as Adagrad": (Setup(3), Setup(3, optimizer="adagrad"), {}, "settings of Adagrad"),
    "AdamW as Adamax": (Setup(0), Setup(0, optimizer="adamax"), {}, "expected the states of Adamax, exp_avg, exp_inf"),
    "AdamW as Adamax at 1": (Setup(), Setup(optimizer="adamax"), {}, "got those of AdamW, exp_avg, exp_avg_sq"),
    "SGD with momentum": (Setup(1, "fp32", "sgd"), Setup(optimizer="momentum"), {}, ""),
    "SGD without momentum": (Setup(0, "fp32", "momentum"), Setup(0, optimizer="sgd"), {}, ""),
    "weights for SGD": (Setup(), Setup(optimizer="sgd"), ALONE, ""),
    "groups": (Setup(), Setup(optimizer="groups"), {}, "expected 2 groups of parameters, got 1 of AdamW"),
    "no groups": (Setup(3, "fp32", "groups"), Setup(3), {}, "make the same groups"),
    "no scheduler": (Setup(), Setup(scheduler="warmup"), {}, "got a checkpoint without any; pass load_lr"),
    "no scheduler wanted": (Setup(scheduler="lambda"), Setup(), {}, ""),
    "another scheduler": (Setup(scheduler="warmup"), Setup(scheduler="decay"), {}, ""),
    "torch's others": (Setup(scheduler="step"), Setup(scheduler="cosine"), {}, ""),
    "torch's as DeepSpeed's": (Setup(scheduler="step"), Setup(scheduler="warmup"), {}, "without last_batch_iteration"),
    "DeepSpeed's as torch's": (Setup(scheduler="warmup"), Setup(scheduler="step"), {}, "without last_epoch"),
    "a lambda": (Setup(scheduler="step"), Setup(scheduler="lambda"), {}, "without lr_lambdas"),
    "a schedule anew": (
        Setup(scheduler="step"), Setup(scheduler="warmup"), {"load_lr_scheduler_states": False}, "",
    ),
    "a wider model": (Setup(), Setup(model="wide"), {}, "expected the shape [61, 32], got [61, 16]"),
    "a wider model at 3": (Setup(3), Setup(3, model="wide"), {}, "build the model that was saved"),
    "a deeper model": (Setup(), Setup(model="deep"), {}, "without model.layers.1."),
    "a deeper model at 3": (Setup(3), Setup(3, model="deep"), {}, "or pass load_module_strict=False"),
    "a shallower model": (Setup(model="deep"), Setup(), {}, "with model.layers.1."),
    "a deeper model's weights": (Setup(), Setup(model="deep"), ALONE | {"load_module_strict": False}, ""),
    "a frozen weight": (Setup(), Setup(model="frozen"), {}, "expected 1 frozen parameters, got 0 frozen"),
    "a frozen weight's weights": (Setup(), Setup(model="frozen"), ALONE, ""),
}  # fmt: skip


@pytest.mark.day("stage 1 at 2", "AdamW as SGD", "no scheduler", "a wider model")
@pytest.mark.situation("checkpoints", "a run resumes with another ZeRO stage, dtype, optimizer or scheduler")
@pytest.mark.parametrize("case", TABLE)
def test_a_run_of_another_kind(rank_pool, saved, case) -> None:
    before, now, options, says = TABLE[case]
    folder, losses = saved(before)
    result = loaded(rank_pool, now, folder, **options)
    if says:
        check(result, says)
        assert all(f"{folder}/global_step2: " in item.text for item in result)
        return
    assert result[0] == result[1] and len(result[0]) == 2, result
    if before._replace(stage=0) == now._replace(stage=0) and not options:
        assert result[0] == losses


def forget(folder: Path) -> None:
    """Write the manifest as an older version did."""
    manifest = read_manifest(folder).model_copy(update={"training": None})
    manifest = manifest.model_copy(update={"digest": manifest.compute_digest()})
    (folder / MANIFEST).write_text(manifest.model_dump_json(exclude_none=True))


# Without what a manifest says of the run: DeepSpeed's own errors get a type, and an optimizer is looked at.
OLD = {
    "stage 1 at 2": "",
    "stage 0 at 1": "DeepSpeed cannot load it: FileNotFoundError",
    "stage 0 at 3": "DeepSpeed cannot load it: AssertionError; load it with the JSON",
    "weights of 0 at 2": "",
    "AdamW as SGD": "expected the settings of SGD, got some without dampening, momentum",
    "no scheduler": "DeepSpeed cannot load it: TypeError",
    "a wider model": "DeepSpeed cannot load it: RuntimeError: Error(s) in loading state_dict",
}


@pytest.mark.situation("checkpoints", "a manifest of an older version")
@pytest.mark.parametrize("case", OLD)
@pytest.mark.day("stage 1 at 2", "AdamW as SGD")
def test_a_manifest_of_an_older_version(rank_pool, saved, tmp_path, case) -> None:
    before, now, options, _ = TABLE[case]
    folder, losses = saved(before)
    copy = Path(shutil.copytree(folder, tmp_path / "old"))
    forget(copy / "global_step2")
    assert verify_checkpoint(copy).training is None
    result = loaded(rank_pool, now, copy, **options)
    if OLD[case]:
        check(result, OLD[case])
    else:
        assert result[0] == result[1] and (options or result[0] == losses)


UNIVERSAL = {
    "the same": (Setup(), ""),
    "stage 2": (Setup(2), ""),
    "bf16": (Setup(1, "bf16"), ""),
    "SGD": (Setup(optimizer="sgd"), ""),
    "Adagrad": (Setup(optimizer="adagrad"), "expected the states of Adagrad"),
    "a wider model": (Setup(model="wide"), "expected the shape"),
}


@pytest.mark.parametrize("case", UNIVERSAL)
@pytest.mark.day("the same", "a wider model")
def test_a_universal_checkpoint_says_what_it_is_of(rank_pool, saved, tmp_path, case) -> None:
    folder, losses = saved(Setup())
    copy = Path(shutil.copytree(folder, tmp_path / "universal"))
    resize_checkpoint(copy)
    now, says = UNIVERSAL[case]
    result = loaded(rank_pool, now, copy)
    if says:
        check(result, says)
    else:
        assert result[0] == result[1] and result[0] == pytest.approx(losses, rel=2e-3)
