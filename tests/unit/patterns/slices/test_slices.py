"""Slices of the attention matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ds_ring import Causal, RingConfig, RingPatternError, Sinks, Slices, SlidingWindow
from ds_ring.config.section import pattern_from_config
from ds_ring.masks.pattern import Pattern
from tests.unit.config.test_section import Json, pattern, refusal

SLICES: Any = [[[0, 8], [0, 8], "full"], [[8, 16], [0, 16], "causal"]]


@pytest.mark.parametrize(
    ("slices", "said"),
    [
        ((), r"expected a list of \(\(q_start"),
        ((((0, 4), (0, 4), "round"),), "slice 0: kind: expected one of full, causal, .* got 'round'"),
        ((((0, 4), (0, 4)),), "slice 0: expected"),
        ((((0, 4), (4, 4), "full"),), "slice 0: k_range: expected start below end, got 4 and 4"),
        (
            (((0, 9), (0, 9), "causal"), ((4, 12), (2, 6), "full")),
            r"\(0, 9\).* and .*\(4, 12\).*overlap; cut one",
        ),
    ],
)
def test_slices_that_cannot_be(slices: tuple, said: str) -> None:
    with pytest.raises(RingPatternError, match=said):
        Slices(slices)


def test_slices_may_share_ranges_where_their_kinds_part_them() -> None:
    upper, lower = ((0, 8), (0, 8), "inverse-causal"), ((1, 8), (0, 7), "causal")
    pattern, at = Slices((upper, lower)), np.arange(8)
    assert pattern.mask(at, at).all() and Slices([list(upper), list(lower)]) == pattern  # type: ignore[arg-type]


def test_a_union_with_slices_counts_each_pair_once() -> None:
    at = np.arange(70)
    pattern = Sinks(3) | SlidingWindow(4) | Slices((((50, 60), (10, 20), "full"),))
    assert pattern.multiplicity(0, 1, 1, at[:, None], at[None]).max() == 1


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"slices": SLICES}, Slices(SLICES) & Causal()),
        ({"slices": SLICES, "causal": False}, Slices(SLICES)),
        ({"slices": SLICES, "window": 8}, SlidingWindow(8) & Slices(SLICES)),
    ],
    ids=str,
)
def test_sections_and_their_patterns(section: Json, expected: Pattern) -> None:
    assert pattern_from_config(RingConfig.from_deepspeed(pattern(**section))) == expected


@pytest.mark.parametrize(
    ("slices", "said"),
    [
        ([], "pattern.slices: expected a list"),
        ([[[0, 4], [0, 4], "round"]], "pattern.slices: slice 0: kind: expected one of full, causal"),
        ([[[0, 4], [0, 4], "full"], [[3, 9], [3, 9], "causal"]], "which overlap; cut one of them"),
        (3, "pattern.slices: expected a list"),
    ],
    ids=str,
)
def test_sections_that_are_refused(slices: Any, said: str) -> None:
    assert said in refusal(pattern(slices=slices))
