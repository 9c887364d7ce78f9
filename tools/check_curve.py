"""Compare the loss curve of a training on a ring with that of plain PyTorch on one process, on real text.

The model has the sizes of a config.json of transformers and random weights; the text is Python's standard
library, as bytes. The ring trains through `ds_ring.initialize` with a ZeRO stage. The process trains the
model's own attention, written out ("eager"), with the same optimizer and batches; of equal scores of an
indexer it takes the first ones, as the ring does.

Example:
    python tools/check_curve.py --model configs/models/deepseek_v32_small.json --steps 100
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import make_parser, print_row

from ds_ring_launcher.demo.lm_data import PackedBytes
from ds_ring_launcher.run.local_ranks import run_ranks

BOUND = 1e-4  # of the largest relative difference of a loss


def small_model(path: str, seed: int = 0) -> Any:
    """Return the model with random weights, the same in every process."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).train()


def batches(options: argparse.Namespace) -> list[torch.Tensor]:
    """Return the token ids [samples, tokens] of each step."""
    data = PackedBytes(options.tokens)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).tolist()
    steps = zip(*[iter(order)] * options.samples, strict=False)
    chosen = [step for step, _ in zip(steps, range(options.steps), strict=False)]
    return [torch.stack([data[index]["input_ids"] for index in step]) for step in chosen]


def make_optimizer(model: Any, options: argparse.Namespace) -> torch.optim.Optimizer:
    """Return Adam with an eps above the rounding of gradients, which it would else make whole steps of."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=options.rate, eps=options.eps, weight_decay=0.0)


def train_alone(options: argparse.Namespace) -> list[float]:
    """One process: the loss of each step."""
    from ds_ring.layers.selection.total_order import TotalOrder

    model = small_model(options.model)
    model.set_attn_implementation("eager")
    optimizer, losses = make_optimizer(model, options), []
    for ids in batches(options):
        with TotalOrder():
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def train_on_ring(options: argparse.Namespace) -> list[float]:
    """One rank of the ring: the loss of each step."""
    import ds_ring

    model = small_model(options.model)
    engine, *_ = ds_ring.initialize(
        model=model,
        optimizer=make_optimizer(model, options),
        config={
            "train_micro_batch_size_per_gpu": options.samples,
            "zero_optimization": {"stage": options.stage},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # DeepSpeed clips to a norm of 1 by default
            "steps_per_print": 10**9,
            "sequence_parallel_size": dist.get_world_size(),
            "ring_attention": {"hop_timeout_seconds": 600, "heartbeat_timeout_seconds": 600},
        },
    )
    losses = []
    for ids in batches(options):
        output = engine(**engine.ring.shard_batch({"input_ids": ids, "labels": ids}))
        engine.backward(output.loss)
        engine.step()
        losses.append(float(engine.ring.mean_loss(output.loss)))
    engine.ring.mesh.close()
    return losses


def main(arguments: list[str] | None = None) -> int:
    """Print a row every tenth step, and the largest difference; return 1 if it is beyond the bound."""
    parser = make_parser(
        __doc__, model="configs/models/deepseek_v32_small.json", steps=100, tokens=128, samples=2,
        ring_size=2, stage=(2, "of ZeRO"), rate=5e-4, eps=1e-5, json=(False, "one JSON row per line"),
        deadline=(3000, "seconds"),
    )  # fmt: skip
    options = parser.parse_args(arguments)
    kind = json.loads(Path(options.model).read_text())["model_type"]
    (alone,) = run_ranks(train_alone, 1, (options,), threads=1, deadline_s=options.deadline)
    ring = run_ranks(train_on_ring, options.ring_size, (options,), threads=1, deadline_s=options.deadline)[0]
    errors = [abs(mine - theirs) / theirs for mine, theirs in zip(ring, alone, strict=True)]
    for step in sorted({*range(0, options.steps, 10), options.steps - 1}):
        row = {"step": step, "alone": round(alone[step], 5), "ring": round(ring[step], 5)}
        print_row(row | {"error": f"{errors[step]:.1e}"}, options.json)
    worst = max(errors)
    print_row({"model": kind, "steps": options.steps, "largest_error": f"{worst:.1e}"}, options.json)
    return int(not worst <= BOUND)


if __name__ == "__main__":
    sys.exit(main())
