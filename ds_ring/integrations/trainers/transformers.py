"""Make transformers' Trainer count the ranks of one sequence as one data replica.

Owns the three places where it counts processes by itself: batch sizes in the DeepSpeed JSON and in its logs,
and evaluations that read nothing but the loss. Refuses what trains on rollouts of its own.
"""

from __future__ import annotations

import functools
from typing import Any

from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from ds_ring.config.deepspeed_file import SECTION, SP_KEY
from ds_ring.config.section import RingConfig
from ds_ring.errors import RingConfigError
from ds_ring.integrations.deepspeed.whole_batches import ONLY_LOSS

_PRODUCT = "train_batch_size"


def enable_trainer_config() -> None:
    """Let DeepSpeed work out train_batch_size: TrainingArguments would multiply by all ranks."""
    process = HfTrainerDeepSpeedConfig.trainer_config_process

    @functools.wraps(process)
    def without_product(self: Any, args: Any, *others: Any, **kwargs: Any) -> None:
        product = "auto"
        if SECTION in self.config:
            _refuse_rollouts(type(args))
            product = self.config.pop(_PRODUCT, "auto")
            # As a number: from_pretrained at ZeRO 3 hands the JSON to DeepSpeed as it is.
            self.config[SP_KEY] = RingConfig.from_deepspeed(self.config).sequence_parallel_size
        process(self, args, *others, **kwargs)
        if product != "auto":
            self.config[_PRODUCT] = product

    HfTrainerDeepSpeedConfig.trainer_config_process = without_product  # type: ignore[method-assign]


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


def enable_trainer() -> None:
    """Replace what Trainer works out from the number of processes; once, when it has been imported."""
    from transformers.trainer import Trainer

    if hasattr(Trainer.prediction_step, "on_a_ring"):
        return
    total, predict = Trainer.get_total_train_batch_size, Trainer.prediction_step

    @functools.wraps(total)
    def by_replica(self: Any, args: Any) -> int:
        return total(self, args) // self.accelerator.sequence_ranks

    @functools.wraps(predict)
    def reading_the_loss(
        self: Any, model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> Any:
        # It walks over all outputs before it drops them: logits would be gathered.
        if prediction_loss_only and all(inputs.get(name) is not None for name in self.label_names):
            inputs = {**inputs, ONLY_LOSS: True}
        return predict(self, model, inputs, prediction_loss_only, *args, **kwargs)

    reading_the_loss.on_a_ring = True  # type: ignore[attr-defined]
    Trainer.get_total_train_batch_size = by_replica  # type: ignore[method-assign]
    Trainer.prediction_step = reading_the_loss  # type: ignore[method-assign]
