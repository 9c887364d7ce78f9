"""The simulation of months: its accounts, closed forms, every second by itself, published schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import numpy as np
import pytest

from ds_ring_launcher.plan.goodput import simulation
from ds_ring_launcher.plan.goodput.closed_forms import daly, kokolis_share, useful_share, young
from ds_ring_launcher.plan.goodput.faults import (
    DELAYS_S,
    HOUR_S,
    LLAMA_COUNTS,
    RATES,
    Fault,
    FaultProcess,
    draw,
)
from ds_ring_launcher.plan.goodput.schedules import (
    FAULTS_S,
    NCCL_TIMEOUT_S,
    RESTART_MINUTES,
    minutes_a_fault,
    restarts,
)
from ds_ring_launcher.plan.goodput.simulation import Job, Ledger, simulate

FAULTS = 50_000  # of one check: the share is known to a few thousandths
# interval, pause, mtbf, restart, write
CASES = [
    (600.0, 10.0, 20_000.0, 300.0, 0.0),
    (600.0, 10.0, 20_000.0, 300.0, 500.0),
    (60.0, 30.0, 400.0, 0.0, 0.0),
    (500.0, 5.0, 1_000.0, 900.0, 120.0),
    (900.0, 60.0, 600.0, 30.0, 0.0),  # seldom a whole interval
]


def job(interval: float, pause: float, restart: float, write: float) -> Job:
    return Job(interval, pause, write, lambda fault: restart / 4, lambda fault: restart * 3 / 4)


def at_rate(mtbf_s: float, seed: int) -> Callable[[], Fault]:
    random = Random(seed)
    return lambda: Fault(random.expovariate(1 / mtbf_s), "ends", "GPU")


def difference(interval: float, pause: float, mtbf: float, restart: float, write: float) -> float:
    """Return how far the simulated share is from the closed form, relative to that."""
    ledger = simulate(job(interval, pause, restart, write), at_rate(mtbf, 7), wall_s=FAULTS * mtbf)
    return ledger.useful / useful_share(interval, pause, mtbf, restart, write) - 1


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_useful_share_is_daly_s(case: tuple[float, ...]) -> None:
    assert abs(difference(*case)) < 0.02


class CountedTwice(Ledger):
    """Count lost work twice."""

    def __setattr__(self, name: str, value: float) -> None:
        before = getattr(self, name, 0.0)
        super().__setattr__(name, 2 * value - before if name == "lost_s" else value)


def written_at_once(run: Job, run_s: float) -> tuple[float, float]:
    work, _ = progress(run, run_s)
    return work, run_s // (run.interval_s + run.pause_s) * run.interval_s


def never_lost(run: Job, run_s: float) -> tuple[float, float]:
    work, _ = progress(run, run_s)
    return work, work


progress = simulation._progress


@pytest.mark.parametrize("wrong", [written_at_once, never_lost])
def test_a_seeded_fault_of_progress_fails_the_closed_form(
    wrong: Callable[[Job, float], tuple[float, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulation, "_progress", wrong)
    assert difference(*CASES[3]) > 0.1


def test_lost_work_that_is_counted_twice_fails_the_closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "Ledger", CountedTwice)
    assert difference(*CASES[3]) < -0.05


def test_faults_that_do_not_strike_a_restart_fail_the_closed_form() -> None:
    interval, pause, mtbf, restart, write = CASES[3]
    random = np.random.default_rng(7)
    late = lambda: Fault(restart + float(random.exponential(mtbf)), "ends", "GPU")  # noqa: E731
    ledger = simulate(job(interval, pause, restart, write), late, wall_s=FAULTS * mtbf)
    assert ledger.useful / useful_share(*CASES[3]) - 1 > 0.2


@pytest.mark.parametrize(("pause", "mtbf"), [(5.0, 20_000.0), (60.0, 20_000.0), (300.0, 3_600.0)])
@pytest.mark.day("5.0-20000.0", "300.0-3600.0")
def test_no_interval_is_better_than_daly_s(pause: float, mtbf: float) -> None:
    best = daly(pause, mtbf)
    assert best == pytest.approx(young(pause, mtbf), rel=3 * (pause / mtbf) ** 0.5)

    def share(factor: float) -> float:
        return simulate(job(best * factor, pause, 100, 0), at_rate(mtbf, 3), wall_s=FAULTS * mtbf).useful

    found = {factor: share(factor) for factor in (0.25, 0.5, 1.0, 2.0, 4.0)}
    assert max(found, key=found.__getitem__) == 1.0, found


def test_daly_s_interval_where_a_pause_is_longer_than_two_faults_apart() -> None:
    assert daly(100, 40) == 40


def test_the_published_share_of_kokolis_holds_where_losses_are_small() -> None:
    for interval, pause, mtbf, restart in [(600, 5, 1e6, 300), (3600, 60, 3e6, 600)]:
        expected = kokolis_share(interval, pause, mtbf, restart)
        assert useful_share(interval, pause, mtbf, restart) == pytest.approx(expected, rel=2e-4)


def second_by_second(run: Job, gaps: Sequence[int], down_s: int, wall_s: int) -> Ledger:
    """Be the same job, one second at a time; every time is a whole number of seconds."""
    found, now, strikes, coming = Ledger(), 0, gaps[0], iter(gaps[1:])
    work = written = since_start = 0
    saves: list[tuple[int, int]] = []  # when it is whole, work in it
    down = 0
    while now < wall_s:
        if now == strikes:
            found.faults += 1
            found.lost_s += work - written
            found.useful_s += written
            work = written = since_start = 0
            saves, down, strikes = [], down_s, now + next(coming)
        now += 1
        if down:
            found.restart_s += 1
            down -= 1
            continue
        place = since_start % int(run.interval_s + run.pause_s)
        since_start += 1
        if place < run.interval_s:
            work += 1
        else:
            found.saving_s += 1
            if place == run.interval_s + run.pause_s - 1:
                saves.append((now + int(run.write_s), work))
        written = max([written, *(done for whole, done in saves if whole <= now)])
    found.useful_s += work
    return found


@pytest.mark.parametrize("seed", range(5))
def test_every_second_is_accounted_for_as_in_a_simulation_of_seconds(seed: int) -> None:
    random = np.random.default_rng(seed)
    gaps = [int(gap) + 1 for gap in random.exponential(300, 2000)]
    run = Job(50.0, 7.0, 20.0, lambda fault: 0.0, lambda fault: 90.0)
    coming = iter(gaps)
    ledger = simulate(run, lambda: Fault(float(next(coming)), "ends", "GPU"), wall_s=20_000)
    assert ledger == second_by_second(run, gaps, 90, 20_000)
    assert ledger.wall_s == 20_000 and ledger.faults > 30


def test_work_that_ends_needs_no_save_after_it() -> None:
    ledger = simulate(job(100, 10, 0, 0), lambda: Fault(1e9, "ends", "GPU"), work_s=300)
    assert (ledger.useful_s, ledger.saving_s, ledger.wall_s) == (300, 20, 320)


def test_a_job_that_does_not_get_on_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "MAX_FAULTS", 1000)
    ledger = simulate(job(100, 10, 0, 0), lambda: Fault(50, "ends", "GPU"), work_s=300)
    assert ledger.faults == 1000 and ledger.useful_s == 0


def test_the_rates_are_those_that_were_published() -> None:
    def mtbf_hours(rates: str, gpus: int) -> float:
        return FaultProcess(RATES[rates].rates, gpus, 8, Random(0)).mtbf_s / HOUR_S

    assert sum(LLAMA_COUNTS.values()) == 419
    assert mtbf_hours("llama3", 16_384) == pytest.approx(54 * 24 / 419)
    assert mtbf_hours("rsc1", 16_384) == pytest.approx(1.8, rel=0.01)  # their projection
    assert mtbf_hours("rsc1_jobs", 1_024) == pytest.approx(7.9)


def test_faults_are_drawn_at_their_rates_and_false_alarms_among_them() -> None:
    process = FaultProcess(RATES["llama3"].rates, 1024, 8, Random(1), false_alarm_hours=49.5)
    found = [process.next() for _ in range(20_000)]
    assert np.mean([fault.after_s for fault in found]) == pytest.approx(process.mtbf_s, rel=0.03)
    share = {part: np.mean([fault.part == part for fault in found]) for part in ("GPU", "link", None)}
    assert share == pytest.approx({"GPU": 268 / 838, "link": 42 / 838, None: 0.5}, abs=0.02)
    ledger = simulate(job(600, 5, 60, 0), process.next, wall_s=1e8)
    assert ledger.false_alarms == pytest.approx(ledger.faults, rel=0.1)


def test_quantiles_are_drawn_from() -> None:
    random = Random(0)
    found = [draw(DELAYS_S["ends"], random) for _ in range(4000)]
    assert np.quantile(found, [1 / 3, 2 / 3]) == pytest.approx(DELAYS_S["ends"][1:3], rel=0.05)
    assert min(found) >= DELAYS_S["ends"][0] and max(found) <= DELAYS_S["ends"][-1]


def test_restarts_from_checkpoints_take_as_long_as_was_published() -> None:
    """TorchPass's schedule: 818 minutes. What is not known is torch's default: ten minutes to notice."""
    assert restarts(NCCL_TIMEOUT_S) == pytest.approx(RESTART_MINUTES, rel=0.05)
    assert restarts(0.0) < 0.8 * RESTART_MINUTES
    assert sum(FAULTS_S) / 2 == HOUR_S


def test_a_published_share_says_what_a_fault_may_cost() -> None:
    mtbf_s = 5 * HOUR_S
    left_s = 60 * minutes_a_fault(0.97, mtbf_s)
    assert useful_share(1e-3, 0.0, mtbf_s, left_s) == pytest.approx(0.97)
