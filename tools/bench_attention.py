"""ds_ring against SDPA and against its peers: causal attention, forward + backward, all in one run.

Every contestant of `contestants.py` takes its turn in every round, so that a busy moment hits all alike: P
ranks with one thread each, or one process with P threads while the others wait. Reported are medians of the
slowest rank, their spread, the ratio to SDPA in one process with the same cores, the processor time of the
busiest rank against that of SDPA with one thread / P, the error against float64 (out and the three gradients,
worst of them, relative to the largest value), the peak of tensor memory on a rank with its inputs (and as
part of a budget: q, k, v, out, lse, their gradients, two K/V buffers with accumulators), and what crossed the
loopback device.

Example:
    python tools/bench_attention.py --tokens 4096 8192 16384 --rounds 7
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
from bench import in_turns, parser_of
from contestants import CONTESTANTS, RANKS, WHOLE, CannotRun, ContestSetup, Entry
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ds_ring import RingMesh
from ds_ring.ring.trace import measure_cpu_memory
from ds_ring_launcher.run.local_ranks import run_ranks

BASE, SERIAL = "SDPA, one process", "SDPA, one thread"
NAMES = ("out", "dq", "dk", "dv")
WRONG = 1e-3  # a relative error beyond this is no rounding


class OnePass(NamedTuple):
    """Wall seconds of the slowest rank, processor seconds of the busiest, bytes over the loopback device."""

    wall: float
    cpu: float
    sent: int


def global_inputs(tokens: int, options: argparse.Namespace) -> list[Tensor]:
    """q, k, v and the gradient of out, [1, H, T, D]: the same on all processes."""
    generator = torch.Generator().manual_seed(tokens)
    shape = (1, options.heads, tokens, options.head_dim)
    return [torch.randn(shape, generator=generator) for _ in range(4)]


def attend(inputs: Sequence[Tensor], entry: Callable[..., Tensor]) -> list[Tensor]:
    """Out and the three gradients."""
    *leaves, grad = inputs
    for x in leaves:
        x.requires_grad_()
    out = entry(*leaves)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


class LengthComparison:
    """All contestants at one length, on one rank: all ranks call the same methods in the same order."""

    def __init__(self, tokens: int, options: argparse.Namespace, mesh: RingMesh) -> None:
        self.tokens, self.options, self.mesh = tokens, options, mesh
        self.names = [name for name in CONTESTANTS if not options.only or name in options.only]
        self.entries: dict[str, Entry] = {}
        self.broken: dict[str, str] = {}

    def ask(self, act: Callable[[Entry], Any], name: str) -> list[Any]:
        """What each process of a contestant answers; nothing where it cannot run."""
        if name in self.broken:
            return []
        where, rank, mine = CONTESTANTS[name].where, self.mesh.ring_rank, None
        if where == RANKS or rank == 0:
            torch.set_num_threads(self.options.ranks if where == WHOLE else 1)
            place = (rank, self.options.ranks, self.tokens, self.mesh)
            try:
                if name not in self.entries:
                    own = ContestSetup(*place if where == RANKS else (0, 1, self.tokens, None))
                    self.entries[name] = CONTESTANTS[name].prepare(own)
                mine = act(self.entries[name])
            except Exception as error:
                text = f"not installed: {error}" if isinstance(error, ImportError) else str(error)
                mine = CannotRun((text or repr(error)).splitlines()[0])
            torch.set_num_threads(1)
        answers: list[Any] = [None] * self.options.ranks
        dist.all_gather_object(answers, mine)
        if failed := [one for one in answers if isinstance(one, CannotRun)]:
            self.broken[name] = str(failed[0])
            return []
        return answers if where == RANKS else answers[:1]

    def _inputs(self, entry: Entry) -> list[Tensor]:
        return [x[:, :, entry.positions].contiguous() for x in global_inputs(self.tokens, self.options)]

    def _time(self, entry: Entry) -> OnePass:
        inputs, alone = self._inputs(entry), len(entry.positions) == self.tokens
        if not alone:
            dist.barrier()
        wall, cpu, sent = time.perf_counter(), time.process_time(), loopback_bytes()
        attend(inputs, entry.attend)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        if not alone:
            dist.barrier()
        return OnePass(wall, cpu, loopback_bytes() - sent)

    def _memory(self, entry: Entry) -> int:
        """Peak tensor bytes of a pass, with its inputs."""
        with measure_cpu_memory() as memory:
            shape = (1, self.options.heads, len(entry.positions), self.options.head_dim)
            attend([torch.randn(shape) for _ in range(4)], entry.attend)
        return memory.peak_bytes

    def _error(self, entry: Entry) -> list[float]:
        """Largest differences from float64 in out, dq, dk and dv, relative to their largest values."""
        found = attend(self._inputs(entry), entry.attend)
        exact = torch.load(Path(self.options.folder, f"exact{self.tokens}.pt"), mmap=True)
        return [
            float((x - y[:, :, entry.positions]).abs().max() / y.abs().max())
            for x, y in zip(found, exact, strict=True)
        ]

    def _round(self, name: str) -> OnePass | None:
        answers = self.ask(self._time, name)
        return OnePass(*map(max, zip(*answers, strict=True))) if answers else None

    def rows(self) -> list[dict[str, Any]]:
        """Run all rounds; one row per contestant."""
        rounds = in_turns({name: partial(self._round, name) for name in self.names}, self.options.rounds)
        times = {name: [one for one in found if one is not None] for name, found in rounds.items()}
        return [self._row(name, times) for name in self.names]

    def _row(self, name: str, times: dict[str, list[OnePass]]) -> dict[str, Any]:
        heads, ranks = self.options.heads, self.options.ranks
        row: dict[str, Any] = {"contestant": name, "tokens": self.tokens, "ranks": ranks}
        memory = self.ask(self._memory, name)
        errors = [] if self.options.no_errors else self.ask(self._error, name)
        if name in self.broken:
            return row | {"cannot_run": self.broken[name]}
        walls, wall = [one.wall for one in times[name]], _median(times, name, "wall")
        cpu, base, serial = (_median(times, *of) for of in ((name, "cpu"), (BASE, "wall"), (SERIAL, "cpu")))
        row |= {"median_s": round(wall, 4), "fastest_s": round(min(walls), 4)}
        row |= {"slowest_s": round(max(walls), 4), "busiest_rank_cpu_s": round(cpu, 4)}
        if base:
            pairs = zip(walls, times[BASE], strict=True)
            row["ratio"] = round(wall / base, 3)
            row["ratio_by_round"] = round(statistics.median(mine / other.wall for mine, other in pairs), 3)
        if serial:
            row["cpu_ratio"] = round(cpu / (serial / ranks), 3)
        if errors:
            row |= {f"error_{one}": max(of) for one, *of in zip(NAMES, *errors, strict=True)}
        # q, k, v, out, lse, their gradients, and two K/V buffers with their accumulators
        budget = heads * (self.tokens // ranks) * (16 * self.options.head_dim * 4 + 4)
        row |= {"peak_mib": round(max(memory) / 2**20, 1), "of_budget": round(max(memory) / budget, 2)}
        return row | {"sent_mib": round(_median(times, name, "sent") / 2**20, 1)}


def _median(times: dict[str, list[OnePass]], name: str, what: str) -> float:
    """The median of all rounds; 0 where there are none."""
    return statistics.median([getattr(one, what) for one in times.get(name, ())] or [0.0])


def loopback_bytes() -> int:
    """Bytes received by the loopback device since the machine started."""
    return psutil.net_io_counters(pernic=True)["lo"].bytes_recv


def on_a_rank(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows; rank 0 prints the table of a length as soon as it is there."""
    mesh, rows = RingMesh.from_world(options.ranks, heartbeat_timeout_s=60), []
    for tokens in options.tokens:
        found = LengthComparison(tokens, options, mesh).rows()
        rows += found
        if mesh.ring_rank == 0:
            print(table(found), flush=True)
    mesh.close()
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """For the terminal and for Markdown."""
    head = "| contestant | T | s | fastest to slowest | ratio | CPU ratio | error | peak MiB | sent MiB |"
    lines = [head, "|" + "---|" * (head.count("|") - 1)]
    for row in rows:
        cells = [row["contestant"], row["tokens"]]
        if "cannot_run" in row:
            cells.append(f"does not run: {row['cannot_run'][:100]}")
        else:
            errors = {name: row[f"error_{name}"] for name in NAMES if f"error_{name}" in row}
            wrong = ", ".join(name for name, error in errors.items() if error > WRONG)
            error = f"{max(errors.values(), default=float('nan')):.1e}{f' ({wrong} wrong)' if wrong else ''}"
            cells += [row["median_s"], f"{row['fastest_s']} to {row['slowest_s']}", row.get("ratio", "")]
            cells += [row.get("cpu_ratio", ""), error, f"{row['peak_mib']} ({row['of_budget']} of budget)"]
            cells.append(row["sent_mib"])
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Tables as they come."""
    parser = parser_of(
        __doc__, tokens=[4096, 8192, 16384], ranks=2, heads=4, head_dim=64,
        rounds=(7, "after one of warm-up"), no_errors=(False, "skip float64"),
    )  # fmt: skip
    parser.add_argument("--only", nargs="+", choices=list(CONTESTANTS), help="these contestants")
    parser.add_argument("--json", metavar="FILE", help="append one JSON row per contestant and length")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as options.folder:
        for tokens in () if options.no_errors else options.tokens:  # out, dq, dk, dv in float64
            exact = attend(
                [x.double() for x in global_inputs(tokens, options)],
                partial(scaled_dot_product_attention, is_causal=True),
            )
            torch.save(exact, Path(options.folder, f"exact{tokens}.pt"))
        rows = run_ranks(on_a_rank, options.ranks, (options,), threads=1, deadline_s=86_400)[0]
    about = {"torch": torch.__version__, "machine": platform.machine(), "heads": options.heads}
    about |= {"head_dim": options.head_dim, "rounds": options.rounds}
    if options.json:
        with open(options.json, "a") as file:
            file.writelines(json.dumps(row | about) + "\n" for row in rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
