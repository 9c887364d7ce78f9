"""Train with TRL's GRPOTrainer, sampling on the ring, a function as the reward: one line for the ring.

Example:
    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 deepspeed --num_gpus 2 configs/examples/trl_grpo.py
"""

import argparse
from typing import Any

import text
from datasets import Dataset
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

import ds_ring

ds_ring.enable()

parser = argparse.ArgumentParser()
parser.add_argument("--config", default="configs/examples/ds_config.json")
parser.add_argument("--output", default="runs/trl_grpo")
parser.add_argument("--local_rank", type=int, default=-1)
options = parser.parse_args()


def letters(completions: list[str], **rest: Any) -> list[float | None]:
    """Return the fraction of letters in each completion."""
    return [sum(map(str.isalpha, one)) / max(len(one), 1) for one in completions]


trainer = GRPOTrainer(
    model=text.model(),
    reward_funcs=letters,
    args=GRPOConfig(
        options.output,
        deepspeed=options.config,
        num_generations=4,
        max_completion_length=16,
        per_device_train_batch_size=4,
        max_steps=3,
        learning_rate=1e-2,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=Dataset.from_list([{"prompt": one[: 40 + 5 * n]} for n, one in enumerate(text.files(8))]),
    processing_class=text.tokenizer(),
)
trainer.train()
if trainer.is_world_process_zero():
    for entry in trainer.state.log_history:
        print(entry)
