"""Train with a DataLoader of one's own: gradient accumulation, evaluation, save and resume.

Example:
    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 deepspeed --num_gpus 2 configs/examples/own_loop.py
"""

import argparse
import json

import text
import torch
from torch.utils.data import DataLoader, DistributedSampler

import ds_ring

parser = argparse.ArgumentParser()
parser.add_argument("--config", default="configs/examples/ds_config.json")
parser.add_argument("--ring", type=int, default=2, help="ranks of a ring")
parser.add_argument("--output", default="runs/own_loop")
parser.add_argument("--resume", default=None, help="a folder of checkpoints")
parser.add_argument("--local_rank", type=int, default=-1)
options = parser.parse_args()

with open(options.config) as file:
    config = json.load(file) | {"sequence_parallel_size": options.ring}
config |= {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
config |= {"gradient_clipping": 1.0, "zero_optimization": {"stage": 2}}
model = text.model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine, *_ = ds_ring.initialize(model=model, optimizer=optimizer, config=config)

# The ranks of a ring take the same samples, so the sampler counts replicas of the ring, not ranks.
mesh = engine.ring.run_mesh
data, held_out = text.samples(16, 120), text.samples(20, 120)[16:]
sampler: DistributedSampler[object] = DistributedSampler(
    data, num_replicas=mesh.data_size, rank=mesh.data_rank
)
loader, held_out_loader = DataLoader(data, batch_size=2, sampler=sampler), DataLoader(held_out)


def evaluate() -> float:
    """Return the mean loss of the held-out text, by labelled tokens: the same on all ranks."""
    engine.eval()
    total = tokens = 0.0
    with torch.no_grad():
        # split=False: each data replica takes every batch. Replicas that take turns repeat some at the end.
        for batch in engine.ring.wrap(held_out_loader, split=False):
            mean = engine.ring.mean_loss(engine(**batch).loss)  # over the labelled tokens of all ranks,
            weight = batch["num_items_in_batch"].item()  # which this counts, but for a constant factor
            total, tokens = total + mean.item() * weight, tokens + weight
    engine.train()
    return total / tokens


if options.resume is not None:
    engine.load_checkpoint(options.resume)
batches_done = engine.global_steps * engine.gradient_accumulation_steps()
for epoch in range(2):
    sampler.set_epoch(epoch)
    for index, batch in enumerate(engine.ring.wrap(loader), start=epoch * len(loader)):
        if index < batches_done:
            continue
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()  # changes the weights at every second batch
        mean = engine.ring.mean_loss(loss)  # over the labelled tokens of all ranks
        if engine.global_rank == 0:
            print({"batch": index, "loss": mean.item()}, flush=True)
    if index < batches_done:
        continue
    engine.save_checkpoint(options.output)
    held_out_loss = evaluate()
    if engine.global_rank == 0:
        print({"epoch": epoch, "held out": held_out_loss}, flush=True)
