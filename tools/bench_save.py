"""Measure what saving costs a training step, at once and in the background.

Trains a Llama with random weights on gloo ranks of this machine, on one batch; every fourth step it saves.
The cost of a save is the time of the call, and the time of all steps above that of as many without a save.

Example:
    python tools/bench_save.py --ranks 2 --hidden-size 256 --tokens 2048
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from typing import Any

from bench import engine_of, llama, parser_of, print_row

from ds_ring_launcher.run.local_ranks import run_ranks

EVERY = 4


def work(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Return the seconds of each step of a rank, by how it saves."""
    import torch

    size = options.hidden_size
    model = llama(options.tokens, 257, size, 3 * size, options.layers, 4, 2)
    engine = engine_of(model, options.ranks, {"layout": "zigzag"}, {"stage": 1})
    ids = torch.randint(0, 257, (1, options.tokens))
    found: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    for how in ("none", "at once", "background"):
        found[how], found[f"{how}: call"] = _steps(engine, ids, how, f"{folder}/{how}", options.saves)
    return found


def _steps(engine: Any, ids: Any, how: str, folder: str, saves: int) -> tuple[list[float], list[float]]:
    seconds, calls = [], []
    for step in range(2 + EVERY * saves):
        started = time.perf_counter()
        loss = engine(**engine.ring.shard_batch({"input_ids": ids, "labels": ids})).loss
        engine.backward(loss)
        engine.step()
        if how != "none" and step % EVERY == 1:
            called = time.perf_counter()
            engine.save_checkpoint(folder, background=how == "background")
            calls.append(time.perf_counter() - called)
        seconds.append(time.perf_counter() - started)
    return seconds[1:], calls


def main(arguments: list[str] | None = None) -> int:
    """Print one JSON object."""
    parser = parser_of(__doc__, ranks=2, hidden_size=256, layers=4, tokens=2048, saves=5)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(work, options.ranks, (options, folder), threads=1, deadline_s=500.0)
    first = ranks[0]
    step = statistics.median(first["none"])
    row: dict[str, Any] = {"parameters": first["parameters"], "step_seconds": round(step, 4)}
    for how in ("at once", "background"):
        call = statistics.median(first[f"{how}: call"])
        extra = (sum(first[how]) - step * len(first[how])) / len(first[f"{how}: call"])
        row[how] = {
            "call_seconds": round(call, 4),
            "call_share_of_a_step": round(call / step, 4),
            "seconds_a_save_in_all": round(extra, 4),
        }
    print_row(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
