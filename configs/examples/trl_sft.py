"""Fine-tune with TRL's SFTTrainer and peft's LoRA on whole files of source code: one line for the ring.

Example:
    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 deepspeed --num_gpus 2 configs/examples/trl_sft.py
"""

import argparse

import text
from datasets import Dataset
from peft import LoraConfig
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

import ds_ring

ds_ring.enable()

parser = argparse.ArgumentParser()
parser.add_argument("--config", default="configs/examples/ds_config.json")
parser.add_argument("--output", default="runs/trl_sft")
parser.add_argument("--resume", default=None, help="a checkpoint's folder")
parser.add_argument("--local_rank", type=int, default=-1)
options = parser.parse_args()

source = [{"text": one[: 100 + 20 * index]} for index, one in enumerate(text.files(16))]
trainer = SFTTrainer(
    model=text.model(),
    args=SFTConfig(
        options.output,
        deepspeed=options.config,
        max_length=200,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        per_device_eval_batch_size=2,
        max_steps=4,
        learning_rate=1e-2,
        bf16=False,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=Dataset.from_list(source[:12]),
    eval_dataset=Dataset.from_list(source[12:]),
    processing_class=text.tokenizer(),
    peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
)
trainer.train(resume_from_checkpoint=options.resume)
trainer.save_model(options.output)
if trainer.is_world_process_zero():
    for entry in trainer.state.log_history:
        print(entry)
