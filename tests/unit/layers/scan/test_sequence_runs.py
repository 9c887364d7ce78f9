"""Layouts of blocks of tokens, and of tokens whose blocks are given."""

from __future__ import annotations

import numpy as np
import pytest

from ds_ring import Causal, RingLayoutError, make_layout
from ds_ring.layers.scan.sequence_runs import in_blocks, of_blocks


@pytest.mark.parametrize("name", ["contiguous", "zigzag", "balanced"])
@pytest.mark.parametrize(("tokens", "size"), [(64, 4), (61, 8), (3, 8), (1000, 7)])
@pytest.mark.parametrize("ring_size", [1, 2, 4])
def test_blocks_lie_where_their_tokens_do(name: str, tokens: int, size: int, ring_size: int) -> None:
    blocks = make_layout(name, tokens=-(-tokens // size), ring_size=ring_size, pattern=Causal())
    layout = of_blocks(blocks, size, tokens)
    assert layout.tokens == tokens
    for one in (size, 1):
        found = in_blocks(layout, one)
        assert found.tokens == -(-tokens // one) and found.local_tokens == -(-layout.local_tokens // one)
        for rank in range(ring_size):
            first = layout.positions(rank)[::one]
            np.testing.assert_array_equal(found.positions(rank), np.where(first < 0, -1, first // one))


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
