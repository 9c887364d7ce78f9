"""Make `deepspeed.initialize` honour the "ring_attention" section, for trainers and scripts that call it.

What it changes in Accelerate and in transformers' Trainer is in integrations/trainers; what such a script
sees is in whole_batches.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch.distributed as dist

from ds_ring.config.deepspeed_file import SECTION
from ds_ring.errors import RingConfigError
from ds_ring.integrations.deepspeed.engine import DEEPSPEED
from ds_ring.integrations.deepspeed.initialize import initialize, leave_shm_out
from ds_ring.integrations.deepspeed.whole_batches import WholeBatches


def enable() -> None:
    """Make deepspeed.initialize start a ring, by itself and inside Accelerate, Trainer and TRL.

    Call it once, before anything of theirs is made; the script stays as it is otherwise:

        import ds_ring; ds_ring.enable()
        trainer = Trainer(model=model, args=TrainingArguments(deepspeed="ds_config.json", ...), ...)

    From then on the ranks of one sequence get the same batches, count as one data replica, and hand whole
    batches to the engine, which shards them; the replicas' losses have the mean over all labelled tokens as
    their mean, and logits are gathered when they are read (collective: on every rank, or on none). A
    configuration without the section raises RingConfigError: its ranks would train by themselves.
    """
    if deepspeed.initialize is _initialize_whole:
        return
    part = SimpleNamespace(at_enable=_initialize_whole, around_init=_refuse_unread_section)
    DEEPSPEED.apply({"enable": part})
    leave_shm_out()
    if find_spec("accelerate") is not None:
        from ds_ring.integrations.trainers.accelerate import enable_accelerate

        enable_accelerate()
    if find_spec("transformers") is not None:
        from ds_ring.integrations.trainers.transformers import enable_trainer_config

        enable_trainer_config()


@functools.wraps(initialize)
def _initialize_whole(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    engine, optimizer, loader, scheduler = initialize(*args, **kwargs)
    if engine.ring.gradient_divisor != dist.get_world_size():
        raise RingConfigError(
            'gradient_allreduce_op: expected "mean" under ds_ring.enable(), got "sum": a script that'
            " takes all ranks for replicas would add up each sequence once a rank; remove the key"
        )
    if engine.ring.config.dynamic_ring:
        raise RingConfigError(
            "dynamic_ring: expected false under ds_ring.enable(), got true: trainers hand over whole"
            " batches, and smaller rings get theirs from engine.ring.loader; set it to false"
        )
    whole = WholeBatches(engine.ring, engine.module)
    DEEPSPEED.apply({"whole_batches": whole}, engine.ring, engine=engine, module=engine.module)
    if loader is not None:
        loader.keep_whole()
    return engine, optimizer, loader, scheduler


def _refuse_unread_section(start: Callable[..., None], engine: Any, *args: Any, **kwargs: Any) -> None:
    """Refuse a section that no ring has read: `from deepspeed import initialize` before `enable()`."""
    if SECTION in (getattr(kwargs.get("config_class"), "_param_dict", None) or {}):
        raise RingConfigError(
            f'deepspeed.initialize: expected ds_ring to have read "{SECTION}", got the section unread: a'
            " deepspeed.initialize from before ds_ring.enable() was called, and every rank would train on"
            " its own tokens; call ds_ring.enable() before you import the name"
        )
    start(engine, *args, **kwargs)
