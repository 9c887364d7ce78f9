"""Train as DeepSpeed's tutorial does, evaluate, save, resume: one line for the ring.

Example:
    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 deepspeed --num_gpus 2 configs/examples/deepspeed_loop.py
"""

import argparse
import json

import deepspeed
import text
import torch

import ds_ring

ds_ring.enable()

parser = argparse.ArgumentParser()
parser.add_argument("--config", default="configs/examples/ds_config.json")
parser.add_argument("--output", default="runs/deepspeed_loop")
parser.add_argument("--resume", default=None, help="a folder of checkpoints")
parser.add_argument("--local_rank", type=int, default=-1)
options = parser.parse_args()

with open(options.config) as file:
    config = json.load(file)
config |= {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
config |= {"gradient_clipping": 1.0, "zero_optimization": {"stage": 2}}
model = text.model()
engine, _, loader, _ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
    training_data=text.samples(16, 120),
    config=config,
)
if options.resume is not None:
    engine.load_checkpoint(options.resume)
criterion = torch.nn.CrossEntropyLoss()
for step, batch in enumerate(loader):
    if step < engine.global_steps:
        continue
    ids, labels = batch["input_ids"].to(engine.device), batch["labels"].to(engine.device)
    logits = engine(input_ids=ids).logits
    loss = criterion(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    engine.backward(loss)
    engine.step()
    if engine.global_rank == 0:
        print({"step": step, "loss": loss.item()}, flush=True)
    if step == 3:
        engine.save_checkpoint(options.output)
