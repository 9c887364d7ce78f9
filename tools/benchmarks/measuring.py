"""Measure works on ranks that take turns. Owns the format of a row, the clock, and medians over ranks."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist
from common import in_turns, provenance
from torch import Tensor

from ds_ring import RingMesh
from ds_ring_launcher.run.local_ranks import run_ranks

Numbers = Mapping[str, Any]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

# The end of a result's name is its unit; a number with no such end has none.
UNITS = {
    "_tokens_per_s": "tokens/s", "_gb_per_s": "GB/s", "_s": "s", "_us": "us", "_bytes": "bytes", "_mb": "MB",
    "_mib": "MiB", "_gib": "GiB", "_percent": "%", "_tflops": "TFLOP/s",
}  # fmt: skip


class ResultRow(NamedTuple):
    """Hold one result: the case that was measured, its numbers, and the fault in them, if any."""

    case: Numbers
    results: Numbers
    wrong: str = ""

    def complete(self, name: str, options: argparse.Namespace) -> dict[str, Any]:
        """Return the row as it is stored: with units, rounds, hardware, versions and commit."""
        units = {key: get_unit(key) for key, value in self.results.items() if isinstance(value, int | float)}
        rounds = {"warm_up": getattr(options, "warm_up", 0), "iterations": getattr(options, "rounds", 1)}
        where = provenance(getattr(options, "device", "cpu"))
        return {"benchmark": name} | self._asdict() | {"units": units} | rounds | where


def get_unit(name: str) -> str:
    """Return the unit of a result by the end of its name; "1" for a number without a unit."""
    return next((unit for end, unit in UNITS.items() if name.endswith(end)), "1")


def markdown(rows: Sequence[ResultRow]) -> str:
    """Return rows as tables, one for each part, whose columns are the names in all of its rows."""
    text = []
    for part in dict.fromkeys(row.case.get("part") for row in rows):
        cells = [{**row.case, **row.results} for row in rows if row.case.get("part") == part]
        columns = [key for key in dict.fromkeys(key for row in cells for key in row) if key != "part"]
        lines = [columns, ["---"] * len(columns)]
        lines += [[str(row.get(key, "")) for key in columns] for row in cells]
        text += [f"## {part}", ""] if part else []
        text += [*(f"| {' | '.join(line)} |" for line in lines), ""]
    return "\n".join(text)


class Turns(NamedTuple):
    """Hold the works of a rank by name, each of which returns numbers, and its report at the end."""

    works: Mapping[str, Callable[[], Numbers]]
    at_end: Callable[[], Any] = lambda: None


class RoundResults(NamedTuple):
    """Hold the numbers of all rounds, by name, round and rank, and the report of each rank at the end."""

    rounds: dict[str, list[tuple[Numbers, ...]]]
    at_end: list[Any]

    def each(self, name: str, key: str, over: Callable[[Iterator[Any]], Any] = max) -> list[Any]:
        """Return one number of each round: of all ranks the largest, or what `over` makes of them."""
        return [over(rank[key] for rank in ranks) for ranks in self.rounds[name]]

    def median(self, name: str, key: str, digits: int = 4) -> float:
        """Return the median over rounds of the slowest rank's number."""
        return round(statistics.median(self.each(name, key)), digits)

    def ratio(self, name: str, base: str, key: str, digits: int = 3) -> float:
        """Return the median over rounds of a number over that of another work in the same round."""
        pairs = zip(self.each(name, key), self.each(base, key), strict=True)
        return round(statistics.median(value / divisor for value, divisor in pairs), digits)


def measure_on_ranks(
    prepare: Callable[[argparse.Namespace], Turns], options: argparse.Namespace, deadline_s: float = 3600
) -> RoundResults:
    """Run works on `options.ranks` gloo ranks with one thread each; all ranks take the same turns.

    Args:
        prepare: a function at the head of a module, called on every rank.
        options: has `ranks`, `rounds` and `warm_up`.
        deadline_s: seconds after which all ranks are ended.
    """
    ranks = run_ranks(_take_turns, options.ranks, (prepare, options), threads=1, deadline_s=deadline_s)
    rounds = {name: list(zip(*(results[name] for results, _ in ranks), strict=True)) for name in ranks[0][0]}
    return RoundResults(rounds, [report for _, report in ranks])


def _take_turns(prepare: Callable[[Any], Turns], options: argparse.Namespace) -> tuple[Any, Any]:
    turns = prepare(options)
    results = in_turns(turns.works, options.rounds, options.warm_up)
    return results, turns.at_end()


def make_ring() -> RingMesh:
    """Return a ring of all ranks, whose heartbeats a busy machine may delay."""
    return RingMesh.from_world(dist.get_world_size(), heartbeat_timeout_s=120)


@contextmanager
def clock(together: bool = True) -> Iterator[dict[str, float]]:
    """Measure wall and processor seconds of a block; all ranks begin it together."""
    taken: dict[str, float] = {}
    if together and dist.is_initialized():
        dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    yield taken
    taken |= {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}


def forward_and_backward(attend: Attend, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the output and the gradients of q, k and v; `inputs` are these and the output's gradient."""
    *leaves, grad = inputs
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = attend(*leaves)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]
