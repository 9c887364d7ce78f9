"""What the guard costs: the same passes with it and with bare waits, interleaved in one run.

"bare" waits in torch itself, without a thread, a watch, a check of messages and buffers, or a header.

Example:
    python tools/bench_guard.py --tokens 8192 --rounds 15
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from bench import in_turns, parser_of, print_row

from ds_ring import Causal, RingMesh, make_layout, ring_attention
from ds_ring.comm import exchange, waiting
from ds_ring.ops import context
from ds_ring_launcher.run.local_ranks import run_ranks


@contextmanager
def bare() -> Iterator[None]:
    """Without the guard."""

    def wait(works: list[dist.Work], *_: object) -> None:
        for work in works:
            work.wait()

    with (
        patch.object(waiting, "wait_for", wait),
        patch.object(waiting, "_versions", lambda tensors: []),
        patch.object(exchange, "check_messages", lambda messages: None),
        patch.object(context, "compare_headers", lambda *_, **__: lambda: None),
    ):
        yield


def one_pass(mesh: RingMesh, options: argparse.Namespace) -> float:
    """Seconds of forward + backward on this rank."""
    layout = make_layout("zigzag", tokens=options.tokens, ring_size=mesh.ring_size)
    shape = (1, options.heads, layout.local_tokens, options.head_dim)
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    grad = torch.randn(shape)
    dist.barrier()
    started = time.perf_counter()
    ring_attention(q, k, v, pattern=Causal(), layout=layout, mesh=mesh).backward(grad)
    return time.perf_counter() - started


def on_a_rank(options: argparse.Namespace) -> dict[str, list[float]]:
    """Interleaved rounds on one rank."""
    mesh = RingMesh.from_world(options.ranks)

    def without_guard() -> float:
        with bare():
            return one_pass(mesh, options)

    return in_turns({"guarded": lambda: one_pass(mesh, options), "bare": without_guard}, options.rounds)


def main(arguments: list[str] | None = None) -> int:
    """One row."""
    rounds = (15, "after one of warm-up")
    parser = parser_of(__doc__, tokens=8192, ranks=2, heads=4, head_dim=64, rounds=rounds)
    options = parser.parse_args(arguments)
    ranks = run_ranks(on_a_rank, options.ranks, (options,), threads=1, deadline_s=3600)
    slowest = {name: list(map(max, *(rank[name] for rank in ranks))) for name in ("guarded", "bare")}
    row: dict[str, Any] = {"tokens": options.tokens, "ranks": options.ranks, "rounds": options.rounds}
    row |= {f"{name}_median_s": round(statistics.median(times), 4) for name, times in slowest.items()}
    row |= {f"{name}_fastest_s": round(min(times), 4) for name, times in slowest.items()}
    pairs = zip(slowest["guarded"], slowest["bare"], strict=True)
    row["cost_percent"] = round(100 * (statistics.median(g / b for g, b in pairs) - 1), 2)
    print_row(row | {"torch": torch.__version__})
    return 0


if __name__ == "__main__":
    sys.exit(main())
