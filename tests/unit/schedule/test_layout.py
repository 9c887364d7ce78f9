"""Layouts are bijections; padding lies at the end of a shard."""

from __future__ import annotations

import numpy as np
import pytest

from ds_ring import Causal, Dilated, Full, RingLayoutError, make_layout
from ds_ring.schedule.cache_layout import CacheLayout
from tests.cases import LAYOUTS, layout_for


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("tokens", [1, 5, 16, 17, 1000, 1023])
@pytest.mark.parametrize("ring_size", [1, 2, 3, 8])
@pytest.mark.parametrize("multiple_of", [1, 4])
def test_every_position_has_one_slot(name: str, tokens: int, ring_size: int, multiple_of: int) -> None:
    pattern = Dilated((12, 40), (1, 3))
    layout = layout_for(name, pattern, tokens=tokens, ring_size=ring_size, multiple_of=multiple_of)
    shards = [layout.positions(rank) for rank in range(ring_size)]
    assert {len(shard) for shard in shards} == {layout.local_tokens}
    assert layout.local_tokens % multiple_of == 0
    everything = np.concatenate(shards)
    np.testing.assert_array_equal(np.sort(everything[everything >= 0]), np.arange(tokens))
    np.testing.assert_array_equal(everything[layout.slots_by_position()], np.arange(tokens))
    for rank, shard in enumerate(shards):
        valid = layout.valid_tokens(rank)
        assert (shard[:valid] >= 0).all() and (shard[valid:] == -1).all()
    waste = layout.local_tokens * ring_size - tokens
    if name in ("contiguous", "zigzag", "striped"):
        assert waste < ring_size * (multiple_of + (2 if name == "zigzag" else 1))
    else:  # whole windows, or pieces as uneven as the work asks for
        assert waste < ring_size * (multiple_of + 2 * 12) + 0.1 * tokens


def test_zigzag_pairs_mirror_chunks() -> None:
    layout = make_layout("zigzag", tokens=16, ring_size=2)
    assert layout.positions(0).tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert layout.positions(1).tolist() == [4, 5, 6, 7, 8, 9, 10, 11]


def test_striped_deals_tokens_out() -> None:
    layout = make_layout("striped", tokens=7, ring_size=3)
    assert layout.positions(0).tolist() == [0, 3, 6]
    assert layout.positions(2).tolist() == [2, 5, -1]


def test_auto_follows_the_pattern() -> None:
    assert make_layout("auto", tokens=64, ring_size=4, pattern=Causal()).name == "zigzag"
    assert make_layout("auto", tokens=64, ring_size=4, pattern=Full()).name == "contiguous"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"name": "zickzack", "tokens": 8, "ring_size": 2}, "unknown layout 'zickzack'.*contiguous.*zigzag"),
        ({"name": "zigzag", "tokens": 0, "ring_size": 2}, "tokens: expected a positive integer, got 0"),
        ({"name": "zigzag", "tokens": 8.0, "ring_size": 2}, "tokens: .* got 8.0"),
        ({"name": "zigzag", "tokens": 8, "ring_size": -1}, "ring_size: .* got -1"),
        ({"name": "zigzag", "tokens": 8, "ring_size": True}, "ring_size: .* got True"),
    ],
)
def test_layouts_that_cannot_be(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(RingLayoutError, match=said):
        make_layout(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("ring_size", [1, 3, 4])
def test_a_cache_gives_what_follows_a_prompt_to_the_ranks_in_turn(ring_size):
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
