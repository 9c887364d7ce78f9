"""An engine with every option on: the layers of its methods, its hooks, and `engine.ring.describe()`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.deepspeed_ranks import Size, build_batch, build_model, json_config, start_deepspeed

SIZE = Size(hidden=32, layers=2, tokens=21, samples=2)

# From the inside out.
METHODS = {
    "forward": ["RingUse", "ModuleWatch", "FirstBatch", "attribute_engine_failure"],
    "backward": ["RingUse", "attribute_engine_failure"],
    "_backward_prologue": ["InputGradients", "refuse_direct_backward"],
    "step": ["FirstBatch", "StepMetrics", "_Report", "SynchronizedResults", "attribute_engine_failure"],
    "save_checkpoint": ["save_checkpoint", "SynchronizedResults", "attribute_engine_failure"],
    "load_checkpoint": ["load_checkpoint", "attribute_engine_failure"],
    "compile": ["compile_with_ring"],
    "save_16bit_model": ["SynchronizedResults", "attribute_engine_failure"],
    "save_fp16_model": ["SynchronizedResults", "attribute_engine_failure"],
    "module_state_dict": ["SynchronizedResults", "attribute_engine_failure"],
    "allreduce_gradients": ["attribute_engine_failure"],
    "load_module_state_dict": ["attribute_engine_failure"],
    "destroy": ["_destroy", "attribute_engine_failure"],
}
# In the order in which torch calls them.
BEFORE = ["WholeBatches", "_find_sharding", "InputGradients", "StepMetrics", "_Report", "seed_generators"]
AFTER = ["InputGradients", "StepMetrics", "_Report", "restore_generators", "WholeBatches"]


def name_of(part: Any) -> str:
    owner = getattr(part, "__self__", None)
    if isinstance(part, functools.partial):
        return str(part.func.__name__)
    return part.__name__ if owner is None or inspect.ismodule(owner) else type(owner).__name__


def layers_of(method: Callable[..., Any]) -> list[str]:
    names: list[str] = []
    while inspect.isfunction(method) and "part" in (result := inspect.getclosurevars(method).nonlocals):
        names.insert(0, name_of(result["part"]))
        method = result["call"]
    inner = getattr(method, "__func__", None)  # ours, where it takes the place of DeepSpeed's
    return [inner.func.__name__, *names] if isinstance(inner, functools.partial) else names


def describe(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    deepspeed = start_deepspeed()
    import ds_ring
    from ds_ring.data import run_folder

    ds_ring.enable()
    patch = pytest.MonkeyPatch()
    patch.setenv(run_folder.FOLDER_VARIABLE, folder)
    config = json_config(
        world_size, 1, 1, gradient_accumulation_steps=2, train_micro_batch_size_per_gpu=1,
        csv_monitor={"enabled": True, "output_path": folder, "job_name": "ring"},
        ring_attention={"monitor": True, "verify_first_batch": True},
    )  # fmt: skip
    try:
        engines: list[Any] = []
        for section in (config, json_config(world_size, 1, 0)):
            model = build_model(SIZE, "sdpa")
            if engines:
                patch.delenv(run_folder.FOLDER_VARIABLE)
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            engines.append(deepspeed.initialize(model=model, optimizer=sgd, config=section)[0])
        full, plain = engines
        item = {name: x[:1] for name, x in build_batch(SIZE).items()}
        for _ in range(2):
            loss = full(**item).loss
            full.backward(loss)
            full.step()

        def hooks(result: Iterable[Any]) -> list[str]:
            return [name_of(hook) for hook in result]

        return {
            "methods": {name: layers_of(getattr(full, name)) for name in METHODS},
            "before": hooks(full._forward_pre_hooks.values()),
            "after": hooks(full._forward_hooks.values()),
            "after an error": [
                hooks(item._forward_hooks[key] for key in item._forward_hooks_always_called)
                for item in (full, full.module)
            ],
            "full": full.ring.describe(),
            "plain": plain.ring.describe(),
        }
    finally:
        patch.undo()


def test_patches_of_an_engine_have_their_order(rank_pool: Any, tmp_path: Path) -> None:
    result = rank_pool(2).run(describe, str(tmp_path))[0]
    assert result["methods"] == METHODS
    assert (result["before"], result["after"]) == (BEFORE, AFTER)
    assert result["after an error"] == [["restore_generators", "WholeBatches"], ["WholeBatches"]]
    for row in ("engine.step (monitor)", "engine.forward (first_batch)", "shutil.copytree", "torch.load"):
        assert row in result["full"], result["full"]
    for row in ("(monitor)", "(first_batch)", "(run_report)", "(evaluation)"):
        assert row not in result["plain"], result["plain"]
    assert "deepspeed.initialize (enable)" in result["plain"] and "engine.ring (session)" in result["plain"]
    wrapped = [line.split()[2:4] for line in result["full"].splitlines() if " engine.step " in line]
    assert wrapped == [
        ["engine.step", f"({name}):"]
        for name in ("first_batch", "monitor", "run_report", "settled", "culprits")
    ]
