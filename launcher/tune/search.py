"""Tune: measure, predict, prune, race. Every rank calls it with the same request, for the same result.

[Note: tuning in a tenth of the time]
A search takes a tenth of the time that trying everything takes. A model of measured rates ranks the
candidates. The best ones, and the best of every kind, are timed in real passes, and the better half goes on
to longer ones. The defaults stay where nothing beats them by a hundredth. The rate that is written down is
the one that the chosen pass had with its pattern: windows and LongNet run at another rate than a triangle, by
up to 27 %. Ranks that share cores are as slow as their sum, so the speed of a rank alone is measured, too.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from tqdm import tqdm

from ds_ring.errors import RingMeshError
from ds_ring.runtime.mesh import RingMesh

from .candidates import TuningCandidate, candidates, layout_of
from .measurements import (
    LARGE_TOKENS,
    SMALL_TOKENS,
    TURNS,
    Clock,
    Links,
    Passes,
    Probe,
    measure_links,
)
from .model import Measured, Model
from .request import TuningRequest
from .result import Finalist, TuningResult

# Choose which candidates get a real pass: the model prunes, successive halving decides.
#
# Successive halving (Jamieson, Talwalkar 2016; the budget grows as in Hyperband, Li et al. 2018): many
# contestants get few and short passes, the better half goes on to more and longer ones. They take turns
# within a round, so that a busy moment of the machine hits all alike; medians count. Pure: what predicts and
# what measures comes from outside.

ORDERLY = 1.3  # largest over smallest ratio of the full length's time to a shorter one's
SHORTER = (8, 4, 2)  # parts of the full length that are tried
LEAST_LOCAL_TOKENS = 1024  # of a rank, in a shorter pass
FIELDS = (24, 20, 16, 12, 10, 8)  # contestants at the start, families included
BUDGET = 0.2  # passes of the full length for each candidate that there is: a small part of trying them all
HOPELESS = 2.5  # times the best prediction: not even a family's best gets a pass
LAGGING = 2.0  # times the best score: out at once
ROUNDS, FINAL_ROUNDS = 2, 3
FINALISTS = 2  # and the defaults
NEIGHBOURS = 4  # one in so many contestants of the start
TIE = 1.01  # the defaults stay where nothing is better by more than this

Predict = Callable[[TuningCandidate, int], float]
Measure = Callable[[TuningCandidate, int], float]


class RaceStage(NamedTuple):
    """Describe some rounds at one length, after which `keep` contestants go on."""

    tokens: int
    rounds: int
    contestants: int
    keep: int

    @property
    def passes(self) -> int:
        """Return the most passes of the stage, the first one of each contestant included."""
        return (self.rounds + 1) * self.contestants


def field_of(
    everyone: Sequence[TuningCandidate], tokens: int, ranks: int, predict: Predict
) -> tuple[list[TuningCandidate], int]:
    """Return the largest field whose race is within the budget, and the length of its first passes."""
    for size in FIELDS:
        contestants = contestants_of(everyone, size, tokens, predict)
        shortest = shortest_length(contestants, tokens, ranks, predict)
        best = min(contestants, key=lambda candidate: predict(candidate, tokens))
        stages = stages_of(len(contestants), shortest, tokens)
        cost = sum(stage.passes * predict(best, stage.tokens) for stage in stages) / predict(best, tokens)
        if cost <= BUDGET * len(everyone):
            break
    return contestants, shortest


def contestants_of(
    everyone: Sequence[TuningCandidate], size: int, tokens: int, predict: Predict
) -> list[TuningCandidate]:
    """Choose the defaults, the best of each ring size, of each family, and the best predicted."""
    # Nothing that is hopeless. Sizes come first: what the model knows least is what one kind of exchange
    # costs against the other.
    ranked = sorted(everyone, key=lambda candidate: predict(candidate, tokens))
    limit = HOPELESS * predict(ranked[0], tokens)
    meshes: dict[tuple[int, int], TuningCandidate] = {}
    families: dict[tuple[int, int, str, bool], TuningCandidate] = {}
    for candidate in ranked:
        if predict(candidate, tokens) <= limit:
            meshes.setdefault((candidate.ring_size, candidate.ulysses_size), candidate)
            families.setdefault(candidate.family, candidate)
    chosen = dict.fromkeys([everyone[0], *meshes.values(), *families.values()])
    room = max(size - len(chosen), size // 4)
    others = [candidate for candidate in ranked if candidate not in chosen][:room]
    return [*list(chosen)[: size - len(others)], *others]


# [Note: lengths that keep the order]
# Work grows with the square of the length, bytes with the length, what a message costs not at all: a short
# pass favours who computes badly and moves little. So a time at a shorter length counts times the model's
# ratio of the full length to it, and a length is used only while that ratio is nearly the same for all
# contestants (within `ORDERLY`): then the model corrects the order, and does not make it. Where no shorter
# length is good enough all passes have the full one. The last ones have it always.
def shortest_length(contestants: Sequence[TuningCandidate], tokens: int, ranks: int, predict: Predict) -> int:
    """Return the shortest length that keeps the order; [Note: lengths that keep the order]."""
    for part in SHORTER:
        shorter = tokens // part
        if shorter < LEAST_LOCAL_TOKENS * ranks:
            continue
        ratios = [predict(candidate, tokens) / predict(candidate, shorter) for candidate in contestants]
        if max(ratios) <= ORDERLY * min(ratios):
            return shorter
    return tokens


def stages_of(count: int, shortest: int, tokens: int) -> Iterator[RaceStage]:
    """Yield the stages: half the contestants after each, twice the length from the third on, the final."""
    length, number, neighbours = shortest, 0, count // NEIGHBOURS
    while count > FINALISTS:
        keep = max(-(-count // 2), FINALISTS)
        yield RaceStage(length, ROUNDS, count, keep)
        count = keep + (neighbours if number == 0 else 0)
        length = length if number == 0 else min(2 * length, tokens)
        number += 1
    yield RaceStage(tokens, FINAL_ROUNDS, min(count, FINALISTS) + 1, 1)


@dataclass
class Halving:
    """Run one search."""

    tokens: int  # the full length
    # predict, measure: seconds of a candidate at a length
    predict: Predict
    measure: Measure
    # what was measured, by candidate and length; the first pass of each is not in it
    seconds: dict[tuple[TuningCandidate, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    passes: int = 0  # how many were made

    def run(
        self,
        everyone: Sequence[TuningCandidate],
        contestants: Sequence[TuningCandidate],
        shortest: int,
        told: Callable[[RaceStage], None] = lambda stage: None,
    ) -> TuningCandidate:
        """Return the best of the contestants and of the first leader's neighbours.

        Args:
            everyone: all candidates, the defaults first.
            contestants: `contestants_of` them.
            shortest: `shortest_length`.
            told: hears of every stage before it starts.
        """
        alive, default = list(contestants), everyone[0]
        for number, stage in enumerate(stages_of(len(alive), shortest, self.tokens)):
            final = stage.keep == 1
            if final:
                # The defaults are always in the final: the report compares with them.
                alive = list(dict.fromkeys([*alive[:FINALISTS], default]))
            told(stage)
            alive = self._stage(alive, stage)
            if number == 0 and not final:
                alive += self._neighbours(alive[0], everyone)[: len(contestants) // NEIGHBOURS]
        best = alive[0]
        close = self.median(default, self.tokens) <= TIE * self.median(best, self.tokens)
        return default if close else best

    def score(self, candidate: TuningCandidate, tokens: int) -> float:
        """Return seconds at the full length by what was measured at a shorter one."""
        ratio = self.predict(candidate, self.tokens) / self.predict(candidate, tokens)
        return self.median(candidate, tokens) * ratio

    def median(self, candidate: TuningCandidate, tokens: int) -> float:
        """Return the median of what was measured; infinite if nothing was."""
        measured = self.seconds.get((candidate, tokens))
        return statistics.median(measured) if measured else float("inf")

    def _stage(self, contestants: list[TuningCandidate], stage: RaceStage) -> list[TuningCandidate]:
        """Run all rounds; who falls far behind leaves at once. Return the best `keep`, in order."""
        for candidate in contestants:
            if not self.seconds.get((candidate, stage.tokens)):
                self._pass(candidate, stage.tokens)  # plans are made in it: it does not count
        racing = contestants
        for turn in range(stage.rounds):
            # Each round starts with another one: no one is always first on a cold machine.
            for candidate in racing[turn % len(racing) :] + racing[: turn % len(racing)]:
                self.seconds[candidate, stage.tokens].append(self._pass(candidate, stage.tokens))
            racing = sorted(racing, key=lambda candidate: self.score(candidate, stage.tokens))
            limit = LAGGING * self.score(racing[0], stage.tokens)
            racing = [one for one in racing if self.score(one, stage.tokens) <= limit]
        return racing if stage.keep == 1 else racing[: stage.keep]

    def _pass(self, candidate: TuningCandidate, tokens: int) -> float:
        self.passes += 1
        return self.measure(candidate, tokens)

    def _neighbours(
        self, leader: TuningCandidate, everyone: Sequence[TuningCandidate]
    ) -> list[TuningCandidate]:
        """Return untried candidates that differ from the leader in one thing, the best predicted first."""
        found = [
            candidate
            for candidate in everyone
            if not any(one == candidate for one, _ in self.seconds) and _differences(candidate, leader) == 1
        ]
        return sorted(found, key=lambda candidate: self.predict(candidate, self.tokens))


def _differences(a: TuningCandidate, b: TuningCandidate) -> int:
    """Count the things in which two candidates differ; another mesh is more than one."""
    if (a.ring_size, a.ulysses_size) != (b.ring_size, b.ulysses_size):
        return 2
    things = ("layout", "overlap", "kernel", "heads_per_message")
    return sum(getattr(a, thing) != getattr(b, thing) for thing in things)


def tune(request: TuningRequest, *, progress: bool = False) -> TuningResult:
    """Choose the section for a request.

    Args:
        request: shapes and the section to start from; equal on all ranks.
        progress: draw a bar with the time left on rank 0's stderr.

    Returns:
        What was measured, expected and chosen; the same on all ranks.

    Raises:
        RingMeshError: torch.distributed is not initialised, or its ranks are not those of the request.
        RingMismatchError: ranks with different requests.
        RingPeerError: another rank failed.
    """
    started = time.perf_counter()
    clock = Clock(device_of(request))
    clock.require_equal(str(request))
    if dist.get_world_size() != request.world_size:
        raise RingMeshError(
            f"tune: expected {request.world_size} ranks, as the request says, got {dist.get_world_size()};"
            " make it with world_size=torch.distributed.get_world_size()"
        )
    passes = Passes(request, clock)
    try:
        everyone = candidates(request)
        with _bar(progress, TURNS * len({candidate.kernel for candidate in everyone}) + 3) as bar:
            measured = measure_machine(everyone, request, clock, passes, bar)
        return _race(everyone, request, measured, passes, progress, started)
    finally:
        passes.close()


def device_of(request: TuningRequest) -> torch.device:
    """Return this rank's device, made the current one."""
    if request.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", dist.get_node_local_rank(0))
    torch.cuda.set_device(device)
    return device


