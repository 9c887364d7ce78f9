"""Predictions: what more work, slower links and idle neighbours do to them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_ring_launcher.tune.candidates import TuningCandidate, candidates
from ds_ring_launcher.tune.measurements import KernelSample, Links, _fit
from ds_ring_launcher.tune.model import Model
from tests.unit.launcher.tune.cases import machine, request

ASKED = request(4)
DEFAULT = candidates(ASKED)[0]


def seconds(candidate: TuningCandidate, **more: object) -> float:
    return Model(ASKED, machine(ASKED, **more))(candidate, ASKED.tokens)


def test_compute_is_the_pairs_over_the_rate() -> None:
    asked = request(1)
    predicted = Model(asked, machine(asked)).predict(candidates(asked)[0], 8192)
    ideal = (4 + 10) * 64 * 4 * (8192 * 8193 / 2) / 50e9
    assert predicted.compute_s == pytest.approx(ideal, rel=0.03)
    assert predicted.compute_s > ideal  # triangles are computed whole
    assert predicted.transfer_s == 0


def test_launches_are_not_taken_for_speed() -> None:
    """1.72 and 1.78 ms on an H200: the rise alone gave 2,335 TFLOP/s, more than twice what it can do."""
    few, many = 2.1e9, 1.37e11
    small, large = ([KernelSample((n, 2.5 * n), (s, s))] for n, s in ((few, 1.72e-3), (many, 1.78e-3)))
    for way, factor in ((0, 1.0), (1, 2.5)):
        assert _fit(small, large, way) == (factor * many / 1.78e-3, 0.0)
    rising = [KernelSample((many, many), (10e-3, 10e-3))]
    rate, fixed = _fit(small, rising, 0)
    assert rate > many / 10e-3 and fixed > 0


def test_transfer_is_the_bytes_over_the_rate() -> None:
    predicted = Model(ASKED, machine(ASKED)).predict(replace(DEFAULT, layout="striped"), 8192)
    assert predicted.transfer_s == pytest.approx(3 * 2048 * 4 * 2 * 64 * 12 / 1e9, rel=0.01)


def test_overlap_hides_the_shorter_of_the_two() -> None:
    without = replace(DEFAULT, overlap=False)
    assert seconds(DEFAULT) < seconds(without)
    predicted = Model(ASKED, machine(ASKED)).predict(without, 8192)
    whole = predicted.compute_s + predicted.transfer_s + predicted.overhead_s
    assert predicted.seconds == pytest.approx(whole)


def test_the_slowest_rank_counts_unless_it_shares_with_the_others() -> None:
    uneven = replace(DEFAULT, layout="contiguous")
    assert seconds(uneven) > 1.4 * seconds(DEFAULT)
    shared = {"alone_speedup": 2.0}
    assert seconds(uneven, **shared) < 1.1 * seconds(DEFAULT, **shared)


def test_slow_links_and_costly_hops() -> None:
    slow = Links(1e7, 1e7, 1e-4, 1e9)
    heads = next(c for c in candidates(ASKED) if (c.ring_size, c.ulysses_size) == (1, 4))
    assert seconds(heads, links=slow) < seconds(DEFAULT, links=slow)
    one = replace(DEFAULT, heads_per_message=1)
    assert seconds(one, hop_overhead_s=0.1) > 2 * seconds(
        replace(one, heads_per_message=4), hop_overhead_s=0.1
    )


@pytest.mark.night
def test_every_candidate_of_a_dilated_pattern_has_a_prediction() -> None:
    pattern = {"segment_lengths": [1024, 2048], "dilation_rates": [1, 2]}
    asked = request(4, tokens=4096, kv_heads=2, section={"pattern": pattern})
    model = Model(asked, machine(asked))
    assert all(model(one, 4096) > 0 for one in candidates(asked))


def test_each_way_is_fitted_to_its_own_seconds() -> None:
    small = [KernelSample((1e6, 3e6), seconds) for seconds in ((1.5, 2.5), (1.6, 2.6))]
    large = [KernelSample((4e6, 12e6), (4.5, 7.0))]
    assert _fit(small, large, 0) == pytest.approx((1e6, 0.5))
    assert _fit(small, large, 1) == pytest.approx((2e6, 1.0))
