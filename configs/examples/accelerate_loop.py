"""Train with Accelerate in a loop of one's own, evaluate, save, resume, generate: one line for the ring.

Example:
    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 deepspeed --num_gpus 2 configs/examples/accelerate_loop.py
"""

import argparse

import text
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup

import ds_ring

ds_ring.enable()

parser = argparse.ArgumentParser()
parser.add_argument("--config", default="configs/examples/ds_config.json")
parser.add_argument("--output", default="runs/accelerate_loop")
parser.add_argument("--resume", default=None, help="a state's folder")
parser.add_argument("--batch_size", type=int, default=2, help="samples of a data replica")
parser.add_argument("--local_rank", type=int, default=-1)
options = parser.parse_args()

accelerator = Accelerator(
    deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=options.config), gradient_accumulation_steps=2
)
train = DataLoader(text.samples(16, 120), batch_size=options.batch_size)
held_out = DataLoader(text.samples(3, 90), batch_size=options.batch_size)
model = text.model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = get_linear_schedule_with_warmup(optimizer, 0, len(train))
model, optimizer, train, held_out, scheduler = accelerator.prepare(
    model, optimizer, train, held_out, scheduler
)
if options.resume is not None:
    accelerator.load_state(options.resume)

first = scheduler.scheduler.last_epoch * 2
for step, batch in enumerate(accelerator.skip_first_batches(train, first), first):
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    mean = accelerator.gather(loss.detach()).mean().item()
    accelerator.print({"step": step, "loss": mean, "rate": scheduler.get_last_lr()[0]})
    if step == 3:
        accelerator.save_state(options.output)

model.eval()
losses, hits = [], []
for batch in held_out:
    with torch.no_grad():
        output = model(**batch)
    losses.append(accelerator.gather(output.loss).mean().item())
    right = output.logits[:, :-1].argmax(-1) == batch["labels"][:, 1:]
    hits.append(accelerator.gather_for_metrics(right))
accelerator.print(
    {"held out": losses, "samples": len(torch.cat(hits)), "right": torch.cat(hits).sum().item()}
)
