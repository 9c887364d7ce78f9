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
from bench import engine_of, in_turns, llama, parser_of, print_row
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


class DynamicStep(NamedTuple):
    """Hold what a step took, its mean loss, the world's labelled tokens, and the size of this rank's ring."""

    seconds: float
    loss: float
    tokens: float
    ring: int


class TrainedEngine:
    """Train one engine on one loader, step by step."""

    def __init__(self, asked: dict[str, Any], files: Files, kind: str, dynamic: bool) -> None:
        documents, rows = kind != "padded", 1 if kind == "one row" else asked["batch"]
        section = {"dynamic_ring": dynamic, "pattern": {"causal": True, "documents": documents}}
        hidden, zero = asked["hidden"], {"stage": asked["zero"]}
        model = llama(asked["longest"], VOCABULARY, hidden, 4 * hidden, asked["layers"], asked["heads"])
        self.engine = engine_of(model, asked["ring_size"], section, zero, batch=rows, sgd=0.01)
        self.first: dict[str, Tensor] = {}  # gradients of the first step
        tokens = {"pack_tokens": asked["batch"] // rows * asked["longest"]} if documents else {}
        loader = self.engine.ring.loader(
            files, rows, shuffle=True, drop_last=True, lengths=files.lengths, **tokens
        )
        self.batches: Iterator[Any] = iter(loader)

    def step(self) -> DynamicStep:
        """Train on the next batch."""
        import deepspeed

        dist.barrier()
        began = time.perf_counter()
        batch = next(self.batches)
        loss = self.engine(**batch).loss
        self.engine.backward(loss)
        if not self.first:
            for name, parameter in self.engine.module.named_parameters():
                self.first[name] = deepspeed.utils.safe_get_full_grad(parameter).detach().clone()
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
    found = in_turns({key: one.step for key, one in contestants.items()}, asked["steps"])
    rows = []
    for kind in asked["kinds"]:
        fixed, dynamic = found[kind, False], found[kind, True]
        pairs = list(zip(fixed, dynamic, strict=True))
        assert all(a.tokens == b.tokens for a, b in pairs), "other samples"
        rates = [statistics.median(one.tokens / one.seconds for one in some) for some in (fixed, dynamic)]
        sums = [sum(one.seconds for one in some) for some in (fixed, dynamic)]
        first = [contestants[kind, which].first for which in (False, True)]
        rows.append(
            {
                "kind": kind,
                "tokens_per_step": round(statistics.mean(one.tokens for one in fixed)),
                "fixed_tokens_per_s": round(rates[0]),
                "dynamic_tokens_per_s": round(rates[1]),
                "ratio": round(statistics.median(a.seconds / b.seconds for a, b in pairs), 3),
                "ratio_of_sums": round(sums[0] / sums[1], 3),
                "gradient_difference": max(
                    float((x - first[1][name]).norm() / x.norm()) for name, x in first[0].items()
                ),
                "loss_difference": max(abs(a.loss - b.loss) for a, b in pairs),
                "rings": [one.ring for one in dynamic],
            }
        )
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Print a row for each kind."""
    from ds_ring_launcher.run.local_ranks import run_ranks

    parser = parser_of(
        __doc__, ring_size=4, longest=2048, batch=8, steps=12, hidden=64, layers=4, heads=4, zero=1
    )
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    asked = vars(parser.parse_args(arguments))
    ranks = run_ranks(on_a_rank, asked["ring_size"], (asked,), threads=1, deadline_s=3600)
    for rows in zip(*ranks, strict=True):
        rings = [[row["rings"][step] for row in rows] for step in range(len(rows[0]["rings"]))]
        print_row(rows[0] | {"rings": rings})
    return 0


if __name__ == "__main__":
    sys.exit(main())