def measure_machine(
    everyone: list[TuningCandidate], request: TuningRequest, clock: Clock, passes: Passes, bar: tqdm[None]
) -> Measured:
    """Measure kernel rates, links and the overhead of a hop."""
    probe, first = Probe(request, clock), everyone[0]
    shard = layout_of(request, "auto", first.ring_size, 1, request.tokens).local_tokens
    # No larger than a shard, so that the probe costs no more than a pass.
    large = min(max(shard, 2 * SMALL_TOKENS), LARGE_TOKENS)
    bar.set_description_str("kernels")
    choices = list(dict.fromkeys(candidate.kernel for candidate in everyone))
    kernels = probe.rates(choices, large, bar.update)
    alone = probe.alone_speedup(first.kernel, dist.get_rank(), large // 2)
    matmul = probe.matmul_flops()
    bar.update()
    bar.set_description_str("links")
    links = _links(everyone, passes, clock) if request.sequence_size > 1 else None
    bar.update()
    overhead = passes.hop_overhead(first)
    bar.update()
    return Measured(kernels, alone, matmul, links, overhead)


def _links(everyone: list[TuningCandidate], passes: Passes, clock: Clock) -> Links:
    sizes = {(candidate.ring_size, candidate.ulysses_size) for candidate in everyone}
    whole = passes.mesh(passes.request.sequence_size, 1)
    most_heads = max(ulysses for _, ulysses in sizes)
    swapping: RingMesh | None = None
    if most_heads > 1:
        swapping = passes.mesh(passes.request.sequence_size // most_heads, most_heads)
    return measure_links(whole, swapping, clock)


def _race(
    everyone: list[TuningCandidate],
    request: TuningRequest,
    measured: Measured,
    passes: Passes,
    progress: bool,
    started: float,
) -> TuningResult:
    model, tokens = Model(request, measured), request.tokens
    contestants, shortest = field_of(everyone, tokens, request.sequence_size, model)
    race = Halving(tokens, model, passes.seconds)
    fastest = min(contestants, key=lambda candidate: model(candidate, tokens))
    plan = list(stages_of(len(contestants), shortest, tokens))
    # The bar counts seconds of the fastest, so that the time left is about right at every length.
    with _bar(progress, sum(stage.passes * model(fastest, stage.tokens) for stage in plan)) as bar:

        def measure(candidate: TuningCandidate, length: int) -> float:
            seconds = passes.seconds(candidate, length)
            bar.update(model(fastest, length))
            return seconds

        def told(stage: RaceStage) -> None:
            bar.set_description_str(f"{stage.contestants} contestants, {stage.tokens} tokens")

        race.measure = measure
        chosen = race.run(everyone, contestants, shortest, told)
    final = [one for one, length in race.seconds if length == tokens]
    rows = [Finalist(one, model(one, tokens), tuple(race.seconds[one, tokens])) for one in final]
    return TuningResult(
        request=request,
        measured=measured,
        chosen=chosen,
        predicted=model.predict(chosen, tokens),
        finalists=tuple(sorted(rows, key=lambda row: row.median_s)),
        default=everyone[0],
        candidates=len(everyone),
        contestants=len(contestants),
        passes=race.passes,
        shortest_tokens=shortest,
        ranks_per_node=passes.clock.ranks_here(),
        seconds=time.perf_counter() - started,
    )


@contextmanager
def _bar(progress: bool, total: float) -> Iterator[tqdm[None]]:
    shown = progress and dist.get_rank() == 0
    form = "{desc}: {percentage:3.0f}% |{bar}| {elapsed}, {remaining} left"
    with tqdm(total=total, disable=not shown, bar_format=form, leave=False) as bar:
        yield bar
