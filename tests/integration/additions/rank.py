"""Two ranks of the changed package: a model with all additions, by their names, against float64.

Argument: the folder for the file of the store and the reports. What is imported is imported once, and forked.
"""

from __future__ import annotations

import datetime
import json
import multiprocessing
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import ds_ring
from ds_ring import RingConfig, RingMesh, gather_sequence, make_layout, shard_sequence
from ds_ring.config.section import pattern_from_config
from ds_ring.plugin import KERNELS, PASSES, PATTERNS, load

try:
    from ds_ring.contrib.equip import equip  # type: ignore[import-not-found]
except ModuleNotFoundError:  # the additions are another package's
    from multihead import equip  # type: ignore[import-not-found,no-redef]

TOKENS, WIDTH, HEADS, BLOCK = 64, 32, 4, 10
SECTION = {"layout": "mirrored", "kernel": "double", "transport": "counted", "pattern": {"block": BLOCK}}


class Model(torch.nn.Module):
    """Two layers of attention and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(
            torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) for _ in range(2)
        )

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x, x, x, attn_mask=mask, need_weights=False)[0]
        return x


def main(rank: int, folder: Path) -> None:
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60)
    )
    mesh = RingMesh.from_world(2)
    config = RingConfig.from_deepspeed({"sequence_parallel_size": 2, "ring_attention": SECTION})
    layout = make_layout(config.layout, tokens=TOKENS, ring_size=2, pattern=pattern_from_config(config))
    x = torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(2))

    dense, position = Model().double(), torch.arange(TOKENS)
    hidden = position[None] // BLOCK > position[:, None] // BLOCK  # the mask once more, as a formula
    want = dense(x.double(), hidden)
    (want * weight.double()).sum().backward()

    model = equip(Model(), config, mesh)
    out = model(shard_sequence(x, layout, mesh=mesh, dim=1))
    (out * shard_sequence(weight, layout, mesh=mesh, dim=1)).sum().backward()
    errors = [(gather_sequence(out.detach(), layout, mesh=mesh, dim=1) - want).abs().max().item()]
    for own, exact in zip(model.parameters(), dense.parameters(), strict=True):
        assert own.grad is not None and exact.grad is not None
        dist.all_reduce(own.grad)
        errors.append(((own.grad - exact.grad).abs().max() / exact.grad.abs().max()).item())
    if hasattr(ds_ring, "neighbour_mean"):
        local = shard_sequence(x, layout, mesh=mesh, dim=1)
        means = ds_ring.neighbour_mean(local, layout=layout, mesh=mesh)
        exact_means = (x + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]) / 2
        errors.append((gather_sequence(means, layout, mesh=mesh, dim=1) - exact_means).abs().max().item())
    kernel = load(KERNELS["double"].home)
    counted = sys.modules[load(PASSES["counted"].home).__module__].CountedPass
    document = {
        "errors": errors,
        "first position": int(layout.positions(rank)[0]),
        "passes of the kernel": kernel.passes,
        "passes of the transport": counted.passes,
        "pattern": load(PATTERNS["BlockCausal"]).__module__,
        "file": ds_ring.__file__,
    }
    (folder / f"report{rank}").write_text(json.dumps(document))
    dist.destroy_process_group()


if __name__ == "__main__":
    processes = [
        multiprocessing.get_context("fork").Process(target=main, args=(n, Path(sys.argv[1])))
        for n in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))
