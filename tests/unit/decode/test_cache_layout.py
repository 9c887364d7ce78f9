"""Tokens after a prompt, on the ranks in turn."""

from __future__ import annotations

import pytest

from ds_ring import make_layout
from ds_ring.decode.cache_layout import CacheLayout


@pytest.mark.parametrize("ring_size", [1, 3, 4])
def test_a_cache_gives_what_follows_a_prompt_to_the_ranks_in_turn(ring_size: int) -> None:
    prompt = make_layout("zigzag", tokens=11, ring_size=ring_size)
    cache = CacheLayout(11 + 7, ring_size, prompt=prompt)
    for rank in range(ring_size):
        own = prompt.positions(rank)
        found = cache.positions(rank)
        expected = [*own[own >= 0], *range(11 + rank, 18, ring_size)]
        assert list(found[found >= 0]) == expected
        for position in range(11, 18):
            slot = cache.slot(rank, position)
            assert (slot is None) == (position not in expected)
            assert slot is None or found[slot] == position
