"""Describe what a checkpoint was trained with, and say what DeepSpeed could not load of it into an engine.

DeepSpeed 0.19.8 compares little: it ends in KeyError 'momentum', in the first step even, in an assertion
without a text, or in a file that is missing and was never there. What it loads is loaded here as well (as
tests/dist/test_resume_otherwise.py measures): weights of ZeRO 0, 1 and 2 into each other and in any dtype,
optimizer states of ZeRO 1 and 2 into each other, and those of another optimizer with the same settings.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_ring.checkpoint.manifest import Training
from ds_ring.errors import RingCheckpointError, RingError

_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
# A scheduler's state without these is another kind's: torch would begin the schedule anew without a word.
_SCHEDULER_NEEDS = {"last_epoch", "last_batch_iteration", "lr_lambdas", "_schedulers"}
_NAMED = 3  # parameters in a message
# What DeepSpeed, torch and Python raise for a state of another kind; lost ranks are RuntimeErrors, too.
_OF_ANOTHER_KIND = (KeyError, IndexError, AssertionError, AttributeError, TypeError, ValueError, OSError)
_LOADING = re.compile(r"Error\(s\) in loading state_dict|The ZeRO checkpoint")


def describe_training(engine: DeepSpeedEngine, leave_out_frozen: bool = False) -> Training:
    """Return what a checkpoint of the engine, as it is now, is of."""
    optimizer = _own_optimizer(engine)
    scheduler = engine.lr_scheduler
    tensors = dict(engine.module.state_dict(keep_vars=True))
    shapes = {name: tuple(getattr(x, "ds_shape", getattr(x, "shape", ()))) for name, x in tensors.items()}
    frozen = {name for name, p in engine.module.named_parameters() if not p.requires_grad}
    return Training(
        zero_stage=int(engine.zero_optimization_stage()),
        dtype=_DTYPES.get(engine.get_data_types()[0], str(engine.get_data_types()[0])),
        wrapper=_get_wrapper_name(engine),
        optimizer="" if optimizer is None else type(optimizer).__name__,
        settings=() if optimizer is None else tuple(map(_public, optimizer.param_groups)),
        states=_list_states(optimizer),
        scheduler="" if scheduler is None else type(scheduler).__name__,
        scheduler_states=() if scheduler is None else tuple(sorted(scheduler.state_dict())),
        shapes={name: shape for name, shape in shapes.items() if not leave_out_frozen or name not in frozen},
        frozen=tuple(sorted(frozen)),
    )


def require_loadable(
    folder: Path,
    saved: Training,
    engine: DeepSpeedEngine,
    *,
    universal: bool,
    strict: bool,
    optimizer: bool,
    scheduler: bool,
    module: bool,
) -> None:
    """Raise RingCheckpointError if DeepSpeed cannot load a part of a checkpoint into an engine.

    Args:
        folder: of the checkpoint, for the message.
        saved: the training that it is of.
        engine: that will load it.
        universal: it is a universal checkpoint: ZeRO stages are compared by its files.
        strict: names of the model must be the same.
        optimizer, scheduler, module: the parts to load.
    """
    mine = describe_training(engine)
    problem = ""
    if not universal:
        problem = _stage_problem(saved, mine, optimizer)
    if module and not problem:
        problem = _model_problem(saved, mine, engine, strict)
    if optimizer and not problem:
        problem = _optimizer_problem(saved, mine, engine, universal)
    if scheduler and not problem:
        problem = _scheduler_problem(saved, mine)
    if problem:
        raise RingCheckpointError(f"{folder}: {problem}")


def _stage_problem(saved: Training, mine: Training, optimizer: bool) -> str:
    """Say why the weights, or the optimizer's states, of one ZeRO stage cannot go on in another."""
    before, now = saved.zero_stage, mine.zero_stage
    set_back = f'set "stage": {before} under "zero_optimization" again'
    if (before == 3) != (now == 3):
        how = "load what its zero_to_fp32 makes of it into the model before ds_ring.initialize"
        return f"expected a checkpoint of ZeRO {now}, got one of ZeRO {before}; {set_back}, or {how}"
    alone = "load its weights alone with load_module_only=True"
    if optimizer and before != now and {before, now} != {1, 2}:
        return f"expected a checkpoint of ZeRO {now}, got one of ZeRO {before}; {set_back}, or {alone}"
    if optimizer and (saved.dtype, saved.wrapper) != (mine.dtype, mine.wrapper):
        expected, got = (
            f"{training.dtype} ({training.wrapper or 'no wrapper'})" for training in (mine, saved)
        )
        return f"expected optimizer states of {expected}, got {got}; set the dtype back, or {alone}"
    return ""


def _model_problem(saved: Training, mine: Training, engine: DeepSpeedEngine, strict: bool) -> str:
    advice = "build the model that was saved"
    misfits = [name for name, shape in mine.shapes.items() if saved.shapes.get(name, shape) != shape]
    if misfits:
        shapes = "; ".join(
            f"{name}: expected the shape {list(mine.shapes[name])}, got {list(saved.shapes[name])}"
            for name in misfits[:_NAMED]
        )
        rest = f", and {len(misfits) - _NAMED} more" if len(misfits) > _NAMED else ""
        return f"{shapes}{rest}; {advice}"
    # A module's own hooks may rename what they load, or make it.
    renames = any(module._load_state_dict_pre_hooks for module in engine.module.modules())
    if strict and not renames and saved.shapes.keys() != mine.shapes.keys():
        missing = sorted(mine.shapes.keys() - saved.shapes.keys())
        added = sorted(saved.shapes.keys() - mine.shapes.keys())
        expected = f"expected {len(mine.shapes)} tensors of the model, got {len(saved.shapes)}"
        lists = [f"without {', '.join(missing[:_NAMED])}"] * bool(missing)
        lists += [f"with {', '.join(added[:_NAMED])}"] * bool(added)
        return f"{expected} {' and '.join(lists)}; {advice}, or pass load_module_strict=False"
    return ""


