"""Tokens after a prompt, on the ranks in turn."""

from __future__ import annotations

import pytest

from ds_ring import make_layout
from ds_ring.decode.cache_layout import CacheLayout
from ds_ring.schedule.pieces import round_to_blocks
from ds_ring.transports.reproducible.blocks import cut_blocks


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


@pytest.mark.parametrize("ring_size", [1, 3, 4])
def test_blocks_stay_whole(ring_size: int) -> None:
    prompt = round_to_blocks(make_layout("zigzag", tokens=75, ring_size=ring_size), 8)
    cache = CacheLayout(75 + 61, ring_size, prompt=prompt, block=8)
    owners = cache.slots_by_position() // cache.local_tokens
    for rank in range(ring_size):
        places = [(one.number, one.length) for one in cut_blocks(cache, rank, 8, True)]
        assert places == [(number, 8) for number in range(17) if owners[8 * number] == rank]
        for position in range(75, 136):
            slot = cache.slot(rank, position)
            assert (slot is None) == (owners[position] != rank)
            assert slot is None or cache.positions(rank)[slot] == position
