"""The race on made-up times: who is let in, at which length, and that the best one wins."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from ds_ring_launcher.tune.candidates import TuningCandidate, candidates
from ds_ring_launcher.tune.model import Model
from ds_ring_launcher.tune.search import (
    BUDGET,
    FINAL_ROUNDS,
    Halving,
    contestants_of,
    field_of,
    shortest_length,
    stages_of,
)
from tests.unit.launcher.tune.cases import machine, request

TOKENS = 32768


def field(world: int) -> tuple[list[TuningCandidate], Model]:
    asked = request(world, tokens=TOKENS)
    return candidates(asked), Model(asked, machine(asked))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.day("0-2", "4-4")  # the others are more seeds of the same clock
def test_the_best_wins_though_the_model_is_wrong_and_the_clock_trembles(world: int, seed: int) -> None:
    everyone, model = field(world)
    draw = random.Random(seed)
    errors = {family: draw.uniform(0.9, 1.3) for family in {one.family for one in everyone}}

    def truth(candidate: TuningCandidate, tokens: int) -> float:
        return model(candidate, tokens) * errors[candidate.family]

    spent = Counter[str]()

    def measure(candidate: TuningCandidate, tokens: int) -> float:
        spent["seconds"] += truth(candidate, tokens)
        return truth(candidate, tokens) * draw.uniform(0.99, 1.01)

    contestants, shortest = field_of(everyone, TOKENS, world, model)
    chosen = Halving(TOKENS, model, measure).run(everyone, contestants, shortest)
    best = min(truth(one, TOKENS) for one in everyone)
    assert truth(chosen, TOKENS) <= 1.05 * best
    assert spent["seconds"] < 0.1 * 4 * sum(truth(one, TOKENS) for one in everyone)  # three rounds, a warm-up


def test_the_race_keeps_to_its_budget() -> None:
    everyone, model = field(4)
    contestants, shortest = field_of(everyone, TOKENS, 4, model)
    fastest = min(model(one, TOKENS) for one in everyone)
    cost = sum(
        stage.passes * model(everyone[0], stage.tokens)
        for stage in stages_of(len(contestants), shortest, TOKENS)
    )
    assert cost / fastest <= 1.3 * BUDGET * len(everyone)


def test_every_family_that_is_not_hopeless_has_a_contestant() -> None:
    everyone, model = field(2)
    contestants = contestants_of(everyone, 24, TOKENS, model)
    assert contestants[0] == everyone[0] and len(set(contestants)) == len(contestants) <= 24
    assert {one.family for one in contestants} == {one.family for one in everyone}


def test_of_all_sizes_one_races_in_the_smallest_field_though_the_model_thinks_little_of_it() -> None:
    everyone, model = field(4)

    def predict(candidate: TuningCandidate, tokens: int) -> float:
        return model(candidate, tokens) * (2.0 if candidate.ulysses_size == 4 else 1.0)

    sizes = {(one.ring_size, one.ulysses_size) for one in contestants_of(everyone, 8, TOKENS, predict)}
    assert sizes == {(4, 1), (2, 2), (1, 4)}


def test_lengths_that_do_not_keep_the_order_are_not_used() -> None:
    a, b = candidates(request(2))[:2]

    def orderly(candidate: TuningCandidate, tokens: int) -> float:
        return tokens**2 * (1.0 if candidate == a else 1.1)

    def at_half(candidate: TuningCandidate, tokens: int) -> float:
        return tokens**2 + (0 if candidate == a else 5e3 * tokens)

    def never(candidate: TuningCandidate, tokens: int) -> float:
        return float(tokens**2 if candidate == a else tokens)

    assert shortest_length([a, b], TOKENS, 2, orderly) == TOKENS // 8
    assert shortest_length([a, b], 2 * 4096, 2, orderly) == 2048  # a rank has 1024 at least
    assert shortest_length([a, b], TOKENS, 2, at_half) in (TOKENS // 4, TOKENS // 2)
    assert shortest_length([a, b], TOKENS, 2, never) == TOKENS


def test_times_of_short_passes_count_by_the_model() -> None:
    a, b = candidates(request(2))[:2]
    race = Halving(TOKENS, lambda one, n: float(n**2 if one == a else n), lambda one, n: 1.0)
    race.seconds[a, 1024].append(1.0)
    race.seconds[b, 1024].append(2.0)
    assert race.score(a, 1024) == 32**2 and race.score(b, 1024) == 2 * 32


def test_stages_halve_and_end_at_the_full_length() -> None:
    stages = list(stages_of(16, 4096, TOKENS))
    assert [stage.tokens for stage in stages] == sorted(stage.tokens for stage in stages)
    assert stages[0].contestants == 16 and stages[0].keep == 8
    assert stages[-1] == (TOKENS, FINAL_ROUNDS, 3, 1)


def test_the_defaults_stay_where_nothing_is_better() -> None:
    everyone, model = field(2)
    contestants, shortest = field_of(everyone, TOKENS, 2, model)
    race = Halving(TOKENS, model, lambda one, tokens: 1.0 if one == everyone[0] else 0.995)
    assert race.run(everyone, contestants, shortest) == everyone[0]
