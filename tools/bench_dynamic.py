"""Train on the standard library's files as samples: dynamic rings beside a fixed ring of the same ranks.

Contestants train the same model on the same samples, step by step in turns, on real ranks over gloo, each on
the fixed ring and with `"dynamic_ring": true`: batches of similar length, padded; rows of packed documents;
one long row of packed documents. A step is all of it: reading, dividing, planning, forward, backward,
optimizer. Tokens are those of the files; padding does not count. The gradient of the first step is compared
between the two of each kind.

Example:
    python tools/bench_dynamic.py --ring-size 4 --longest 2048 --batch 8 --steps 12
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from ds_ring_launcher.demo.lm_data import END_OF_DOCUMENT, VOCABULARY

KINDS = ("padded", "rows", "one row")


class Files(Dataset[dict[str, Tensor]]):
    """Hold each file as a sample of bytes, cut at `longest` tokens."""

    def __init__(self, longest: int) -> None:
        root = Path(sysconfig.get_path("stdlib"))
        paths = sorted(path for path in root.rglob("*.py") if "site-packages" not in path.parts)
        texts = [path.read_bytes()[: longest - 1] for path in paths]
        self.samples = [torch.tensor([*text, END_OF_DOCUMENT]) for text in texts]
        self.lengths = [len(sample) for sample in self.samples]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.samples[index], "labels": self.samples[index]}


def build(asked: dict[str, Any]) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=asked["hidden"], intermediate_size=4 * asked["hidden"],
        num_hidden_layers=asked["layers"], num_attention_heads=asked["heads"],
        max_position_embeddings=asked["longest"],
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


class DynamicStep(NamedTuple):
    """Hold what a step took, its mean loss, the world's labelled tokens, and the size of this rank's ring."""

    seconds: float
    loss: float
    tokens: float
    ring: int


class TrainedEngine:
    """Train one engine on one loader, step by step."""

    def __init__(self, asked: dict[str, Any], files: Files, kind: str, dynamic: bool) -> None:
        import ds_ring

        documents, rows = kind != "padded", 1 if kind == "one row" else asked["batch"]
        section = {"dynamic_ring": dynamic, "pattern": {"causal": True, "documents": documents}}
        model = build(asked)
        self.engine, _, _, _ = ds_ring.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
            config={
                "train_micro_batch_size_per_gpu": rows,
                "zero_optimization": {"stage": asked["zero"]},
                "zero_allow_untested_optimizer": True,
                "steps_per_print": 10**9,
                "sequence_parallel_size": asked["ring_size"],
                "ring_attention": section,
            },
        )
        tokens = {"pack_tokens": asked["batch"] // rows * asked["longest"]} if documents else {}
        loader = self.engine.ring.loader(
            files, rows, shuffle=True, drop_last=True, lengths=files.lengths, **tokens
        )
        self.batches: Iterator[Any] = iter(loader)

    def step(self, gradients: dict[str, Tensor] | None = None) -> DynamicStep:
        """Train on the next batch; fill in the gradients if they are asked for."""
        import deepspeed

        dist.barrier()
        began = time.perf_counter()
        batch = next(self.batches)
        loss = self.engine(**batch).loss
        self.engine.backward(loss)
        if gradients is not None:
            for name, parameter in self.engine.module.named_parameters():
                gradients[name] = deepspeed.utils.safe_get_full_grad(parameter).detach().clone()
        self.engine.step()
        dist.barrier()
        seconds = time.perf_counter() - began
        ring = self.engine.ring
        mean, tokens = float(ring.mean_loss(loss)), batch["num_items_in_batch"] * ring.gradient_divisor
        return DynamicStep(seconds, mean, float(tokens), ring.batches.current.mesh.ring_size)


def on_a_rank(asked: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each kind, on this rank."""
    logging.disable(logging.WARNING)
    files = Files(asked["longest"])
    contestants = {
        (kind, dynamic): TrainedEngine(asked, files, kind, dynamic)
        for kind in asked["kinds"]
        for dynamic in (False, True)
    }
    first: dict[tuple[str, bool], dict[str, Tensor]] = {key: {} for key in contestants}
    found: dict[tuple[str, bool], list[DynamicStep]] = {key: [] for key in contestants}
    for turn in range(asked["steps"] + 1):
        for key, one in contestants.items():
            found[key].append(one.step(first[key] if not turn else None))
    rows = []
    for kind in asked["kinds"]:
        fixed, dynamic = found[kind, False], found[kind, True]
        pairs = list(zip(fixed, dynamic, strict=True))
        assert all(a.tokens == b.tokens for a, b in pairs), "other samples"
        rates = [statistics.median(one.tokens / one.seconds for one in some[1:]) for some in (fixed, dynamic)]
        rows.append(
            {
                "kind": kind,
                "tokens_per_step": round(statistics.mean(one.tokens for one in fixed)),
                "fixed_tokens_per_s": round(rates[0]),
                "dynamic_tokens_per_s": round(rates[1]),
                "ratio": round(statistics.median(a.seconds / b.seconds for a, b in pairs[1:]), 3),
                "ratio_of_sums": round(
                    sum(a.seconds for a, _ in pairs[1:]) / sum(b.seconds for _, b in pairs[1:]), 3
                ),
                "gradient_difference": difference(first[kind, False], first[kind, True]),
                "loss_difference": max(abs(a.loss - b.loss) for a, b in pairs),
                "rings": [one.ring for one in dynamic],
            }
        )
    return rows


def difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Return the largest relative difference of a parameter's gradient."""
    return max(float((left[name] - right[name]).norm() / left[name].norm()) for name in left)


def main(arguments: list[str] | None = None) -> int:
    """Print a row for each kind."""
    from ds_ring_launcher.run.local_ranks import run_ranks

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    defaults = {
        "ring_size": 4,
        "longest": 2048,
        "batch": 8,
        "steps": 12,
        "hidden": 64,
        "layers": 4,
        "heads": 4,
    }
    for name, value in (defaults | {"zero": 1}).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    asked = vars(parser.parse_args(arguments))
    ranks = run_ranks(on_a_rank, asked["ring_size"], (asked,), threads=1, deadline_s=3600)
    for rows in zip(*ranks, strict=True):
        rings = [[row["rings"][step] for row in rows] for step in range(len(rows[0]["rings"]))]
        print(json.dumps(rows[0] | {"rings": rings}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
