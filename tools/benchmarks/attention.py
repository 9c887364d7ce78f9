"""Measure ds_ring against SDPA and against its peers: causal attention, forward + backward, all in one run.

Contestants of `contestants.py` take turns: P ranks with one thread each, or one process with P threads while
the others wait. Reported are medians of the slowest rank, their spread, the ratio to SDPA in one process with
the same cores, the processor time of the busiest rank against that of SDPA with one thread / P, the errors
against float64 (out and the three gradients, relative to the largest value), the peak of tensor memory on a
rank with its inputs (and as part of a budget: q, k, v, out, lse, their gradients, two K/V buffers with
accumulators), and the bytes that crossed the loopback device.

Example:
    python tools/bench.py attention --tokens 4096 8192 16384 --rounds 7 --markdown
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.contestants import CONTESTANTS, RANKS, WHOLE
from benchmarks.measuring import (
    ResultRow,
    RoundResults,
    Turns,
    clock,
    forward_and_backward,
    make_ring,
    measure_on_ranks,
)
from ds_ring.comm.groups import gather_objects
from ds_ring.measure.memory import measure_cpu_memory
from ds_ring_launcher.compare.cells import Cell
from ds_ring_launcher.compare.peers import Entry, Where

BASE, SERIAL = "SDPA, one process", "SDPA, one thread"
RESULTS = ("out", "dq", "dk", "dv")
MAX_ERROR = 1e-3  # relative; a larger one is not rounding
OPTIONS = {
    "tokens": [4096, 8192, 16384], "ranks": 2, "heads": 4, "head_dim": 64, "rounds": 7,
    "no_errors": (False, "skip float64"),
    "only": (list(CONTESTANTS), "these contestants", list(CONTESTANTS)),
}  # fmt: skip


def whole_inputs(tokens: int, options: argparse.Namespace) -> list[Tensor]:
    """Return q, k, v and the gradient of out, [1, H, T, D]: the same in all processes."""
    generator = torch.Generator().manual_seed(tokens)
    shape = (1, options.heads, tokens, options.head_dim)
    return [torch.randn(shape, generator=generator) for _ in range(4)]


class Contest:
    """Run contestants at one length on one rank; all ranks call the same methods in the same order."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.mesh = options, make_ring()
        self.entries: dict[str, Entry | None] = {}  # None: another rank runs it
        self.cannot_run: dict[str, str] = {}
        for name in options.only:
            reason = None
            try:
                self.entries[name] = self._entry(name)
                self.time(name)
            except Exception as error:
                missing = "not installed: " if isinstance(error, ImportError) else ""
                reason = missing + (str(error) or repr(error)).splitlines()[0]
            if failed := [text for text in gather_objects(reason) if text]:
                self.cannot_run[name] = failed[0]
                self.entries.pop(name, None)

    def _entry(self, name: str) -> Entry | None:
        contestant, rank, options = CONTESTANTS[name], self.mesh.ring_rank, self.options
        heads = options.heads
        cell = Cell("causal", True, options.tokens, heads, heads, head_dim=options.head_dim)
        if contestant.where == RANKS:
            return contestant.prepare(cell, Where(rank, options.ranks, mesh=self.mesh))
        return contestant.prepare(cell, Where(0, 1)) if rank == 0 else None

    def time(self, name: str) -> dict[str, float]:
        """Return the seconds of a pass and the bytes over the loopback device; zeros on a rank that waits."""
        entry, where = self.entries[name], CONTESTANTS[name].where
        numbers = {"wall_s": 0.0, "cpu_s": 0.0, "sent_bytes": 0.0}
        inputs = (
            [x[:, :, entry.positions] for x in whole_inputs(self.options.tokens, self.options)]
            if entry
            else []
        )
        dist.barrier()
        if entry:
            torch.set_num_threads(self.options.ranks if where == WHOLE else 1)
            sent = loopback_bytes()
            with clock(together=False) as taken:
                forward_and_backward(entry.attend, inputs)
            torch.set_num_threads(1)
        dist.barrier()
        if entry:
            numbers = taken | {"sent_bytes": loopback_bytes() - sent}
        return numbers

    def peak_bytes(self, name: str) -> int:
        """Return the peak of tensor memory in a pass, inputs included."""
        if (entry := self.entries[name]) is None:
            return 0
        with measure_cpu_memory() as memory:
            shape = (1, self.options.heads, len(entry.positions), self.options.head_dim)
            forward_and_backward(entry.attend, [torch.randn(shape) for _ in range(4)])
        return memory.peak_bytes

    def errors(self, name: str) -> list[float]:
        """Return the largest differences from float64 in each result, relative to its largest value."""
        if (entry := self.entries[name]) is None or self.options.no_errors:
            return [0.0] * len(RESULTS)
        inputs = [x[:, :, entry.positions] for x in whole_inputs(self.options.tokens, self.options)]
        results = forward_and_backward(entry.attend, inputs)
        exact = torch.load(self.options.exact, mmap=True)
        pairs = zip(results, exact, strict=True)
        return [float((x - y[:, :, entry.positions]).abs().max() / y.abs().max()) for x, y in pairs]

    def at_end(self) -> dict[str, Any]:
        """Return peaks and errors of the contestants that ran, and why others did not."""
        known = {name: (self.peak_bytes(name), self.errors(name)) for name in self.entries}
        return {"known": known, "cannot_run": self.cannot_run}


