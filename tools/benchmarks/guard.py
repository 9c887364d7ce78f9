"""Measure what the failure detector costs: the same passes with it and with bare waits.

"bare" waits in torch itself, without a thread, a watch, a check of messages and buffers, or a header.

Example:
    python tools/bench.py guard --tokens 8192 --rounds 15
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from unittest.mock import patch

import torch.distributed as dist

from benchmarks.measuring import ResultRow, Turns, measure_on_ranks, ring_of_ranks, shard_inputs, timed_pass
from ds_ring import Causal, make_layout, ring_attention
from ds_ring.comm import exchange, in_flight
from ds_ring.comm.collective import collective

OPTIONS = {"tokens": 8192, "ranks": 2, "heads": 4, "head_dim": 64, "rounds": 15}


@contextmanager
def bare() -> Iterator[None]:
    """Run passes without the guard."""

    def wait(works: list[dist.Work], *_: object) -> None:
        for work in works:
            work.wait()

    with (
        patch.object(in_flight, "wait_for", wait),
        patch.object(in_flight, "_read_versions", lambda tensors: []),
        patch.object(exchange, "check_messages", lambda messages: None),
        patch.object(collective, "compare_headers", lambda *_, **__: None),
    ):
        yield


def prepare(options: argparse.Namespace) -> Turns:
    """Return both kinds of a pass on this rank."""
    mesh = ring_of_ranks()
    layout = make_layout("zigzag", tokens=options.tokens, ring_size=mesh.ring_size)
    attend = partial(ring_attention, pattern=Causal(), layout=layout, mesh=mesh)

    def one_pass(around: AbstractContextManager[None]) -> dict[str, float]:
        inputs = shard_inputs(layout, options.heads, options.head_dim)
        with around:
            return timed_pass(attend, inputs)

    return Turns({"guarded": lambda: one_pass(nullcontext()), "bare": lambda: one_pass(bare())})


def run(options: argparse.Namespace) -> Iterator[ResultRow]:
    """Yield one row."""
    found = measure_on_ranks(prepare, options)
    results = {f"{name}_median_s": found.median(name, "wall_s") for name in found.rounds}
    results |= {f"{name}_fastest_s": round(min(found.each(name, "wall_s")), 4) for name in found.rounds}
    results["cost_percent"] = round(100 * (found.ratio("guarded", "bare", "wall_s", 6) - 1), 2)
    yield ResultRow({"tokens": options.tokens, "ranks": options.ranks}, results)
