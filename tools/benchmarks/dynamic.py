"""Measure training steps on samples of many lengths: dynamic rings against a fixed ring of the same ranks.

Contestants train the same model on the same samples (files of the standard library), step by step in turns,
each on the fixed ring and with `"dynamic_ring": true`: batches of similar length, padded; rows of packed
documents; one long row of packed documents. A step is all of it: reading, dividing, planning, forward,
backward, optimizer. Tokens are those of the files; padding does not count. Bytes are the payloads of ring
passes that the rank with most of them sends. The gradient of the first step is compared between the two of
each kind.

Example:
    python tools/bench.py dynamic --ranks 4 --longest 2048 --batch 8 --rounds 12
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import llama, make_engine
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.measuring import ResultRow, RoundResults, Turns, clock, measure_on_ranks
from ds_ring import RingMesh
from ds_ring.ring.observer import BatchEvent, Observers
from ds_ring_launcher.demo.lm_data import END_OF_DOCUMENT, VOCABULARY

KINDS = ["padded", "rows", "one row"]
OPTIONS = {
    "ranks": 4, "longest": (2048, "tokens of a sample at most"), "batch": 8, "rounds": (12, "steps"),
    "hidden": 64, "layers": 4, "heads": 4, "zero": 1, "kinds": (KINDS, "of batches", KINDS),
}  # fmt: skip


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


class Sends:
    """Count the payloads of the passes on a ring, and on its smaller rings, which share its observers."""

    def __init__(self, mesh: RingMesh) -> None:
        self.bytes = 0
        mesh.owners[Observers].append(self)

    def on_batch(self, event: BatchEvent) -> None:
        """Add what a batch has posted."""
        if event.stage == "compute":
            self.bytes += event.posted.bytes_sent


class TrainedEngine:
    """Train one engine on one loader, step by step."""

    def __init__(self, options: argparse.Namespace, files: Files, kind: str, dynamic: bool) -> None:
        documents, rows = kind != "padded", 1 if kind == "one row" else options.batch
        section = {"dynamic_ring": dynamic, "pattern": {"causal": True, "documents": documents}}
        hidden = options.hidden
        model = llama(options.longest, VOCABULARY, hidden, 4 * hidden, options.layers, options.heads)
        self.engine = make_engine(
            model, options.ranks, section, {"stage": options.zero}, batch=rows, sgd=0.01
        )
        self.first: dict[str, Tensor] = {}  # gradients of the first step
        self.sends = Sends(self.engine.ring.mesh)
        tokens = {"pack_tokens": options.batch // rows * options.longest} if documents else {}
        loading: dict[str, Any] = {"shuffle": True, "drop_last": True, "lengths": files.lengths, **tokens}
        self.batches: Iterator[Any] = iter(self.engine.ring.loader(files, rows, **loading))

    def step(self) -> dict[str, float]:
        """Train on the next batch."""
        import deepspeed

        before = self.sends.bytes
        with clock() as taken:
            batch = next(self.batches)
            loss = self.engine(**batch).loss
            self.engine.backward(loss)
            if not self.first:
                for name, parameter in self.engine.module.named_parameters():
                    self.first[name] = deepspeed.utils.safe_get_full_grad(parameter).detach().clone()
            self.engine.step()
            dist.barrier()
        ring = self.engine.ring
        mean, tokens = float(ring.mean_loss(loss)), batch["num_items_in_batch"] * ring.gradient_divisor
        counts = {"sent_bytes": self.sends.bytes - before, "ring": ring.batches.current.mesh.ring_size}
        return taken | {"loss": mean, "tokens": float(tokens)} | counts


def name_contestant(kind: str, dynamic: bool) -> str:
    """Return the name of a contestant."""
    return f"{kind}, {'dynamic' if dynamic else 'fixed'}"


def prepare(options: argparse.Namespace) -> Turns:
    """Return the contestants on this rank, and at the end how much their first gradients differ."""
    logging.disable(logging.WARNING)
    files = Files(options.longest)
    ways = [(kind, dynamic) for kind in options.kinds for dynamic in (False, True)]
    engines = {name_contestant(*way): TrainedEngine(options, files, *way) for way in ways}

    def differences() -> dict[str, float]:
        largest = {}
        for kind in options.kinds:
            fixed, dynamic = (engines[name_contestant(kind, which)].first for which in (False, True))
            largest[kind] = max(float((x - dynamic[name]).norm() / x.norm()) for name, x in fixed.items())
        return largest

    return Turns({name: engine.step for name, engine in engines.items()}, differences)


def make_row(kind: str, measured: RoundResults) -> ResultRow:
    """Return the row of a kind of batches."""
    names = fixed, dynamic = name_contestant(kind, False), name_contestant(kind, True)
    tokens, seconds, losses = (
        {name: measured.each(name, key) for name in names} for key in ("tokens", "wall_s", "loss")
    )
    rates = {
        name: statistics.median(t / s for t, s in zip(tokens[name], seconds[name], strict=True))
        for name in names
    }
    results = {
        "tokens_per_step": round(statistics.mean(tokens[fixed])),
        "fixed_tokens_per_s": round(rates[fixed]),
        "dynamic_tokens_per_s": round(rates[dynamic]),
        "ratio": measured.ratio(fixed, dynamic, "wall_s"),
        "fixed_sent_bytes": round(statistics.mean(measured.each(fixed, "sent_bytes"))),
        "dynamic_sent_bytes": round(statistics.mean(measured.each(dynamic, "sent_bytes"))),
        "ratio_of_sums": round(sum(seconds[fixed]) / sum(seconds[dynamic]), 3),
        "gradient_difference": measured.at_end[0][kind],
        "loss_difference": max(abs(a - b) for a, b in zip(losses[fixed], losses[dynamic], strict=True)),
        "rings": measured.each(dynamic, "ring", list),
    }
    return ResultRow({"kind": kind}, results, "" if tokens[fixed] == tokens[dynamic] else "other samples")


def run(options: argparse.Namespace) -> Iterator[ResultRow]:
    """Yield a row for each kind of batches."""
    measured = measure_on_ranks(prepare, options)
    yield from (make_row(kind, measured) for kind in options.kinds)
