"""Train with transformers' Trainer, evaluate, save, resume: an ordinary script, and one line for the ring.

Example:
    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 deepspeed --num_gpus 2 configs/examples/hf_trainer.py
"""

import argparse

import numpy as np
import text
from transformers import EvalPrediction, Trainer, TrainingArguments

import ds_ring

ds_ring.enable()

parser = argparse.ArgumentParser()
parser.add_argument("--config", default="configs/examples/ds_config.json")
parser.add_argument("--output", default="runs/hf_trainer")
parser.add_argument("--resume", default=None, help="a checkpoint's folder")
parser.add_argument("--batch_size", type=int, default=2, help="samples of a data replica")
parser.add_argument("--local_rank", type=int, default=-1)
options = parser.parse_args()


def accuracy(found: EvalPrediction) -> dict[str, float]:
    """Return how many labels are the most likely next byte."""
    predictions, labels = np.asarray(found.predictions), np.asarray(found.label_ids)
    return {"accuracy": float((predictions[:, :-1].argmax(-1) == labels[:, 1:]).mean())}


trainer = Trainer(
    model=text.model(),
    args=TrainingArguments(
        options.output,
        deepspeed=options.config,
        per_device_train_batch_size=options.batch_size,
        gradient_accumulation_steps=2,
        per_device_eval_batch_size=options.batch_size,
        max_steps=6,
        learning_rate=1e-2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        save_steps=3,
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=text.samples(16, 120),
    eval_dataset=text.samples(3, 90),
    compute_metrics=accuracy,
)
trainer.train(resume_from_checkpoint=options.resume)
trainer.save_model(options.output)
if trainer.is_world_process_zero():
    for entry in trainer.state.log_history:
        print(entry)
