"""Train a transformers model with LongNet's dilated attention: a pattern of the JSON, nothing in the script.

Example:
    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 deepspeed --num_gpus 2 configs/examples/longnet.py
"""

import argparse

import text
import torch

import ds_ring

parser = argparse.ArgumentParser()
parser.add_argument("--ring", type=int, default=2, help="ranks that share a sequence")
parser.add_argument("--local_rank", type=int, default=-1)
options = parser.parse_args()

config = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 2},
    "sequence_parallel_size": options.ring,
    "ring_attention": {
        "ring_size": "auto",
        "layout": "auto",
        # Segments of 32 tokens dense, of 128 every second token, of 512 every fourth.
        "pattern": {"causal": True, "segment_lengths": [32, 128, 512], "dilation_rates": [1, 2, 4]},
    },
}
model = text.model()
engine, _, loader, _ = ds_ring.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
    training_data=text.samples(8, 512),
    config=config,
)
assert loader is not None, "training data were given"
for step, batch in enumerate(loader):
    loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()
    mean = engine.ring.mean_loss(loss).item()
    if engine.global_rank == 0:
        print({"step": step, "loss": mean}, flush=True)
