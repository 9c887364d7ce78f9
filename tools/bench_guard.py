"""What the guard costs: the same passes with it and with bare waits, interleaved in one run.

"bare" waits in torch itself, without a thread, a watch, a check of messages and buffers, or a header.

Example:
    python tools/bench_guard.py --tokens 8192 --rounds 15
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from ds_ring import Causal, RingMesh, make_layout, ring_attention
from ds_ring.runtime import context, exchange, waiting


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


def rank_main(rank: int, size: int, store: str, options: argparse.Namespace, out: str) -> None:
    """Interleaved rounds on one rank."""
    torch.set_num_threads(1)
    timeout = timedelta(minutes=10)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    mesh = RingMesh.from_world(size)
    times: dict[str, list[float]] = {"guarded": [], "bare": []}
    for turn in range(options.rounds + 1):
        names = list(times) if turn % 2 else list(reversed(times))
        for name in names:
            if name == "bare":
                with bare():
                    seconds = one_pass(mesh, options)
            else:
                seconds = one_pass(mesh, options)
            if turn:
                times[name].append(seconds)
    Path(f"{out}.{rank}").write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> int:
    """One row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15, help="after one of warm-up")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        spawn(rank_main, (options.ranks, f"{folder}/s", options, f"{folder}/out"), nprocs=options.ranks)
        ranks = [json.loads(Path(f"{folder}/out.{rank}").read_text()) for rank in range(options.ranks)]
    slowest = {
        name: [max(times) for times in zip(*(r[name] for r in ranks), strict=True)] for name in ranks[0]
    }
    row: dict[str, Any] = {"tokens": options.tokens, "ranks": options.ranks, "rounds": options.rounds}
    row |= {f"{name}_median_s": round(statistics.median(times), 4) for name, times in slowest.items()}
    row |= {f"{name}_fastest_s": round(min(times), 4) for name, times in slowest.items()}
    pairs = zip(slowest["guarded"], slowest["bare"], strict=True)
    row["cost_percent"] = round(100 * (statistics.median(g / b for g, b in pairs) - 1), 2)
    row["torch"] = torch.__version__
    print(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
