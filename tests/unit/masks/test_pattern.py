"""Windows, and patterns composed with `&`: mask, multiplicity and tiles tell the same story."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_ring import Causal, Full, RingPatternError, SlidingWindow
from ds_ring.schedule.layout import expand_runs
from tests.unit.masks.painting import in_order, paint, runs

Runs = list[tuple[int, int, int]]


@given(window=st.integers(1, 40), causal=st.booleans(), q=runs, k=runs)
def test_a_window_sees_itself_and_what_is_before_it(window: int, causal: bool, q: Runs, k: Runs) -> None:
    q_runs, k_runs = in_order(q), in_order(k)
    gap = expand_runs(q_runs)[:, None] - expand_runs(k_runs)[None, :]
    want = (gap >= 0) & (gap <= window - 1) if causal else np.abs(gap) <= window - 1
    pattern = SlidingWindow(window, causal)
    np.testing.assert_array_equal(paint(pattern.tiles(q_runs, k_runs), *gap.shape), want)
    np.testing.assert_array_equal(pattern.mask(expand_runs(q_runs), expand_runs(k_runs)), want)
    assert pattern.is_causal is (causal or window == 1)


def test_a_position_of_minus_one_sees_nothing_and_is_not_seen() -> None:
    positions = np.array([3, -1, 0])
    assert Full().mask(positions, positions).tolist() == [[1, 0, 1], [0, 0, 0], [1, 0, 1]]


def test_patterns_are_values() -> None:
    assert Causal() & SlidingWindow(3, False) == Causal() & SlidingWindow(3, False)
    assert Causal() & SlidingWindow(3, False) != Causal() & SlidingWindow(4, False)
    every = np.arange(9)
    composed, window = Causal() & SlidingWindow(3, False), SlidingWindow(3)
    np.testing.assert_array_equal(composed.mask(every, every), window.mask(every, every))
    assert str(Causal() & Full()) == f"{Causal()} & {Full()}"


def test_a_band_that_is_empty_has_no_tiles() -> None:
    # Queries after their keys by 10 and more, in a window of 5.
    assert len(SlidingWindow(5).tiles(np.array([[50, 1, 8]]), np.array([[0, 1, 40]]))) == 0


@pytest.mark.parametrize("window", [0, -3, 2.0, True, "8", None])
def test_windows_that_cannot_be(window: object) -> None:
    with pytest.raises(RingPatternError, match="window: expected a positive integer") as caught:
        SlidingWindow(window)  # type: ignore[arg-type]
    assert isinstance(caught.value, ValueError)


def test_only_patterns_compose() -> None:
    with pytest.raises(RingPatternError, match="&: expected a pattern on both sides, got int"):
        Causal() & 3  # type: ignore[operator]
