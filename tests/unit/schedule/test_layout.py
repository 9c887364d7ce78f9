"""Layouts are bijections; padding lies at the end of a shard."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ds_ring import Causal, Full, RingLayoutError, RingShapeError, make_layout
from ds_ring.schedule.layout import ChunkLayout, PieceLayout
from tests.cases import LAYOUTS, layout_for, rows_of

(PATTERN,) = rows_of("Dilated", lambda dilated: {"": dilated((12, 40), (1, 3))}).values() or (Causal(),)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("tokens", [1, 5, 16, 17, 1000, 1023])
@pytest.mark.parametrize("ring_size", [1, 2, 3, 8])
@pytest.mark.parametrize("multiple_of", [1, 4])
def test_every_position_has_one_slot(name: str, tokens: int, ring_size: int, multiple_of: int) -> None:
    layout = layout_for(name, PATTERN, tokens=tokens, ring_size=ring_size, multiple_of=multiple_of)
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
        ({"name": "zickzack", "tokens": 8, "ring_size": 2}, "contiguous.*zigzag.*got 'zickzack'"),
        ({"name": "zigzag", "tokens": 0, "ring_size": 2}, "tokens: expected a positive integer, got 0"),
        ({"name": "zigzag", "tokens": 8.0, "ring_size": 2}, "tokens: .* got 8.0"),
        ({"name": "zigzag", "tokens": 8, "ring_size": -1}, "ring_size: .* got -1"),
        ({"name": "zigzag", "tokens": 8, "ring_size": True}, "ring_size: .* got True"),
    ],
)
def test_layouts_that_cannot_be(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(RingLayoutError, match=said):
        make_layout(**arguments)  # type: ignore[arg-type]


def test_shards_that_ulysses_ranks_cannot_share_are_refused() -> None:
    layout = make_layout("zigzag", tokens=9, ring_size=2)
    assert layout.part_slots(5) == 1
    with pytest.raises(
        RingShapeError, match=r"expected shards of a multiple of 3 slots, as Ulysses ranks, got 5"
    ):
        layout.part_slots(3)


def test_chunks_per_rank_are_one_or_two() -> None:
    with pytest.raises(RingLayoutError, match=r"expected 1 \(contiguous\) or 2 \(zigzag\), got 3"):
        ChunkLayout(16, 2, 1, 3)


@pytest.mark.parametrize("changed", [{"boundaries": (0, 4, 6, 12)}, {"owners": (0, 1, 1)}], ids="".join)
def test_layouts_of_as_many_pieces_differ_as_texts_which_ranks_compare(changed: dict[str, Any]) -> None:
    one = PieceLayout(12, 2, 1, (0, 3, 6, 12), (0, 1, 0))
    assert str(replace(one)) == str(one) != str(replace(one, **changed))
