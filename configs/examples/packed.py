"""Train on samples of different lengths, packed into rows of one length: each sample sees itself alone.

Example:
    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 deepspeed --num_gpus 2 configs/examples/packed.py
"""

import argparse

import text
import torch

import ds_ring

parser = argparse.ArgumentParser()
parser.add_argument("--ring", type=int, default=2, help="ranks that share a row")
parser.add_argument("--local_rank", type=int, default=-1)
options = parser.parse_args()

config = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 2},
    "sequence_parallel_size": options.ring,
    "ring_attention": {
        "ring_size": "auto",
        "layout": "auto",
        "pattern": {"causal": True, "documents": True},
    },
}
lengths = [40 + 37 * row % 160 for row in range(24)]
samples = [
    {name: values[:length] for name, values in sample.items()}
    for sample, length in zip(text.samples(24, 200), lengths, strict=True)
]
model = text.model()
engine, *_ = ds_ring.initialize(
    model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), config=config
)
loader = engine.ring.loader(samples, 1, lengths=lengths, pack_tokens=400)
for step, batch in enumerate(loader):
    loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()
    mean = engine.ring.mean_loss(loss).item()
    if engine.global_rank == 0:
        print({"step": step, "loss": mean}, flush=True)
