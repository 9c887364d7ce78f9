"""Make transformers' Trainer count the ranks of one sequence as one data replica.

It counts processes in the batch sizes of the DeepSpeed JSON and of its logs. Evaluations that read nothing
but the loss gather no logits. Methods that train on rollouts of their own are refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ds_ring.config.deepspeed_file import SECTION, SP_KEY
from ds_ring.config.section import RingConfig
from ds_ring.errors import RingConfigError
from ds_ring.integrations.deepspeed.enable import ONLY_LOSS
from ds_ring.integrations.trainers.adapter import TRAINER

_PRODUCT = "train_batch_size"


def enable_trainer_config() -> None:
    """Let DeepSpeed work out train_batch_size: TrainingArguments would multiply by all ranks."""
    TRAINER.apply({"JSON of Trainer": SimpleNamespace(at_enable=_without_product)})


def _without_product(process: Callable[..., None], json: Any, args: Any, *others: Any, **kwargs: Any) -> None:
    product = "auto"
    if SECTION in json.config:
        _refuse_rollouts(type(args))
        product = json.config.pop(_PRODUCT, "auto")
        # As a number: from_pretrained at ZeRO 3 hands the JSON to DeepSpeed as it is.
        json.config[SP_KEY] = RingConfig.from_deepspeed(json.config).sequence_parallel_size
    process(json, args, *others, **kwargs)
    if product != "auto":
        json.config[_PRODUCT] = product


def _refuse_rollouts(kind: type[Any]) -> None:
    """Refuse TRL's methods that sample from the model while it trains: they have a temperature."""
    # Others may mean another thing by temperature.
    of_trl = (one for one in kind.__mro__ if one.__module__.partition(".")[0] == "trl")
    if any("temperature" in vars(one).get("__annotations__", {}) for one in of_trl):
        raise RingConfigError(
            f"{kind.__name__}: expected a method that trains on a given data set, got one that samples from"
            " the model while it trains; policy training (GRPO, RLOO and other online methods) is not"
            " supported on a ring yet: the ranks of a sequence would sample different rollouts. Use"
            " SFTTrainer, DPOTrainer, RewardTrainer or KTOTrainer, or leave out ds_ring.enable() and the"
            f' "{SECTION}" section'
        )


@functools.cache
def enable_trainer() -> None:
    """Replace what Trainer works out from the number of processes; once, when it has been imported."""

    def by_replica(total: Callable[..., int], trainer: Any, args: Any) -> int:
        return total(trainer, args) // trainer.accelerator.sequence_ranks

    size, loss = SimpleNamespace(at_enable=by_replica), SimpleNamespace(at_enable=_reading_the_loss)
    TRAINER.apply({"batch size": size, "only the loss": loss})


def _reading_the_loss(
    predict: Callable[..., Any],
    trainer: Any,
    model: Any,
    inputs: Any,
    prediction_loss_only: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    # Trainer walks over all outputs before it drops them: logits would be gathered.
    if prediction_loss_only and all(inputs.get(name) is not None for name in trainer.label_names):
        inputs = {**inputs, ONLY_LOSS: True}
    return predict(trainer, model, inputs, prediction_loss_only, *args, **kwargs)
