"""Measure how much of the communication is exposed: two ranks on two hosts with a slow link.

Four ways of the same causal pass, forward + backward, take turns: with overlap; without (every message is
waited for before the next hop is computed); computing alone (nothing travels, zeros arrive); and transferring
alone (nothing is computed). `exposed` is the step over max(compute, transfer), `without` is the step without
overlap over compute + transfer. The hosts are network namespaces: it needs the right to make them, and
iproute2.

Example:
    python tools/bench.py overlap --mbit 200 --tokens 4096 8192 16384 --rounds 7
"""

from __future__ import annotations

import argparse
import json
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
from common import in_turns
from torch import Tensor

from benchmarks.measuring import ResultRow, RoundResults, shard_inputs, timed_pass
from ds_ring import Causal, PassOptions, RingMesh, make_layout, ring_attention
from ds_ring.comm.exchange import Exchange, Route
from ds_ring.comm.in_flight import Pending
from ds_ring.kernels.cpu.kernel import CpuKernel
from tests.dist.namespaces import two_hosts, why_not

DEADLINE_S = 580.0  # for all lengths together
OPTIONS = {
    "mbit": (200.0, "rate of the link, Mbit/s"), "tokens": [4096, 8192, 16384], "heads": 16, "head_dim": 64,
    "rounds": 7, "rank_file": ("", argparse.SUPPRESS),
}  # fmt: skip


class Arrived:
    """A batch that need not be waited for."""

    def wait(self) -> None:
        """Return at once."""


@contextmanager
def computing_alone() -> Iterator[None]:
    """Receive zeros at once."""

    real = Exchange.start

    def start(
        self: Exchange,
        route: Route,
        sent: Sequence[Tensor],
        received: Sequence[Tensor],
        hop: int | None = None,
    ) -> Arrived | Pending:
        if hop is None:  # the headers, which ranks compare before a pass
            return real(self, route, sent, received)
        for tensor in received:
            tensor.zero_()
        return Arrived()

    with patch.object(Exchange, "start", start):
        yield


@contextmanager
def transferring_alone() -> Iterator[None]:
    """Replace the kernels by ones that do nothing."""
    nothing = lambda *_: iter(())  # noqa: E731
    with patch.object(CpuKernel, "forward", nothing), patch.object(CpuKernel, "backward", nothing):
        yield


WAYS: dict[str, tuple[Callable[[], AbstractContextManager[None]], bool]] = {
    "overlap": (nullcontext, True),
    "no overlap": (nullcontext, False),
    "compute": (computing_alone, True),
    "transfer": (transferring_alone, True),
}


def one_pass(mesh: RingMesh, tokens: int, way: str, options: argparse.Namespace) -> dict[str, float]:
    """Return the seconds of a pass on this rank."""
    layout = make_layout("zigzag", tokens=tokens, ring_size=mesh.ring_size)
    around, overlap = WAYS[way]
    how = PassOptions(overlap=overlap, hop_timeout_seconds=300)
    attend = partial(
        ring_attention,
        pattern=Causal(),
        layout=layout,
        mesh=mesh,
        options=how,
    )
    with around():
        return timed_pass(attend, shard_inputs(layout, options.heads, options.head_dim))


def be_a_rank(options: argparse.Namespace) -> None:
    """Measure all lengths and ways on one rank; write the times to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh, times = RingMesh.from_world(2, heartbeat_timeout_s=60), {}
    for tokens in options.tokens:
        ways = {way: partial(one_pass, mesh, tokens, way, options) for way in WAYS}
        times[str(tokens)] = in_turns(ways, options.rounds, options.warm_up)
    dist.barrier()
    Path(f"{options.rank_file}.{dist.get_rank()}").write_text(json.dumps(times))
    dist.destroy_process_group()


def on_two_hosts(options: argparse.Namespace, folder: str) -> dict[int, RoundResults]:
    """Run a rank on each host; return what both measured, by length."""
    arguments = [str(Path(__file__).parents[1] / "bench.py"), "overlap", "--rank-file", f"{folder}/times"]
    for name in ("heads", "head_dim", "rounds", "warm_up"):
        arguments += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    arguments += ["--tokens", *map(str, options.tokens)]
    with two_hosts() as hosts:
        hosts.limit(options.mbit)
        logs = [Path(folder, f"log{host}") for host in range(2)]
        processes = [hosts.start(host, *arguments, log=logs[host]) for host in range(2)]
        deadline = time.monotonic() + DEADLINE_S
        for process, log in zip(processes, logs, strict=True):
            if process.wait(max(1.0, deadline - time.monotonic())):
                raise SystemExit(f"a rank ended with {process.returncode}:\n{log.read_text()[-3000:]}")
    ranks = [json.loads(Path(f"{folder}/times.{rank}").read_text()) for rank in range(2)]
    return {
        tokens: RoundResults(
            {way: list(zip(*(rank[str(tokens)][way] for rank in ranks), strict=True)) for way in WAYS}, []
        )
        for tokens in options.tokens
    }


def run(options: argparse.Namespace) -> Iterator[ResultRow]:
    """Yield a row for each length."""
    if options.rank_file:
        be_a_rank(options)
        return
    if reason := why_not():
        sys.exit(reason)
    with tempfile.TemporaryDirectory() as folder:
        lengths = on_two_hosts(options, folder)
    for tokens, measured in lengths.items():
        seconds = {way: measured.median(way, "wall_s", 6) for way in WAYS}
        results: dict[str, Any] = {f"{way.replace(' ', '_')}_s": round(s, 3) for way, s in seconds.items()}
        compute, transfer = seconds["compute"], seconds["transfer"]
        results["exposed"] = round(seconds["overlap"] / max(compute, transfer), 3)
        results["without"] = round(seconds["no overlap"] / (compute + transfer), 3)
        yield ResultRow({"tokens": tokens, "mbit": options.mbit, "heads": options.heads}, results)
