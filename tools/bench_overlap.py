"""How much of the communication is exposed: two ranks on two hosts (network namespaces) with a slow link.

Four ways of the same causal pass, forward + backward, interleaved in one run: with overlap; without (every
message is waited for before the next hop is computed); computing alone (nothing travels, zeros arrive); and
transferring alone (nothing is computed). `exposed` is the step over max(compute, transfer), `without` is the
step without overlap over compute + transfer. Needs the right to make network namespaces, and iproute2.

Example:
    python tools/bench_overlap.py --mbit 200 --tokens 4096 8192 16384 --rounds 7
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from bench import in_turns, parser_of, print_row
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests/, where the hosts are

from ds_ring import Causal, RingMesh, make_layout, ring_attention
from ds_ring.comm.exchange import Exchange, Route
from ds_ring.kernels.cpu.kernel import CpuKernel
from tests.dist.namespaces import two_hosts, why_not

LIMIT_S = 580.0  # for all lengths together


class Arrived:
    """A batch that need not be waited for."""

    def wait(self) -> None:
        """At once."""


@contextmanager
def computing_alone() -> Iterator[None]:
    """Zeros arrive at once."""

    def start(
        self: Exchange, route: Route, sent: Sequence[Tensor], received: Sequence[Tensor], hop: int
    ) -> Arrived:
        for tensor in received:
            tensor.zero_()
        return Arrived()

    with patch.object(Exchange, "start", start):
        yield


@contextmanager
def transferring_alone() -> Iterator[None]:
    """Kernels do nothing."""
    nothing = lambda *_: iter(())  # noqa: E731
    with patch.object(CpuKernel, "forward", nothing), patch.object(CpuKernel, "backward", nothing):
        yield


WAYS: dict[str, tuple[Callable[[], AbstractContextManager[None]], bool]] = {
    "overlap": (nullcontext, True),
    "no overlap": (nullcontext, False),
    "compute": (computing_alone, True),
    "transfer": (transferring_alone, True),
}


def one_pass(mesh: RingMesh, tokens: int, way: str, options: argparse.Namespace) -> float:
    """Seconds of forward + backward on this rank."""
    layout = make_layout("zigzag", tokens=tokens, ring_size=mesh.ring_size)
    shape = (1, options.heads, layout.local_tokens, options.head_dim)
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    grad = torch.randn(shape)
    around, overlap = WAYS[way]
    with around():
        dist.barrier()
        started = time.perf_counter()
        out = ring_attention(
            q, k, v, pattern=Causal(), layout=layout, mesh=mesh, overlap=overlap, hop_timeout_s=300
        )
        out.backward(grad)
        seconds = time.perf_counter() - started
    return seconds


def rank_main(options: argparse.Namespace) -> None:
    """All lengths and ways on one rank; times go to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = RingMesh.from_world(2, heartbeat_timeout_s=60)
    found: dict[str, dict[str, list[float]]] = {}
    for tokens in options.tokens:
        ways = {way: partial(one_pass, mesh, tokens, way, options) for way in WAYS}
        found[str(tokens)] = in_turns(ways, options.rounds)
    dist.barrier()
    Path(f"{options.rank_file}.{dist.get_rank()}").write_text(json.dumps(found))
    dist.destroy_process_group()


def measure(options: argparse.Namespace, folder: str) -> list[dict[str, Any]]:
    """Times of both ranks."""
    arguments = [str(Path(__file__).resolve()), "--rank-file", f"{folder}/times"]
    for name in ("heads", "head_dim", "rounds"):
        arguments += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    arguments += ["--tokens", *map(str, options.tokens)]
    with two_hosts() as hosts:
        hosts.limit(options.mbit)
        logs = [Path(folder, f"log{host}") for host in range(2)]
        processes = [hosts.start(host, *arguments, log=logs[host]) for host in range(2)]
        deadline = time.monotonic() + LIMIT_S
        for process, log in zip(processes, logs, strict=True):
            if process.wait(max(1.0, deadline - time.monotonic())):
                raise SystemExit(f"a rank ended with {process.returncode}:\n{log.read_text()[-3000:]}")
    return [json.loads(Path(f"{folder}/times.{rank}").read_text()) for rank in range(2)]


def row_of(tokens: int, ranks: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Medians over the rounds of the slower rank."""
    slowest = {way: statistics.median(map(max, *(rank[str(tokens)][way] for rank in ranks))) for way in WAYS}
    row: dict[str, Any] = {"tokens": tokens, "mbit": options.mbit, "heads": options.heads}
    row |= {f"{way.replace(' ', '_')}_s": round(seconds, 3) for way, seconds in slowest.items()}
    compute, transfer = slowest["compute"], slowest["transfer"]
    row["exposed"] = round(slowest["overlap"] / max(compute, transfer), 3)
    row["without"] = round(slowest["no overlap"] / (compute + transfer), 3)
    return row


def main(arguments: list[str] | None = None) -> int:
    """One row per length."""
    parser = parser_of(
        __doc__, mbit=(200.0, "rate of the link, Mbit/s"), tokens=[4096, 8192, 16384], heads=16, head_dim=64,
        rounds=(7, "after one of warm-up"),
    )  # fmt: skip
    parser.add_argument("--rank-file", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank_file:
        rank_main(options)
        return 0
    if why_not():
        raise SystemExit(why_not())
    with tempfile.TemporaryDirectory() as folder:
        ranks = measure(options, folder)
    for tokens in options.tokens:
        print_row(row_of(tokens, ranks, options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
