"""Layouts of blocks of tokens."""

from __future__ import annotations

import numpy as np
import pytest

from ds_ring import make_layout
from ds_ring.layers.scan.sequence_runs import sequence_runs


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