def prepare(options: argparse.Namespace) -> Turns:
    """Return the contestants that run here."""
    contest = Contest(options)
    return Turns({name: partial(contest.time, name) for name in contest.entries}, contest.at_end)


def loopback_bytes() -> int:
    """Return the bytes that the loopback device has received since the machine started."""
    return psutil.net_io_counters(pernic=True)["lo"].bytes_recv


def make_row(name: str, measured: RoundResults, options: argparse.Namespace) -> ResultRow:
    """Return the row of one contestant."""
    case = {"contestant": name, "tokens": options.tokens, "ranks": options.ranks}
    if name in measured.at_end[0]["cannot_run"]:
        return ResultRow(case, {"cannot_run": measured.at_end[0]["cannot_run"][name]})
    walls, cpu = measured.each(name, "wall_s"), measured.median(name, "cpu_s")
    results: dict[str, Any] = {"median_s": measured.median(name, "wall_s")}
    results |= {
        "fastest_s": round(min(walls), 4),
        "slowest_s": round(max(walls), 4),
        "busiest_rank_cpu_s": cpu,
    }
    if BASE in measured.rounds:
        results["ratio"] = round(results["median_s"] / measured.median(BASE, "wall_s"), 3)
        results["ratio_by_round"] = measured.ratio(name, BASE, "wall_s")
    if SERIAL in measured.rounds:
        results["cpu_ratio"] = round(cpu * options.ranks / measured.median(SERIAL, "cpu_s"), 3)
    peaks, errors = zip(*(rank["known"][name] for rank in measured.at_end), strict=True)
    wrong = ""
    if not options.no_errors:
        worst = dict(zip(RESULTS, map(max, *errors), strict=True))
        results |= {f"error_{result}": f"{error:.1e}" for result, error in worst.items()}
        results["wrong"] = ", ".join(result for result, error in worst.items() if error > MAX_ERROR)
        wrong = f"{name}: {results['wrong']}" if results["wrong"] and name.startswith("ds_ring") else ""
    # q, k, v, out, lse, their gradients, and two K/V buffers with their accumulators
    budget = options.heads * (options.tokens // options.ranks) * (16 * options.head_dim * 4 + 4)
    results |= {"peak_mib": round(max(peaks) / 2**20, 1), "of_budget": round(max(peaks) / budget, 2)}
    results["sent_mib"] = round(statistics.median(measured.each(name, "sent_bytes")) / 2**20, 1)
    return ResultRow(case, results, wrong)


def run(options: argparse.Namespace) -> Iterator[ResultRow]:
    """Yield a row for each length and contestant."""
    for tokens in options.tokens:
        with tempfile.TemporaryDirectory() as folder:
            at = argparse.Namespace(**vars(options) | {"tokens": tokens, "exact": Path(folder, "exact.pt")})
            if not options.no_errors:
                dense = partial(scaled_dot_product_attention, is_causal=True)
                torch.save(
                    forward_and_backward(dense, [x.double() for x in whole_inputs(tokens, at)]), at.exact
                )
            measured = measure_on_ranks(prepare, at, deadline_s=86_400)
        yield from (make_row(name, measured, at) for name in options.only)
