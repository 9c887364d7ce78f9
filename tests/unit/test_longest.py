"""The bisection of tools/longest.py, on a device that holds a known number of tokens."""

from __future__ import annotations

import pytest

from tools.longest import longest


@pytest.mark.parametrize(("limit", "start"), [(1_000_000, 4096), (4096, 4096), (70_000, 65_536), (100, 4096)])
def test_the_bisection_ends_below_the_limit_within_its_precision(limit: int, start: int) -> None:
    tried: list[int] = []

    def holds(tokens: int) -> bool:
        tried.append(tokens)
        return tokens <= limit

    found = longest(holds, start, multiple=256, precision=0.05)
    if limit < start:
        assert found == 0 and tried == [start]
        return
    assert found <= limit and found % 256 == 0
    assert limit - found <= 0.05 * found + 256
    assert len(tried) == len(set(tried)) <= 16
