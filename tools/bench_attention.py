"""ds_ring against SDPA and against its peers: causal attention, forward + backward, all in one run.

Every contestant of `contestants.py` takes its turn in every round, so that a busy moment hits all alike: P
ranks with one thread each, or one process with P threads. Reported are medians of the slowest rank, their
spread, the ratio to SDPA in one process with the same cores, the processor time of the busiest rank against
that of SDPA with one thread / P, the error against float64 (out and the three gradients, worst of them,
relative to the largest value), the peak of tensor memory on a rank with its inputs (and as part of a budget:
q, k, v, out, lse, their gradients, two K/V buffers with accumulators), and what crossed the loopback device.

Example:
    python tools/bench_attention.py --tokens 4096 8192 16384 --rounds 7 --picture attention.png
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
from contestants import CONTESTANTS, ONE_THREAD, RANKS, CannotRun, ContestSetup, Entry
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm

from ds_ring import RingMesh
from ds_ring.runtime.trace import measure_cpu_memory

BASE, SERIAL = "SDPA, one process", "SDPA, one thread"
NAMES = ("out", "dq", "dk", "dv")
WRONG = 1e-3  # a relative error beyond this is no rounding


class BenchJob(NamedTuple):
    """What one rank is asked for."""

    act: str  # "time", "error" or "memory"
    name: str
    tokens: int


class Worker:
    """One process: a rank, or the one process that computes it all."""

    def __init__(self, rank: int, size: int, options: argparse.Namespace, mesh: RingMesh | None) -> None:
        self.rank, self.size, self.options, self.mesh = rank, size, options, mesh
        self.entries: dict[tuple[str, int], Entry] = {}

    def do(self, job: BenchJob) -> Any:
        """The answer to a job, or CannotRun."""
        if (job.name, job.tokens) not in self.entries:
            self.entries[job.name, job.tokens] = self._prepare(job)
        return getattr(self, f"_{job.act}")(job, self.entries[job.name, job.tokens])

    def _prepare(self, job: BenchJob) -> Entry:
        try:
            return CONTESTANTS[job.name].prepare(ContestSetup(self.rank, self.size, job.tokens, self.mesh))
        except ImportError as error:
            raise CannotRun(f"not installed: {error}") from None

    def _inputs(self, job: BenchJob, entry: Entry) -> list[Tensor]:
        """Local q, k, v and the gradient of out."""
        return [x[:, :, entry.positions].contiguous() for x in global_inputs(job.tokens, self.options)]

    def _pass(self, inputs: Sequence[Tensor], entry: Entry) -> list[Tensor]:
        *leaves, grad = inputs
        for x in leaves:
            x.requires_grad_()
        out = entry.attend(*leaves)
        out.backward(grad)
        return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]

    def _time(self, job: BenchJob, entry: Entry) -> tuple[float, float, int]:
        """Wall seconds, processor seconds, bytes over the loopback device while it ran."""
        inputs = self._inputs(job, entry)
        threads = 1 if CONTESTANTS[job.name].where == ONE_THREAD or self.mesh else self.options.ranks
        torch.set_num_threads(threads)
        if self.mesh:
            dist.barrier()
        wall, cpu, sent = time.perf_counter(), time.process_time(), loopback_bytes()
        self._pass(inputs, entry)
        seconds = time.perf_counter() - wall, time.process_time() - cpu
        if self.mesh:
            dist.barrier()
        return *seconds, loopback_bytes() - sent

    def _memory(self, job: BenchJob, entry: Entry) -> int:
        """Peak tensor bytes of a pass, with its inputs."""
        with silent_profiler(), measure_cpu_memory() as memory:
            shape = (1, self.options.heads, len(entry.positions), self.options.head_dim)
            self._pass([torch.randn(shape) for _ in range(4)], entry)
        return memory.peak_bytes

    def _error(self, job: BenchJob, entry: Entry) -> list[float]:
        """Largest differences from float64 in out, dq, dk and dv, relative to their largest values."""
        found = self._pass(self._inputs(job, entry), entry)
        exact = torch.load(reference_file(self.options.folder, job.tokens), mmap=True)
        return [
            float((x - y[:, :, entry.positions]).abs().max() / y.abs().max())
            for x, y in zip(found, exact, strict=True)
        ]


@contextmanager
def silent_profiler() -> Iterator[None]:
    """torch's profiler writes two lines to the terminal whenever it runs."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def global_inputs(tokens: int, options: argparse.Namespace) -> list[Tensor]:
    """q, k, v and the gradient of out, [1, H, T, D]: the same on all processes."""
    generator = torch.Generator().manual_seed(tokens)
    shape = (1, options.heads, tokens, options.head_dim)
    return [torch.randn(shape, generator=generator) for _ in range(4)]


