"""Measure what saving costs a training step, at once and in the background.

Trains a Llama with random weights on gloo ranks of this machine, on one batch; every fourth step it saves.
The cost of a save is the time of the call, and the time of all steps above that of as many without a save.

Example:
    python tools/bench.py save --ranks 2 --hidden 256 --tokens 2048
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from common import engine_of, llama

from benchmarks.measuring import ResultRow, Turns, clock, measure_on_ranks

EVERY = 4
HOW = {"none": None, "at_once": False, "background": True}
OPTIONS = {"ranks": 2, "hidden": 256, "layers": 4, "tokens": 2048, "rounds": (5, "saves")}


def prepare(options: argparse.Namespace) -> Turns:
    """Return four steps on this rank for each way to save, and the parameters of the model."""
    model = llama(options.tokens, 257, options.hidden, 3 * options.hidden, options.layers, 4, 2)
    engine = engine_of(model, options.ranks, {"layout": "zigzag"}, {"stage": 1})
    ids = torch.randint(0, 257, (1, options.tokens))

    def steps(how: str) -> dict[str, float]:
        found = {"call_s": 0.0}
        with clock() as taken:
            for step in range(EVERY):
                batch = engine.ring.shard_batch({"input_ids": ids, "labels": ids})
                engine.backward(engine(**batch).loss)
                engine.step()
                if step == 1 and how != "none":
                    with clock(together=False) as call:
                        engine.save_checkpoint(f"{options.folder}/{how}", background=HOW[how])
                    found["call_s"] = call["wall_s"]
        return taken | found

    return Turns(
        {how: partial(steps, how) for how in HOW}, lambda: sum(p.numel() for p in model.parameters())
    )


def run(options: argparse.Namespace) -> Iterator[ResultRow]:
    """Yield a row for each way to save."""
    with tempfile.TemporaryDirectory() as options.folder:
        found = measure_on_ranks(prepare, options, deadline_s=500)
    step = found.median("none", "wall_s", 6) / EVERY
    case: dict[str, Any] = {"parameters": found.at_end[0], "step_s": round(step, 4)}
    for how in ("at_once", "background"):
        call, whole = found.median(how, "call_s"), statistics.mean(found.each(how, "wall_s"))
        results = {"call_s": call, "call_over_step": round(call / step, 4)}
        yield ResultRow(case | {"save": how}, results | {"all_s": round(whole - EVERY * step, 4)})
