"""Make `deepspeed.initialize` honour the "ring_attention" section, for trainers and scripts that call it.

Owns what `ds_ring.enable()` replaces in DeepSpeed. What it must replace in Accelerate and in transformers'
Trainer stands in integrations/trainers, what such a script then sees in whole_batches.py.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_ring.config.deepspeed_file import SECTION
from ds_ring.errors import RingConfigError
from ds_ring.integrations.deepspeed.initialize import initialize
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
    if getattr(deepspeed.initialize, "starts_a_ring", False):
        return
    deepspeed.initialize = _starting_a_ring()
    _refuse_engines_without_a_ring()
    if get_accelerator().device_name() == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # as in initialize.py
    if find_spec("accelerate") is not None:
        from ds_ring.integrations.trainers.accelerate import enable_accelerate

        enable_accelerate()
    if find_spec("transformers") is not None:
        from ds_ring.integrations.trainers.transformers import enable_trainer_config

        enable_trainer_config()


def _starting_a_ring() -> Any:
    @functools.wraps(initialize)
    def initialize_whole(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
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
        whole.hook(engine.module)  # Trainers evaluate the module without the engine
        whole.hook(engine)
        if loader is not None:
            loader.keep_whole()
        return engine, optimizer, loader, scheduler

    initialize_whole.starts_a_ring = True  # type: ignore[attr-defined]
    return initialize_whole


def _refuse_engines_without_a_ring() -> None:
    """Refuse a section that no ring has read: `from deepspeed import initialize` before `enable()`."""
    start = DeepSpeedEngine.__init__

    @functools.wraps(start)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        read = getattr(kwargs.get("config_class"), "_param_dict", None) or {}
        if SECTION in read:
            raise RingConfigError(
                f'deepspeed.initialize: expected ds_ring to have read "{SECTION}", got the section unread: a'
                " deepspeed.initialize from before ds_ring.enable() was called, and every rank would train on"
                " its own tokens; call ds_ring.enable() before you import the name"
            )
        start(self, *args, **kwargs)

    DeepSpeedEngine.__init__ = checked