def reference_file(folder: str, tokens: int) -> Path:
    """Where out and gradients in float64 are."""
    return Path(folder, f"exact{tokens}.pt")


def write_reference(tokens: int, options: argparse.Namespace) -> None:
    """Out, dq, dk, dv of SDPA in float64."""
    q, k, v, grad = (x.double() for x in global_inputs(tokens, options))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = scaled_dot_product_attention(q, k, v, is_causal=True)
    out.backward(grad)
    torch.save(
        [out.detach(), *(x.grad for x in leaves if x.grad is not None)],
        reference_file(options.folder, tokens),
    )


def loopback_bytes() -> int:
    """Bytes received by the loopback device since the machine started."""
    return psutil.net_io_counters(pernic=True)["lo"].bytes_recv


def serve(rank: int, size: int, options: argparse.Namespace, pipe: Connection) -> None:
    """Answer jobs until the pipe ends. Rank -1 is the one process."""
    mesh = None
    if rank >= 0:
        torch.set_num_threads(1)
        store = f"file://{options.folder}/store"
        dist.init_process_group("gloo", store, rank=rank, world_size=size, timeout=timedelta(minutes=30))
        mesh = RingMesh.from_world(size, heartbeat_timeout_s=60)
    worker = Worker(max(rank, 0), size if rank >= 0 else 1, options, mesh)
    while True:
        try:
            job: BenchJob = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(worker.do(job))
        except Exception as error:
            pipe.send(CannotRun(str(error) or repr(error)))


class Machine:
    """The processes of a run: P ranks and the one process."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        context = mp.get_context("spawn")
        self.pipes: dict[int, Connection] = {}
        self.processes = []
        for rank in range(-1, options.ranks):
            self.pipes[rank], theirs = context.Pipe()
            arguments = (rank, options.ranks, options, theirs)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
        self.broken: dict[tuple[str, int], str] = {}

    def ask(self, job: BenchJob) -> list[Any]:
        """The answers of all processes of a contestant; none where it cannot run."""
        if (job.name, job.tokens) in self.broken:
            return []
        where = CONTESTANTS[job.name].where
        ranks = range(self.options.ranks) if where == RANKS else [-1]
        for rank in ranks:
            self.pipes[rank].send(job)
        answers = [self.pipes[rank].recv() for rank in ranks]
        for answer in answers:
            if isinstance(answer, CannotRun):
                self.broken[job.name, job.tokens] = str(answer).splitlines()[0]
                return []
        return answers

    def close(self) -> None:
        """End the processes."""
        for pipe in self.pipes.values():
            pipe.close()
        for process in self.processes:
            process.join(10)
            process.kill()


class ContestantRounds(NamedTuple):
    """One contestant's rounds: slowest rank, busiest rank, bytes."""

    wall: list[float]
    cpu: list[float]
    sent: list[int]


class LengthComparison:
    """All contestants at one length."""

    def __init__(self, machine: Machine, tokens: int, options: argparse.Namespace, bar: tqdm[Any]) -> None:
        self.machine, self.tokens, self.options, self.bar = machine, tokens, options, bar
        self.names = [name for name in CONTESTANTS if not options.only or name in options.only]
        self.times = {name: ContestantRounds([], [], []) for name in self.names}

    def measure(self) -> None:
        """All rounds; the first one warms up."""
        for turn in range(self.options.rounds + 1):
            for name in self.names[turn % len(self.names) :] + self.names[: turn % len(self.names)]:
                self.bar.set_postfix_str(f"{self.tokens} tokens, {name}")
                answers = self.machine.ask(BenchJob("time", name, self.tokens))
                if answers and turn:
                    walls, cpus, sent = zip(*answers, strict=True)
                    self.times[name].wall.append(max(walls))
                    self.times[name].cpu.append(max(cpus))
                    self.times[name].sent.append(max(sent))
                self.bar.update()

    def _median(self, name: str, what: str) -> float | None:
        values = getattr(self.times[name], what) if name in self.times else []
        return statistics.median(values) if values else None

    @cached_property
    def _budget(self) -> float:
        """Bytes of q, k, v, out, lse, their gradients, and two K/V buffers with their accumulators."""
        local = self.tokens // self.options.ranks
        unit = self.options.heads * local * self.options.head_dim * 4
        return 16 * unit + 4 * self.options.heads * local

    def rows(self) -> list[dict[str, Any]]:
        """One per contestant."""
        return [self._row(name) for name in self.names]

    def _row(self, name: str) -> dict[str, Any]:
        row: dict[str, Any] = {"contestant": name, "tokens": self.tokens, "ranks": self.options.ranks}
        memory = self.machine.ask(BenchJob("memory", name, self.tokens))
        errors = self.machine.ask(BenchJob("error", name, self.tokens)) if self.options.errors else []
        if (name, self.tokens) in self.machine.broken:
            return row | {"cannot_run": self.machine.broken[name, self.tokens]}
        times, base, serial = self.times[name], self._median(BASE, "wall"), self._median(SERIAL, "cpu")
        wall, cpu = statistics.median(times.wall), statistics.median(times.cpu)
        row |= {"median_s": round(wall, 4), "fastest_s": round(min(times.wall), 4)}
        row |= {"slowest_s": round(max(times.wall), 4), "busiest_rank_cpu_s": round(cpu, 4)}
        if base is not None:
            pairs = zip(times.wall, self.times[BASE].wall, strict=True)
            row["ratio"] = round(wall / base, 3)
            row["ratio_by_round"] = round(statistics.median(mine / other for mine, other in pairs), 3)
        if serial is not None:
            row["cpu_ratio"] = round(cpu / (serial / self.options.ranks), 3)
        if errors:
            for number, tensor in enumerate(NAMES):
                row[f"error_{tensor}"] = max(answer[number] for answer in errors)
        row["peak_mib"] = round(max(memory) / 2**20, 1)
        row["of_budget"] = round(max(memory) / self._budget, 2)
        return row | {"sent_mib": round(statistics.median(times.sent) / 2**20, 1)}


