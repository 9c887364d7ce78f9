"""Tune: measure, predict, prune, race. Every rank calls it with the same request, for the same result.

[Note: tuning in a tenth of the time]
A search takes a tenth of the time that trying everything takes. A model of measured rates ranks the
candidates. The best ones, and the best of every kind, are timed in real passes, and the better half goes on
to longer ones. The defaults stay where nothing beats them by a hundredth. The rate that is written down is
the one that the chosen pass had with its pattern: windows and LongNet run at another rate than a triangle, by
up to 27 %. Ranks that share cores are as slow as their sum, so the speed of a rank alone is measured, too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from tqdm import tqdm

from ds_ring.errors import RingMeshError
from ds_ring.runtime.mesh import RingMesh

from .candidates import TuningCandidate, candidates, layout_of
from .clock import Clock
from .halving import Halving, Stage, field_of, stages_of
from .links import Links, measure_links
from .model import Measured, Model
from .passes import Passes
from .probe import LARGE_TOKENS, SMALL_TOKENS, TURNS, Probe
from .request import Request
from .result import Finalist, Result


def tune(request: Request, *, progress: bool = False) -> Result:
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


def device_of(request: Request) -> torch.device:
    """Return this rank's device, made the current one."""
    if request.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", dist.get_node_local_rank(0))
    torch.cuda.set_device(device)
    return device


def measure_machine(
    everyone: list[TuningCandidate], request: Request, clock: Clock, passes: Passes, bar: tqdm[None]
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
    request: Request,
    measured: Measured,
    passes: Passes,
    progress: bool,
    started: float,
) -> Result:
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

        def told(stage: Stage) -> None:
            bar.set_description_str(f"{stage.contestants} contestants, {stage.tokens} tokens")

        race.measure = measure
        chosen = race.run(everyone, contestants, shortest, told)
    final = [one for one, length in race.seconds if length == tokens]
    rows = [Finalist(one, model(one, tokens), tuple(race.seconds[one, tokens])) for one in final]
    return Result(
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
