"""The race on made-up times: who is let in, and that the best one wins."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch.distributed as dist

from ds_ring_launcher.tune import search
from ds_ring_launcher.tune.candidates import TuningCandidate, candidates
from ds_ring_launcher.tune.model import Model
from ds_ring_launcher.tune.search import MAX_CONTESTANTS, MIN_CONTESTANTS, choose_contestants, race
from tests.unit.launcher.tune.cases import machine, request

TOKENS = 32768


@cache
def field(world: int) -> tuple[list[TuningCandidate], Model]:
    asked = request(world, tokens=TOKENS)
    return candidates(asked), Model(asked, machine(asked))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.day("4-2")  # the others are more seeds of the same clock
def test_the_best_wins_though_the_model_is_wrong_and_the_clock_trembles(world: int, seed: int) -> None:
    everyone, model = field(world)
    draw, spent = random.Random(seed), []
    errors = {family: draw.uniform(0.9, 1.3) for family in sorted({one.family for one in everyone})}
    truth = {one: model(one, TOKENS) * errors[one.family] for one in everyone}

    def measure(candidate: TuningCandidate) -> float:
        spent.append(truth[candidate])
        return truth[candidate] * draw.uniform(0.99, 1.01)

    size = min(max(len(everyone) // 10, MIN_CONTESTANTS), MAX_CONTESTANTS)
    chosen, times = race(choose_contestants(everyone, size, TOKENS, model), measure)
    assert truth[chosen] <= 1.05 * min(truth.values())
    assert everyone[0] in times and chosen in times
    assert sum(spent) < 0.1 * 4 * sum(truth.values())  # three rounds, a warm-up


def test_every_family_that_is_not_hopeless_has_a_contestant() -> None:
    everyone, model = field(2)
    contestants = choose_contestants(everyone, 24, TOKENS, model)
    assert contestants[0] == everyone[0] and len(set(contestants)) == len(contestants) <= 24
    assert {one.family for one in contestants} == {one.family for one in everyone}


@pytest.mark.night
def test_of_all_sizes_one_races_in_the_smallest_field_though_the_model_thinks_little_of_it() -> None:
    everyone, model = field(4)

    def predict(candidate: TuningCandidate, tokens: int) -> float:
        return model(candidate, tokens) * (2.0 if candidate.ulysses_size == 4 else 1.0)

    sizes = {
        (one.ring_size, one.ulysses_size)
        for one in choose_contestants(everyone, MIN_CONTESTANTS, TOKENS, predict)
    }
    assert sizes == {(4, 1), (2, 2), (1, 4)}


def test_the_defaults_stay_where_nothing_is_better() -> None:
    everyone, model = field(2)
    contestants = choose_contestants(everyone, 16, TOKENS, model)
    assert race(contestants, lambda one: 1.0 if one == everyone[0] else 0.995)[0] == everyone[0]


def test_a_bar_has_a_label_from_its_first_line_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """(Its first line was "0 % |", the next "kernels: 5 %".)"""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    with search._bar(True, "kernels", 2) as bar:
        bar.update()
    lines = [line for line in capsys.readouterr().err.split("\r") if "%" in line]
    assert lines and all(line.startswith("ds-ring tune measures kernels: ") for line in lines), lines
