"""Random trees and patterns with tables on simulated rings: a few rounds of `tools/campaign.py pattern`."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests import pattern_rounds
from tests.pattern_rounds import play, play_apart


# Tree 23: queries whose labels do not ascend and keys whose labels do; once it was wrong on zigzag layouts.
@pytest.mark.parametrize("first", [23, *range(100, 400, 4)])
@pytest.mark.parametrize("kind", pattern_rounds.KINDS)
@pytest.mark.day("tree-23", "pattern-23")
def test_rounds_are_dense_attention(kind: str, first: int) -> None:
    rounds = list(play_apart(kind, range(first, first + 4)))
    assert [count for count, _ in rounds] == [2] * 4 and not [text for _, said in rounds for text in said]


def test_a_process_that_a_signal_ends_is_counted_and_the_others_are_played(monkeypatch: Any) -> None:
    def ends_at_7(kind: str, seed: int, every: bool) -> tuple[int, list[str]]:
        if seed == 7:
            os.kill(os.getpid(), signal.SIGFPE)
        return play(kind, seed, every)

    monkeypatch.setattr(pattern_rounds, "play", ends_at_7)
    found = list(play_apart("tree", [6, 7, 8]))
    assert [count for count, _ in found] == [2, 0, 2]
    assert [said for _, said in found] == [[], [f"tree 7: the process ended with {-signal.SIGFPE}"], []]