def table(rows: list[dict[str, Any]]) -> str:
    """For the terminal and for Markdown."""
    head = [
        "contestant",
        "T",
        "s",
        "fastest to slowest",
        "ratio",
        "CPU ratio",
        "error",
        "peak MiB",
        "sent MiB",
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        if "cannot_run" in row:
            lines.append(
                f"| {row['contestant']} | {row['tokens']} | does not run: {row['cannot_run'][:100]} |"
            )
            continue
        errors = {name: row[f"error_{name}"] for name in NAMES if f"error_{name}" in row}
        wrong = ", ".join(name for name, error in errors.items() if error > WRONG)
        error = f"{max(errors.values(), default=float('nan')):.1e}" + (f" ({wrong} wrong)" if wrong else "")
        cells = [
            row["contestant"],
            row["tokens"],
            row["median_s"],
            f"{row['fastest_s']} to {row['slowest_s']}",
        ]
        cells += [row.get("ratio", ""), row.get("cpu_ratio", ""), error]
        cells += [f"{row['peak_mib']} ({row['of_budget']} of budget)", row["sent_mib"]]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: str, options: argparse.Namespace) -> None:
    """Time relative to SDPA, and peak memory, against the length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
    for name in CONTESTANTS:
        mine = [row for row in rows if row["contestant"] == name and "ratio" in row]
        if mine:
            style = {"marker": "o", "linewidth": 3 if name == "ds_ring" else 1.2}
            left.plot([row["tokens"] for row in mine], [row["ratio"] for row in mine], label=name, **style)
            right.plot([row["tokens"] for row in mine], [row["peak_mib"] for row in mine], **style)
    for axes, label in (
        (left, f"time / SDPA, one process, {options.ranks} threads"),
        (right, "peak MiB per rank"),
    ):
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel=label)
        axes.set_xticks(options.tokens, [str(tokens) for tokens in options.tokens])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    left.axhline(1, color="black", linewidth=0.8)
    left.legend(fontsize=8)
    figure.suptitle(
        f"causal attention, forward + backward, {options.ranks} ranks x 1 thread, H={options.heads},"
        f" D={options.head_dim}, float32"
    )
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> int:
    """Tables as they come, then the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7, help="after one of warm-up")
    parser.add_argument("--only", nargs="+", choices=list(CONTESTANTS), help="these contestants")
    parser.add_argument("--no-errors", dest="errors", action="store_false", help="skip float64")
    parser.add_argument("--json", metavar="FILE", help="append one JSON row per contestant and length")
    parser.add_argument("--picture", metavar="FILE.png")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as options.folder:
        count = len(options.only or CONTESTANTS) * (options.rounds + 1) * len(options.tokens)
        if options.errors:
            for tokens in tqdm(options.tokens, desc="float64"):
                write_reference(tokens, options)
        machine = Machine(options)
        try:
            with tqdm(total=count) as bar:
                for tokens in options.tokens:
                    comparison = LengthComparison(machine, tokens, options, bar)
                    comparison.measure()
                    found = comparison.rows()
                    rows += found
                    bar.write(table(found))
        finally:
            machine.close()
    about = {"torch": torch.__version__, "machine": platform.machine(), "heads": options.heads}
    about |= {"head_dim": options.head_dim, "rounds": options.rounds}
    if options.json:
        with open(options.json, "a") as file:
            file.writelines(json.dumps(row | about) + "\n" for row in rows)
    if options.picture:
        draw(rows, options.picture, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
