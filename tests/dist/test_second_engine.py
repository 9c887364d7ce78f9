"""What of a ring outlives its engine: nothing. A model goes from stage to stage, each with an engine of its own."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ds_ring
from tests.dist.deepspeed_ranks import (
    Size,
    build_batch,
    build_model,
    json_config,
    start_deepspeed,
    train_by_sgd,
)
from tests.dist.harness import catch_refusal
from tests.dist.trainer_logs import Logs, check_logs, configs, start_trainers

SIZE = Size(hidden=32, layers=2, tokens=21, samples=2)


def state_of(model: nn.Module) -> list[Any]:
    """Everything of a model that an engine may have left: hooks, attributes, attention and loss; DeepSpeed leaves its
    own hooks.
    """
    result: list[Any] = []
    for name, module in model.named_modules():
        stored = {key for key in vars(module) if not key.startswith(("_", "ds_"))} - {"training"}
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        ours = [str(item) for item in hooks if not getattr(item, "__module__", "").startswith("deepspeed")]
        result.append((name, sorted(stored), ours, module._compiled_call_impl))
    result += [part.config._attn_implementation for part in model.modules() if hasattr(part, "config")]
    return [*result, model.loss_function]


def two_engines(rank: int, world_size: int, ending: str, whole: bool) -> dict[str, Any]:
    """Losses of two steps by two engines of one model, the state of the model before and after, and what the first
    engine says afterwards.
    """
    deepspeed = start_deepspeed()
    if whole:
        ds_ring.enable()
    start = deepspeed.initialize if whole else ds_ring.initialize
    model = build_model(SIZE, "sdpa")
    states, losses, config = [state_of(model)], [], json_config(world_size, SIZE.samples, 0)
    batch = build_batch(SIZE)
    engines: list[Any] = []

    def step() -> Any:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        engines.append(start(model=model, optimizer=sgd, config=config)[0])
        if ending == "compiled":
            engines[-1].compile(backend="ds_ring")
        local = batch if whole else engines[-1].ring.shard_batch(batch)
        loss = engines[-1](**local).loss
        losses.append(float(loss if whole else engines[-1].ring.mean_loss(loss)))
        engines[-1].backward(loss)
        engines[-1].step()

    step()
    if ending in ("destroy", "compiled"):
        engines[0].destroy()
        states.append(state_of(model))
    elif ending == "failed start":
        engines[0].destroy()
        wrong = {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
        with pytest.raises(
            AssertionError, match="train_batch_size"
        ):  # DeepSpeed's, after ours is on the model
            start(model=model, config=config | wrong)
        states.append(state_of(model))
    step()
    told = catch_refusal(engines[0], **batch)
    engines[-1].destroy()
    states.append(state_of(model))
    left = [
        (was, item) for state in states for was, item in zip(states[0], state, strict=True) if was != item
    ]
    return {"losses": losses, "left": str(left), "told": told}


def pickled(rank: int, world_size: int) -> list[str]:
    """What each way of pickling a module on a ring raises."""
    start_deepspeed()
    model, result = build_model(SIZE, "sdpa"), []
    wrapper = nn.Sequential(model)
    engine = ds_ring.initialize(model=wrapper, config=json_config(world_size, SIZE.samples, 0))[0]
    for module in (engine, engine.module, model):
        for call in (lambda x: torch.save(x, io.BytesIO()), pickle.dumps, copy.deepcopy):
            result.append(catch_refusal(call, module))
    assert copy.deepcopy(model.state_dict()).keys() == model.state_dict().keys()
    engine.destroy()
    assert type(copy.deepcopy(model)) is type(model)
    return result


@pytest.mark.situation("trainers", "torch.save of a model on a ring")
def test_a_module_with_hooks_of_a_ring_is_not_pickled(rank_pool: Any) -> None:
    for result in rank_pool(2).run(pickled):
        assert len(result) == 9
        assert all("expected its state_dict to be saved, got the module itself" in text for text in result)


def losses_alone() -> list[float]:
    model = build_model(SIZE, "sdpa")
    return train_by_sgd(model.parameters(), lambda _: model(**build_batch(SIZE)).loss, 2)


@pytest.mark.situation("trainers", "a second engine on one model")
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("ending", ["later engine", "destroy", "failed start", "compiled"])
@pytest.mark.day("later engine-True", "failed start-True", "destroy-False")
def test_a_second_engine_trains_as_the_first(rank_pool: Any, ending: str, whole: bool) -> None:
    words = {
        "later engine": "a ring, got one that ended: its model was given to a later engine",
        "destroy": "a ring, got one that ended: engine.destroy() was called",
        "compiled": "a ring, got one that ended: engine.destroy() was called",
        "failed start": "a ring, got one that ended: engine.destroy() was called",
    }
    for result in rank_pool(2).run(two_engines, ending, whole):
        assert result["losses"] == pytest.approx(losses_alone(), rel=1e-5)
        assert result["left"] == "[]"
        assert words[ending] in result["told"]


def stages(rank: int, world_size: int, config: str, ring: bool) -> Logs:
    """What two Trainers log that train one model; the first one finds its batch size, with an engine for each try."""
    start_deepspeed()
    if ring:
        ds_ring.enable()
    start_trainers()
    import text
    from transformers import Trainer, TrainingArguments

    class Narrow(Trainer):
        """For which more than three samples are too much."""

        def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            result = super().training_step(model, inputs, *args, **kwargs)
            if len(inputs["input_ids"]) > 3:
                raise RuntimeError("CUDA out of memory.")
            return result

    model = text.model(use_cache=False)
    arguments = {
        "max_steps": 2, "learning_rate": 1e-2, "logging_steps": 1, "report_to": [], "disable_tqdm": True,
        "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "no", "per_device_eval_batch_size": 2,
    }  # fmt: skip
    logs: Logs = []
    for stage, kind in enumerate((Narrow, Trainer)):
        if stage:
            start_trainers()
        mine = {"per_device_train_batch_size": 4 - 2 * stage, "auto_find_batch_size": not stage}
        trainer = kind(
            model=model, args=TrainingArguments(str(Path(config).parent), deepspeed=config, **arguments, **mine),
            train_dataset=text.samples(8, 60), eval_dataset=text.samples(3, 50),
        )  # fmt: skip
        trainer.train()
        logs += trainer.state.log_history
    return logs


@pytest.mark.situation("trainers", "a model goes from SFT to another trainer")
@pytest.mark.night  # by day engines of ds_ring and of deepspeed.initialize, above
def test_a_model_goes_from_trainer_to_trainer(rank_pool: Any, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    plain, on_ring = configs(tmp_path, 2, zero_optimization={"stage": 2})
    expected = rank_pool(1).run(stages, plain, False)[0]
    for logs in rank_pool(2).run(stages, on_ring, True):
        check_logs(logs, expected)
