"""Run more tokens than memory holds in several processes, so that a killed run can continue.

Owns the description of a run, its worker processes and the comparison with float64. Each
worker computes its ranks from the last to the first: with causal attention over contiguous shards
gradients then only go to shards that come later.
"""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ds_ring.errors import RingConfigError, RingError
from ds_ring.kernels.select import get_kernel
from ds_ring.masks.slots import IntArray
from ds_ring.patterns.dilated.pattern import Dilated
from ds_ring.schedule.layout import make_layout
from ds_ring.simulation.generate import GeneratedSource
from streamed.ledger import Ledger, StateFile
from streamed.ranks import PendingGradients, StreamedPart, StreamedRanks
from streamed.sparse_oracle import SparseOracle

CLUSTER = 64  # neighbours that are checked together


@dataclass(frozen=True)
class LongRun:
    """Describe causal LongNet of one head on generated numbers: segments w * g^i, dilation rates g^i.

    Raises:
        RingConfigError: sizes that do not divide.
    """

    tokens: int = 1 << 30  # T; a multiple of the ring size
    ring_size: int = 1024  # P
    head_dim: int = 32  # D
    # first_segment, growth: w and g; as many branches as segments fit T
    first_segment: int = 256
    growth: int = 4
    seed: int = 0  # of the numbers and of the rows that are checked
    backward: bool = False  # gradients as well
    query_block: int = 1 << 16  # queries attended at once
    workers: int = 2  # processes, one thread each
    rows: int = 5000  # rows to be checked, about

    def __post_init__(self) -> None:
        for name in ("tokens", "ring_size", "head_dim", "first_segment", "query_block", "workers", "rows"):
            if getattr(self, name) < 1:
                raise RingConfigError(f"{name}: expected a positive number, got {getattr(self, name)}")
        if self.growth < 2 or self.first_segment > self.tokens:
            raise RingConfigError(
                f"segments: expected at most {self.tokens}, growth 2, got {self.first_segment}, {self.growth}"
            )
        if self.tokens % self.ring_size or self.ring_size < self.workers:
            raise RingConfigError.wrong(
                "ring_size", f"{self.workers} or more, dividing {self.tokens}", self.ring_size, "correct it"
            )

    @property
    def pattern(self) -> Dilated:
        """Return all branches whose segments fit."""
        count = 1
        while self.first_segment * self.growth**count <= self.tokens:
            count += 1
        powers = [self.growth**i for i in range(count)]
        return Dilated(tuple(self.first_segment * power for power in powers), tuple(powers))

    @property
    def source(self) -> GeneratedSource:
        """Return the numbers."""
        return GeneratedSource(self.tokens, head_dim=self.head_dim, seed=self.seed)

    @property
    def local_tokens(self) -> int:
        """Return the tokens of a rank."""
        return self.tokens // self.ring_size

    @property
    def checked_rows(self) -> IntArray:
        """Return clusters drawn by the seed, the last tokens, and those that see farthest; ascending."""
        farthest = np.arange(0, self.tokens, self.pattern.dilation_rates[-1])[-256:]
        last = np.arange(max(self.tokens - CLUSTER, 0), self.tokens)
        starts = np.random.default_rng(self.seed).integers(0, self.tokens, -(-self.rows // CLUSTER))
        drawn = (starts[:, None] + np.arange(CLUSTER)).reshape(-1)
        return np.unique(np.concatenate([farthest, last, drawn[drawn < self.tokens]]))

    def ranks_of(self, worker: int) -> list[int]:
        """Return the ranks that a worker computes, in order."""
        bounds = [self.ring_size * w // self.workers for w in (worker, worker + 1)]
        return list(range(*bounds))[::-1]

    def state_file(self, folder: Path, worker: int) -> StateFile:
        """Return the state file of a worker."""
        return StateFile(folder / f"worker_{worker}.npz", asdict(self) | {"worker": worker})

    def restored(self, folder: Path, worker: int) -> tuple[Ledger, PendingGradients]:
        """Return what a worker has so far."""
        ledger = Ledger(self.source, self.checked_rows, self.ring_size)
        pending = PendingGradients(self.head_dim)
        self.state_file(folder, worker).load(ledger, pending, self.local_tokens)
        return ledger, pending

    def ranks(self) -> StreamedRanks:
        """Return the ranks, ready to be computed."""
        layout = make_layout("contiguous", tokens=self.tokens, ring_size=self.ring_size)
        kernel, scale = get_kernel("auto", "cpu"), self.head_dim**-0.5
        return StreamedRanks(self.source, self.pattern, layout, kernel, scale, self.query_block)

    def parts(
        self, ranks: StreamedRanks, ring_rank: int, pending: PendingGradients
    ) -> Iterator[StreamedPart]:
        """Yield what a rank finds."""
        return ranks.forward_and_backward(ring_rank, pending) if self.backward else ranks.forward(ring_rank)


class Progress(NamedTuple):
    """Report that another rank is done, or (rank -1) that the worker ends."""

    worker: int
    ring_rank: int
    peak_rss_mib: float


def run(job: LongRun, folder: Path, save_every: int = 8) -> Iterator[Progress]:
    """Walk all ranks that `folder` does not have yet; the state is whole when this ends.

    Raises:
        RingConfigError: the folder has the state of another run.
        RingError: a worker ended before its ranks were done.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for worker in range(job.workers):
        job.restored(folder, worker)  # raises here and not in a worker
    context = multiprocessing.get_context("spawn")
    pipes: dict[Any, int] = {}
    processes = []
    for worker in range(job.workers):
        ours, theirs = context.Pipe(duplex=False)
        arguments = (job, folder, worker, save_every, theirs)
        processes.append(context.Process(target=_work, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()
        pipes[ours] = worker
    while pipes:
        for pipe in wait(list(pipes)):
            assert isinstance(pipe, Connection)
            try:
                word = Progress(*pipe.recv())
            except EOFError:
                raise RingError(
                    f"worker {pipes[pipe]} ended before its ranks were done; start again"
                ) from None
            if word.ring_rank < 0:
                del pipes[pipe]
            yield word
    for process in processes:
        process.join()


def _work(job: LongRun, folder: Path, worker: int, save_every: int, parent: Connection) -> None:
    """Run one worker process; it ends by itself (broken pipe) where its parent is gone."""
    torch.set_num_threads(1)
    ranks, (ledger, pending) = job.ranks(), job.restored(folder, worker)
    state = job.state_file(folder, worker)
    left = [rank for rank in job.ranks_of(worker) if not ledger.done[rank]]
    for number, rank in enumerate(left, start=1):
        ledger.note_all(rank, job.parts(ranks, rank, pending))
        if number % save_every == 0 or number == len(left):
            state.save(ledger, pending)
        parent.send((worker, rank, peak_rss_mib()))
    parent.send((worker, -1, peak_rss_mib()))


def peak_rss_mib() -> float:
    """Return the most resident memory of this process so far, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # KiB on Linux


def collect(job: LongRun, folder: Path) -> Ledger:
    """Return the ledgers of all workers as one, gradients between them added."""
    whole, pending = job.restored(folder, 0)
    whole.settle(pending, job.local_tokens)
    for worker in range(1, job.workers):
        other, pending = job.restored(folder, worker)
        other.settle(pending, job.local_tokens)
        whole.add(other)
    return whole


def errors(job: LongRun, ledger: Ledger, keys: int = 16) -> dict[str, float]:
    """Return the largest differences of the checked rows from float64, over the largest magnitude.

    Args:
        job, ledger: what was run, and its result.
        keys: of the gradients, so many rows of dk and dv and 8 times as many of dq.
    """
    oracle = SparseOracle(job.source, job.pattern, job.head_dim**-0.5)
    rows = ledger.rows.tolist()
    exact = [oracle.row(position) for position in rows]
    want = {"out": [row.out for row in exact], "lse": [torch.tensor([row.lse]).double() for row in exact]}
    at = {name: list(range(len(rows))) for name in want}
    if job.backward:
        at["dq"] = np.unique(np.linspace(0, len(rows) - 1, 8 * keys).astype(int)).tolist()
        at["dk"] = at["dv"] = np.unique(np.linspace(0, len(rows) - 1, keys).astype(int)).tolist()
        want["dq"] = [oracle.query_gradient(rows[index]) for index in at["dq"]]
        both = [oracle.key_gradients(rows[index]) for index in at["dk"]]
        want |= {"dk": [dk for dk, _ in both], "dv": [dv for _, dv in both]}
    found = {}
    for name, values in want.items():
        expected, got = torch.stack(values), torch.from_numpy(ledger.values[name][at[name]])
        found[name] = float((got - expected).abs().max() / expected.abs().max())
    return found
