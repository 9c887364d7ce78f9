"""Windows, and patterns composed with `&`: mask, multiplicity and tiles tell the same story."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_ring import Causal, Dilated, Full, MaskMod, RingPatternError, SlidingWindow
from ds_ring.masks.pattern import Pattern
from ds_ring.schedule.layout import expand_runs
from ds_ring.schedule.plan import head_classes
from tests.dilated_definition import RULES, Branches
from tests.unit.masks.painting import coverage, paint
from tests.unit.masks.test_dilated import in_order, runs

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


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_mask_function_gets_arrays_of_its_own(tokens: int) -> None:
    """A broadcast array of one pair is contiguous and read-only; torch warns where it shares such memory."""
    pattern, positions = MaskMod(lambda b, h, q, k: q >= k), np.arange(tokens)
    np.testing.assert_array_equal(pattern.mask(positions, positions), np.tri(tokens, dtype=bool))


@given(
    window=st.integers(1, 60),
    causal=st.booleans(),
    nested=st.booleans(),
    rule=st.sampled_from(RULES),
    turned=st.booleans(),
    q=runs,
    k=runs,
)
def test_a_dilated_window_is_both(
    window: int, causal: bool, nested: bool, rule: str, turned: bool, q: Runs, k: Runs
) -> None:
    """The multiplicities of the one where the other attends, for every head, whichever is written first."""
    branches = (
        Branches((8, 16, 32), (1, 2, 4), causal, rule) if nested else Branches((7, 20), (2, 3), causal, rule)
    )
    dilated = Dilated(branches.segment_lengths, branches.dilation_rates, causal, rule)
    other = SlidingWindow(window, causal=False)
    pattern: Pattern = other & dilated if turned else dilated & other
    q_runs, k_runs = in_order(q), in_order(k)
    q_at, k_at = expand_runs(q_runs), expand_runs(k_runs)
    tokens = 1 + int(max(q_at.max(), k_at.max()))
    near = np.abs(q_at[:, None] - k_at[None, :]) < window
    for kv_heads, bound in head_classes(pattern, 4, 2):
        tiles = bound.tiles(q_runs, k_runs)
        if nested:
            assert all(
                coverage(tiles, *near.shape, head_in_group).max(initial=0) <= 1 for head_in_group in (0, 1)
            )
        for kv_head in range(2)[kv_heads]:
            for head_in_group in (0, 1):
                head = 2 * kv_head + head_in_group
                want = branches.multiplicity(head, 4, 2, tokens)[np.ix_(q_at, k_at)] * near
                np.testing.assert_array_equal(paint(tiles, *near.shape, head_in_group), want)
                np.testing.assert_array_equal(pattern.mask(q_at, k_at, head, 4, 2), want > 0)
    assert pattern.is_causal is (causal or window == 1)


@pytest.mark.parametrize("rules", [("paper", "zero"), ("zero", "zero"), ("paper", "torchscale")])
def test_two_dilations_at_once_multiply(rules: tuple[str, str]) -> None:
    both = [
        Branches((8, 16, 64), (1, 2, 4), False, rules[0]),
        Branches((5, 32), (1, 3), True, rules[1]),
    ]
    first, second = (Dilated(b.segment_lengths, b.dilation_rates, b.causal, b.rule) for b in both)
    whole, every = np.array([[0, 1, 70]]), np.arange(70)
    for kv_heads, bound in head_classes(first & second, 6, 2):
        tiles = bound.tiles(whole, whole)
        for kv_head, head_in_group in itertools.product(range(2)[kv_heads], range(3)):
            head = 3 * kv_head + head_in_group
            want = both[0].multiplicity(head, 6, 2, 70) * both[1].multiplicity(head, 6, 2, 70)
            np.testing.assert_array_equal(paint(tiles, 70, 70, head_in_group), want)
            counts = (first & second).multiplicity(head, 6, 2, every[:, None], every[None, :])
            np.testing.assert_array_equal(counts, want)


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
