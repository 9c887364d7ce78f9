"""Train a model in plain PyTorch under a mask of one's own, a function of positions as in FlexAttention.

Example:
    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 deepspeed --num_gpus 2 configs/examples/own_mask.py
"""

import argparse

import text
import torch
from torch import Tensor, nn

import ds_ring

parser = argparse.ArgumentParser()
parser.add_argument("--ring", type=int, default=2, help="ranks that share a sequence")
parser.add_argument("--local_rank", type=int, default=-1)
options = parser.parse_args()


def near_or_sixteenth(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Let a query see its last 64 tokens, itself included, and every sixteenth token of all."""
    return (query - key < 64) | (key % 16 == 0)


# `Causal` tells the ring which keys no query reads; it cannot see that in a function.
PATTERN = ds_ring.MaskMod(near_or_sixteenth) & ds_ring.Causal()


class Model(nn.Module):
    """One layer of attention between an embedding and a head."""

    def __init__(self, width: int = 32, tokens: int = 512) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(text.VOCABULARY, width), nn.Embedding(tokens, width)
        self.qkv, self.head = nn.Linear(width, 3 * width), nn.Linear(width, text.VOCABULARY)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.places(position_ids)
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        ring = engine.ring
        out = ds_ring.ring_attention(q, k, v, pattern=PATTERN, layout=ring.layout, mesh=ring.mesh)
        logits: Tensor = self.head(x + out.transpose(1, 2).flatten(-2))
        return logits


torch.manual_seed(0)
model = Model()
engine, _, loader, _ = ds_ring.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
    training_data=text.samples(8, 512),
    config={
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 2},
        "sequence_parallel_size": options.ring,
        "ring_attention": {"ring_size": "auto", "verify_first_batch": True},
    },
)
assert loader is not None, "training data were given"
for step, batch in enumerate(loader):
    logits = engine(batch["input_ids"], batch["position_ids"])
    loss = engine.ring.loss(logits, batch)
    engine.backward(loss.backward_loss)
    engine.step()
    if engine.global_rank == 0:
        print({"step": step, "loss": loss.mean_loss.item()}, flush=True)
