"""Layouts of blocks of tokens."""

from __future__ import annotations

import numpy as np
import pytest

from ds_ring import RingLayoutError, make_layout
from ds_ring.layers.scan.sequence_runs import in_blocks, sequence_runs


@pytest.mark.parametrize("name", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("tokens", "size"), [(64, 4), (128, 8), (1000, 5)])
@pytest.mark.parametrize("ring_size", [1, 2, 4])
def test_blocks_lie_where_their_tokens_do(name: str, tokens: int, size: int, ring_size: int) -> None:
    layout = make_layout(name, tokens=tokens, ring_size=ring_size)
    for one in (size, 1):
        found = in_blocks(layout, one)
        assert found.tokens == -(-tokens // one)
        for rank in range(ring_size):
            first = layout.positions(rank)[: layout.valid_tokens(rank) : one]
            np.testing.assert_array_equal(found.positions(rank)[: found.valid_tokens(rank)], first // one)


@pytest.mark.parametrize(
    ("name", "tokens", "said"),
    [
        ("zigzag", 60, "got 0 to 14 on ring rank 0; pad the sequence to a multiple of 16 tokens"),
        ("contiguous", 62, "got 0 to 30 on ring rank 0; pad the sequence to a multiple of 8 tokens"),
        ("striped", 64, "expected shards of consecutive positions"),
    ],
)
def test_a_block_that_is_cut_between_ranks_is_refused(name: str, tokens: int, said: str) -> None:
    layout = make_layout(name, tokens=tokens, ring_size=2)
    with pytest.raises(RingLayoutError, match=said):
        in_blocks(layout, 4)
    if name != "striped":
        in_blocks(make_layout(name, tokens=64, ring_size=2), 4)


@pytest.mark.parametrize("name", ["contiguous", "zigzag"])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_runs_of_parts_hold_each_token_once(name: str, parts: int) -> None:
    """Parts of a shard may cut a run of it, or hold several."""
    layout = make_layout(name, tokens=90, ring_size=3, multiple_of=4)
    runs, slots = sequence_runs(layout, parts), layout.part_slots(parts)
    found = np.full((3 * parts, slots), -1)
    for start, length, rank, slot in zip(runs.starts, runs.lengths, runs.ranks, runs.slots, strict=True):
        assert slot + length <= slots and (found[rank, slot : slot + length] == -1).all()
        found[rank, slot : slot + length] = np.arange(start, start + length)
    np.testing.assert_array_equal(found.reshape(3, -1), [layout.positions(rank) for rank in range(3)])
