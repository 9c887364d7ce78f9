"""Measure steps on ranks of unequal speed, with `"rank_speeds": "measured"` and without, on two gloo ranks.

Rank 1 shares its core with a process that computes all the time, so it attends at about half the speed. Both
engines train the same Llama, in turns.

Example:
    python tools/bench.py speeds --tokens 8192 --rounds 7
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from common import llama, make_engine

from benchmarks.measuring import ResultRow, Turns, clock, measure_on_ranks

OPTIONS = {
    "tokens": (8192, "of the sample"), "hidden": (256, "of the model; heads have 64"),
    "rounds": (7, "steps measured"), "slowed": (1, "0 leaves both ranks as fast"),
    "deadline": (500.0, "seconds until the ranks are ended"),
}  # fmt: skip


def keep_busy(core: int) -> None:
    """Compute on one core for ever."""
    os.sched_setaffinity(0, {core})
    while True:
        sum(range(10_000))


def prepare(options: argparse.Namespace) -> Turns:
    """Return a step of both engines on this rank, and at the end the speeds that were measured."""
    rank, heads = dist.get_rank(), options.hidden // 64
    core = sorted(os.sched_getaffinity(0))[rank]
    os.sched_setaffinity(0, {core})
    if rank == 1 and options.slowed:  # a daemon: it ends with this process
        multiprocessing.get_context("spawn").Process(target=keep_busy, args=(core,), daemon=True).start()
    engines = {
        name: make_engine(
            llama(options.tokens, 256, options.hidden, 2 * options.hidden, 2, heads), options.ranks,
            {"ring_size": options.ranks, "rank_speeds": speeds}, {"stage": 1},
        )
        for name, speeds in (("equal", None), ("measured", "measured"))
    }  # fmt: skip
    ids = torch.randint(256, (1, options.tokens))
    dist.broadcast(ids, 0)

    def step(engine: Any) -> dict[str, float]:
        batch = engine.ring.shard_batch({"input_ids": ids, "labels": ids})
        with clock() as taken:
            engine.backward(engine(**batch).loss)
            engine.step()
            dist.barrier()
        return taken

    works = {name: partial(step, engine) for name, engine in engines.items()}
    return Turns(works, lambda: list(engines["measured"].ring.speeds))


def run(options: argparse.Namespace) -> Iterator[ResultRow]:
    """Yield one row: medians without and with the speeds, their ratio, and the speeds."""
    options.ranks = 2
    measured = measure_on_ranks(prepare, options, options.deadline)
    results: dict[str, Any] = {f"{name}_s": measured.median(name, "wall_s", 3) for name in measured.rounds}
    results |= {"ratio": round(results["measured_s"] / results["equal_s"], 2), "speeds": measured.at_end[0]}
    yield ResultRow({"tokens": options.tokens, "slowed": options.slowed}, results)
