"""Tune: measure, predict, prune, race. Every rank calls it with the same request, for the same result.

[Note: tuning in a tenth of the time]
A search takes a tenth of the time that trying everything takes. A model of measured rates ranks the
candidates. The defaults, the best of every kind and the best of all, a tenth of them, are timed in one real
pass each, and the fastest few in three more, in turns. The defaults stay where nothing beats them by a
hundredth. The rate that is written down is the one that the chosen pass had with its pattern: windows and
LongNet run at another rate than a triangle, by up to 27 %. Ranks that share cores are as slow as their sum,
so the speed of a rank alone is measured, too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from tqdm import tqdm

from ds_ring.errors import RingMeshError

from .candidates import TuningCandidate, candidates, plan_layout
from .measurements import LARGE_TOKENS, SMALL_TOKENS, TURNS, Clock, Passes, Probe, measure_links
from .model import Measured, Model
from .request import TuningRequest
from .result import Finalist, TuningResult

MIN_CONTESTANTS, MAX_CONTESTANTS = 8, 24  # contestants; between these a tenth of the candidates
HOPELESS = 2.5  # times the best prediction: not even a family's best gets a pass
FINALISTS = 4  # and the defaults
FINAL_ROUNDS = 3
TIE = 1.01  # the defaults stay where nothing is better by more than this


def choose_contestants(
    everyone: Sequence[TuningCandidate],
    size: int,
    tokens: int,
    predict: Callable[[TuningCandidate, int], float],
) -> list[TuningCandidate]:
    """Choose the defaults, the best of each ring size, of each family, and the best predicted."""
    # Nothing that is hopeless. Sizes come first: what the model knows least is what one kind of exchange
    # costs against the other.
    seconds = {candidate: predict(candidate, tokens) for candidate in everyone}
    ranked = sorted(everyone, key=seconds.__getitem__)
    meshes: dict[tuple[int, int], TuningCandidate] = {}
    families: dict[tuple[int, int, str, bool], TuningCandidate] = {}
    for candidate in ranked:
        if seconds[candidate] <= HOPELESS * seconds[ranked[0]]:
            meshes.setdefault((candidate.ring_size, candidate.ulysses_size), candidate)
            families.setdefault(candidate.family, candidate)
    chosen = dict.fromkeys([everyone[0], *meshes.values(), *families.values()])
    room = max(size - len(chosen), size // 4)
    others = [candidate for candidate in ranked if candidate not in chosen][:room]
    return [*list(chosen)[: size - len(others)], *others]


def race(
    contestants: Sequence[TuningCandidate], measure: Callable[[TuningCandidate], float]
) -> tuple[TuningCandidate, dict[TuningCandidate, list[float]]]:
    """Return the winner, and the seconds of all in the final.

    Args:
        contestants: the defaults first.
        measure: seconds of a pass.
    """
    default, racing = contestants[0], list(contestants)
    times: dict[TuningCandidate, list[float]] = {candidate: [] for candidate in contestants}
    for candidate in contestants:
        measure(candidate)  # plans are made in it: it does not count
    for turn in range(1 + FINAL_ROUNDS):
        # In turns, so that a busy moment hits all alike; each round starts with another one: no one is
        # always first on a cold machine.
        for candidate in racing[turn % len(racing) :] + racing[: turn % len(racing)]:
            times[candidate].append(measure(candidate))
        racing.sort(key=lambda candidate: statistics.median(times[candidate]))
        if turn == 0:  # the defaults are always in the final: the report compares with them
            racing = list(dict.fromkeys([*racing[:FINALISTS], default]))
    best, second = (statistics.median(times[candidate]) for candidate in (racing[0], default))
    return default if second <= TIE * best else racing[0], {
        candidate: times[candidate] for candidate in racing
    }


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
    clock = Clock(get_device(request))
    clock.require_equal(str(request))
    if dist.get_world_size() != request.world_size:
        raise RingMeshError(
            f"tune: expected {request.world_size} ranks (the request's), got {dist.get_world_size()}"
        )
    passes = Passes(request, clock)
    try:
        everyone, tokens = candidates(request), request.tokens
        kernels = {candidate.kernel for candidate in everyone}
        with _bar(progress, "kernels", TURNS * len(kernels) + 3) as bar:
            measured = measure_machine(everyone, request, clock, passes, bar)
        model = Model(request, measured)
        size = min(max(len(everyone) // 10, MIN_CONTESTANTS), MAX_CONTESTANTS)
        contestants, before = choose_contestants(everyone, size, tokens, model), passes.count
        rounds = 2 * len(contestants) + FINAL_ROUNDS * (FINALISTS + 1)
        with _bar(progress, f"passes of {len(contestants)} candidates", rounds) as bar:

            def measure(candidate: TuningCandidate) -> float:
                bar.update()
                return passes.seconds(candidate, tokens)

            chosen, times = race(contestants, measure)
        rows = [
            Finalist(candidate, model(candidate, tokens), tuple(seconds))
            for candidate, seconds in times.items()
        ]
        return TuningResult(
            request=request,
            measured=measured,
            chosen=chosen,
            predicted=model.predict(chosen, tokens),
            finalists=tuple(sorted(rows, key=lambda row: row.median_s)),
            default=everyone[0],
            candidates=len(everyone),
            contestants=len(contestants),
            passes=passes.count - before,
            ranks_per_node=clock.ranks_here(),
            seconds=time.perf_counter() - started,
        )
    finally:
        passes.close()


def get_device(request: TuningRequest) -> torch.device:
    """Return this rank's device: on CUDA the current one, which whoever started the rank has set."""
    return (
        torch.device("cuda", torch.cuda.current_device()) if request.device == "cuda" else torch.device("cpu")
    )


def measure_machine(
    everyone: list[TuningCandidate], request: TuningRequest, clock: Clock, passes: Passes, bar: tqdm[None]
) -> Measured:
    """Measure kernel rates, links and the overhead of a hop."""
    probe, first = Probe(request, clock), everyone[0]
    shard = plan_layout(request, "auto", first.ring_size, 1, request.tokens).local_tokens
    large = LARGE_TOKENS[request.device]
    if request.device == "cpu":  # no larger than a shard, so that the probe costs no more than a pass
        large = min(max(shard, 2 * SMALL_TOKENS["cpu"]), large)
    choices = list(dict.fromkeys(candidate.kernel for candidate in everyone))
    kernels = probe.rates(choices, large, bar.update)
    alone = probe.alone_speedup(first.kernel, dist.get_rank(), large // 2)
    matmul = probe.matmul_flops()
    bar.update()
    bar.set_description_str(f"{_MEASURES} links")
    links, size = None, request.sequence_size
    if size > 1:
        ulysses = max(candidate.ulysses_size for candidate in everyone)
        swapping = passes.mesh(size // ulysses, ulysses) if ulysses > 1 else None
        links = measure_links(passes.mesh(size, 1), swapping, clock)
    bar.update()
    overhead = passes.hop_overhead(first)
    bar.update()
    return Measured(kernels, alone, matmul, links, overhead)


_MEASURES = "ds-ring tune measures"


@contextmanager
def _bar(progress: bool, what: str, total: float) -> Iterator[tqdm[None]]:
    """Show a bar on rank 0 that says from its first line on what is measured."""
    shown = progress and dist.get_rank() == 0
    form = "{desc}: {percentage:3.0f}% |{bar}| {elapsed}, {remaining} left"
    label = f"{_MEASURES} {what}"
    with tqdm(total=total, desc=label, disable=not shown, bar_format=form, leave=False) as bar:
        yield bar
