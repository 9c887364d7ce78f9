"""Measure attention of layers that differ against the same layers all global: bytes, time, balance.

Forward and backward passes of Gemma 3's layers on a real ring, with the windows of its configuration and
without. Time is of the slowest rank, processor time of the busiest; both drop by the pairs outside the
windows. Balance is the work of the fullest rank over the mean, summed over layers.

Example:
    python tools/bench.py layers --tokens 16384 --ranks 4
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.measuring import (
    ResultRow,
    Turns,
    bytes_sent,
    clock,
    make_ring,
    measure_on_ranks,
    shard_inputs,
)
from ds_ring import Causal, PassOptions, RingMesh, SlidingWindow, build_plan, make_layout, ring_attention
from ds_ring.masks.pattern import Pattern
from ds_ring.schedule.layout import Layout

OPTIONS = {
    "tokens": 16384, "ranks": 4, "layers": 6, "window": 512, "heads": 4, "kv_heads": 1, "head_dim": 64,
    "rounds": 1,
}  # fmt: skip
OWN, GLOBAL = "its own", "all global"


def cases(options: argparse.Namespace) -> dict[str, tuple[list[Pattern], Layout]]:
    """Return the patterns of each layer and their layout, as the model is configured and all global."""
    from transformers import Gemma3TextConfig

    types = Gemma3TextConfig(num_hidden_layers=options.layers).layer_types or []
    window, causal = SlidingWindow(options.window), Causal()
    patterns: list[Pattern] = [
        window if layer_type == "sliding_attention" else causal for layer_type in types
    ]
    kinds: dict[str, list[Pattern]] = {OWN: patterns, GLOBAL: [Causal()] * options.layers}
    at = {"tokens": options.tokens, "ring_size": options.ranks}
    return {kind: (all_, make_layout("auto", **at, pattern=Counter(all_))) for kind, all_ in kinds.items()}


def step(
    mesh: RingMesh, layers: list[Pattern], layout: Layout, options: argparse.Namespace
) -> dict[str, float]:
    """Run every layer forward, then every layer backward; return seconds and bytes."""
    inputs = shard_inputs(layout, options.heads, options.head_dim, options.kv_heads)[:3]
    leaves = [x.requires_grad_() for x in inputs]
    before = bytes_sent(mesh)
    patient = PassOptions(hop_timeout_seconds=600)
    attend = partial(ring_attention, *leaves, layout=layout, mesh=mesh, options=patient)
    with clock() as taken:
        outs = [attend(pattern=pattern) for pattern in layers]
        for out in reversed(outs):
            out.backward(torch.ones_like(out))
    return taken | {"sent_bytes": bytes_sent(mesh) - before}


def prepare(options: argparse.Namespace) -> Turns:
    """Return a step of each case on this rank."""
    mesh = make_ring()
    return Turns({kind: partial(step, mesh, *case, options) for kind, case in cases(options).items()})


def planned(layers: list[Pattern], layout: Layout) -> dict[str, float]:
    """Return the pairs of all ranks, and the fullest rank's over the mean: of the sum, and layer by layer."""
    works = []
    for pattern, count in Counter(layers).items():
        plan = build_plan(pattern, layout)
        works.append(count * np.array([plan.rank(rank).pairs for rank in range(layout.ring_size)]))
    total = np.sum(works, axis=0)
    by_layer = sum(work.max() for work in works) / total.mean()
    return {
        "pairs": int(total.sum()),
        "balance": round(float(total.max() / total.mean()), 4),
        "balance_by_layer": round(float(by_layer), 4),
    }


def run(options: argparse.Namespace) -> Iterator[ResultRow]:
    """Yield a row for each of the two cases, and their ratio."""
    measured, of = measure_on_ranks(prepare, options), dict[str, dict[str, Any]]()
    for kind, (layers, layout) in cases(options).items():
        of[kind] = {key: measured.median(kind, key) for key in ("wall_s", "cpu_s")}
        of[kind] |= {"sent_bytes": max(measured.each(kind, "sent_bytes", sum))} | planned(layers, layout)
        yield ResultRow({"layers": kind, "layout": layout.name}, of[kind])
    keys = ("wall_s", "cpu_s", "sent_bytes", "pairs")
    yield ResultRow(
        {"layers": "of all global"},
        {f"{key}_ratio": round(of[OWN][key] / of[GLOBAL][key], 3) for key in keys},
    )
