"""Plans of more tokens than pairs fit into int64: counts are exact, and "auto" chooses as for short ones."""

from __future__ import annotations

import pytest

from ds_ring import Causal, Full, SlidingWindow, build_plan, make_layout
from ds_ring.masks.pattern import Pattern

WINDOW = 1 << 35


def pairs_of(pattern: Pattern, tokens: int) -> int:
    """Return the pairs of one head."""
    if isinstance(pattern, Full):
        return tokens**2
    width = min(WINDOW, tokens) if isinstance(pattern, SlidingWindow) else tokens
    return tokens * width - width * (width - 1) // 2


@pytest.mark.parametrize("pattern", [Causal(), Full(), SlidingWindow(WINDOW)], ids=str)
@pytest.mark.parametrize("name", ["contiguous", "zigzag", "striped", "balanced", "auto"])
@pytest.mark.parametrize("exponent", [20, 33, 36, 40])
@pytest.mark.situation("configurations", "a plan of 2^33 to 2^40 tokens on four ranks")
def test_pairs_are_counted_beyond_int64(exponent: int, name: str, pattern: Pattern) -> None:
    tokens = (1 << exponent) + 24
    layout = make_layout(name, tokens=tokens, ring_size=4, pattern=pattern)
    plan = build_plan(pattern, layout, query_heads=8, kv_heads=2)
    found = [plan.rank(rank).pairs for rank in range(4)]
    assert sum(found) == 8 * pairs_of(pattern, tokens)
    if name == "auto":
        assert max(found) * 4 < 1.06 * sum(found)
    if name == "auto" and not isinstance(pattern, SlidingWindow):
        assert layout.name == make_layout(name, tokens=(1 << 20) + 24, ring_size=4, pattern=pattern).name
