"""Train a transformers model under a mask of each batch's own: tokens see 64 tokens, and their speaker's.

Example:
    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 deepspeed --num_gpus 2 configs/examples/batch_mask.py
"""

import argparse
from typing import Any

import text
import torch
from torch import Tensor
from transformers import AttentionInterface

import ds_ring
from ds_ring.masks.pattern import Pattern

parser = argparse.ArgumentParser()
parser.add_argument("--ring", type=int, default=2, help="ranks that share a sequence")
parser.add_argument("--local_rank", type=int, default=-1)
options = parser.parse_args()


def mask_of_speakers(speakers: Tensor) -> Pattern:
    """Return the mask of some samples; `speakers` are those of all their tokens, [samples, tokens]."""

    def near_or_same(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query - key < 64) | (speakers[batch, query] == speakers[batch, key])

    return ds_ring.MaskMod(near_or_same) & ds_ring.Causal()


def attend(
    module: object, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None,
    scaling: float | None = None, *, speakers: Tensor, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute attention by transformers' interface; `speakers` is a shard, which the model passes on."""
    pattern = mask_of_speakers(engine.ring.gather(speakers))  # a new one for each batch
    place = {"layout": engine.ring.layout, "mesh": engine.ring.mesh}
    out = ds_ring.ring_attention(q, k, v, pattern=pattern, scale=scaling, **place)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("speakers", attend)
model = text.model()
engine, *_ = ds_ring.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
    config={
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 2},
        "sequence_parallel_size": options.ring,
        "ring_attention": {"ring_size": "auto", "verify_first_batch": True},
    },
)
model.set_attn_implementation("speakers")  # in place of the ring's: after ds_ring.initialize
samples = text.samples(8, 512)
for step in range(4):
    rows = samples[2 * step : 2 * step + 2]
    whole = {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")}
    whole["speakers"] = (whole["input_ids"] == ord("\n")).cumsum(1) % 5  # a turn is a line
    loss = engine(**engine.ring.shard_batch(whole)).loss
    engine.backward(loss)
    engine.step()
    mean = engine.ring.mean_loss(loss).item()
    if engine.global_rank == 0:
        print({"step": step, "loss": mean}, flush=True)