def _optimizer_problem(saved: Training, mine: Training, engine: DeepSpeedEngine, universal: bool) -> str:
    alone = "or load the weights alone with load_module_only=True"
    if not mine.optimizer or not saved.optimizer:
        return ""
    if saved.frozen != mine.frozen:
        difference = sorted(set(saved.frozen) ^ set(mine.frozen))
        got = f"got {len(saved.frozen)} frozen, of which differ {', '.join(difference[:_NAMED])}"
        return f"expected {len(mine.frozen)} frozen parameters, {got}; freeze the same ones, {alone}"
    use = f"use {saved.optimizer} again, {alone}"
    if len(saved.settings) != len(mine.settings):
        got = f"got {len(saved.settings)} of {saved.optimizer}"
        return f"expected {len(mine.settings)} groups of parameters, {got}; make the same groups, {alone}"
    if saved.optimizer == mine.optimizer:
        return ""
    lacks = set().union(*map(set, mine.settings)) - set().union(*map(set, saved.settings))
    if lacks and not universal:
        got = f"got those of {saved.optimizer}, without {', '.join(sorted(lacks))}"
        return f"expected the settings of {mine.optimizer}, {got}; {use}"
    needs = set(mine.states or _states_after_a_step(engine))
    if needs and saved.states and needs != set(saved.states):
        expected = f"expected the states of {mine.optimizer}, {', '.join(sorted(needs))}"
        return f"{expected}, got those of {saved.optimizer}, {', '.join(saved.states)}; {use}"
    return ""


def _scheduler_problem(saved: Training, mine: Training) -> str:
    if not mine.scheduler or saved.scheduler == mine.scheduler:
        return ""
    anew = "pass load_lr_scheduler_states=False to begin its schedule anew"
    if not saved.scheduler:
        return f"expected the states of the scheduler {mine.scheduler}, got a checkpoint without any; {anew}"
    needed, there = set(mine.scheduler_states), set(saved.scheduler_states)
    lacks = (needed & _SCHEDULER_NEEDS or needed) - there
    if lacks:
        got = f"got those of {saved.scheduler}, without {', '.join(sorted(lacks))}"
        return f"expected the states of the scheduler {mine.scheduler}, {got}; use that one again, or {anew}"
    return ""


@contextmanager
def deepspeed_errors_typed(folder: Path, engine: DeepSpeedEngine, optimizer: bool) -> Iterator[None]:
    """Make a RingCheckpointError of what DeepSpeed raises for a checkpoint that is not one of this engine.

    For manifests that do not say what was trained; an optimizer that has lost settings is found here and not
    in its first step.
    """
    inner = _own_optimizer(engine)
    before = [] if inner is None else list(map(_public, inner.param_groups))
    advice = "load it with the JSON, the model and the optimizer that it was saved with"
    try:
        yield
    except (*_OF_ANOTHER_KIND, RuntimeError) as error:
        of_another_kind = isinstance(error, _OF_ANOTHER_KIND) or _LOADING.match(str(error))
        if isinstance(error, RingError) or not of_another_kind:
            raise
        text = f"{type(error).__name__}: {str(error)[:500]}".rstrip(": ")
        raise RingCheckpointError(f"{folder}: DeepSpeed cannot load it: {text}; {advice}") from error
    if inner is None or not optimizer:
        return
    after = list(map(_public, inner.param_groups))
    lost = sorted(
        {name for mine, loaded in zip(before, after, strict=False) for name in set(mine) - set(loaded)}
    )
    if lost:
        expected = f"expected the settings of {type(inner).__name__}, got some without {', '.join(lost)}"
        raise RingCheckpointError(f"{folder}: {expected}; {advice}")


def _own_optimizer(engine: DeepSpeedEngine) -> torch.optim.Optimizer | None:
    """Return the optimizer inside DeepSpeed's; None where the engine has none."""
    optimizer: Any = engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner if hasattr(inner, "param_groups") else None


def _get_wrapper_name(engine: DeepSpeedEngine) -> str:
    """Return the class of DeepSpeed's optimizer around the own one, that of ZeRO without its stage."""
    if engine.optimizer is None or engine.optimizer is _own_optimizer(engine):
        return ""
    return type(engine.optimizer).__name__


def _public(group: dict[str, Any]) -> tuple[str, ...]:
    return tuple(sorted(name for name in group if name != "params" and not name.startswith("_")))


def _list_states(optimizer: Any) -> tuple[str, ...]:
    """Return the names of the states of one parameter; none before the first step."""
    if optimizer is None:
        return ()
    return tuple(sorted({str(name) for state in optimizer.state.values() for name in state}))


def _states_after_a_step(engine: DeepSpeedEngine) -> tuple[str, ...]:
    """Return the states that a new optimizer of the engine's class has after a step, as far as known."""
    inner = _own_optimizer(engine)
    make: Callable[..., Any] = type(inner)
    defaults = inner.defaults if inner is not None else {}
    # If the class needs more arguments than its defaults, nothing is compared.
    with suppress(Exception), torch.enable_grad():
        parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))
        takes = inspect.signature(make).parameters  # AdamW has defaults of Adam's that it does not take
        optimizer = make([parameter], **{name: x for name, x in defaults.items() if name in takes})
        parameter.sum().backward()
        optimizer.step()
        return _list_states(optimizer)
    return ()
