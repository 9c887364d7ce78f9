"""Blocks of B queries x B keys that a block-sparse kernel visits for some tiles. Index arithmetic, no torch.

Blocks of a row come as intervals, so the cost is that of the tiles and their rows, not of the blocks inside.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ds_ring.masks.slots import IntArray, repeat_rows
from ds_ring.masks.tiles import Axis, Tiles

_FAR = 1 << 32  # more than any number of a block


class BlockIntervals(NamedTuple):
    """Hold blocks first <= b < end of a row, each; ascending by row and block, disjoint; int64 [n]."""

    row: IntArray
    first: IntArray
    end: IntArray


def find_block_intervals(
    tiles: Tiles, block: int, by_key: bool = False
) -> tuple[BlockIntervals, BlockIntervals]:
    """Return the blocks to visit for one head's tiles: those with a mask inside, and those without.

    A block has none if one tile attends to all of it. Where several tiles share a block, it counts as one
    with a mask: that costs the mask and is right. `by_key`: rows are key blocks, their entries query blocks.
    """
    ours, theirs = (tiles.k, tiles.q) if by_key else (tiles.q, tiles.k)
    low, high = tiles.band
    low, high = (low, high) if by_key else (-high, -low)  # of the index on the other side - the one on this
    tile, row, first, last = cut_at_blocks(ours, block)
    low, high, length = low[tile], high[tile], theirs.length[tile]
    slot, step = theirs.slot[tile], theirs.slot_step[tile]
    # What any of the piece's tokens sees, and what all of them see: index i sees i + low .. i + high.
    any_first, any_last = np.maximum(first + low, 0), np.minimum(last + high, length - 1)
    all_first, all_last = np.maximum(last + low, 0), np.minimum(first + high, length - 1)
    whole = (ours.slot_step[tile] == 1) & (last - first + 1 == block) & (step == 1)
    whole &= ~tiles.is_masked[tile]
    full_first, full_end = -(-(slot + all_first) // block), (slot + all_last + 1) // block
    whole &= full_first < full_end
    seen, dense = any_first <= any_last, step <= block
    begin, end = (slot + any_first * step) // block, (slot + any_last * step) // block + 1
    # Around the full ones, or all of them.
    before, after = seen & dense & whole, seen & dense
    parts = [
        (row[before], begin[before], full_first[before]),
        (row[after], np.where(whole, full_end, begin)[after], end[after]),
    ]
    # Steps wider than a block: each token is an interval of its own.
    single = np.flatnonzero(seen & ~dense)
    which, place = repeat_rows((any_last - any_first + 1)[single])
    piece = single[which]
    blocks = (slot[piece] + (any_first[piece] + place) * step[piece]) // block
    parts.append((row[piece], blocks, blocks + 1))
    partial = _join_intervals(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
    return partial, _join_intervals(row[whole], full_first[whole], full_end[whole])


def cut_at_blocks(axis: Axis, block: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Cut one side of every tile at block borders: tile, block, index of the first and of the last token."""
    dense = axis.slot_step <= block
    last_slot = axis.slot + (axis.length - 1) * axis.slot_step
    # Steps wider than a block: each token is a piece of its own.
    tile, which = repeat_rows(np.where(dense, last_slot // block - axis.slot // block + 1, axis.length))
    slot, step = axis.slot[tile], axis.slot_step[tile]
    number = np.where(dense[tile], slot // block + which, (slot + which * step) // block)
    # Ceil and floor: indices of the first and the last token inside the block.
    first = np.maximum(-((slot - number * block) // step), 0)
    last = np.minimum(((number + 1) * block - 1 - slot) // step, axis.length[tile] - 1)
    return tile, number, first, last


def _join_intervals(row: IntArray, first: IntArray, end: IntArray) -> BlockIntervals:
    """Join intervals of a row that overlap or touch; empty ones are dropped."""
    is_filled = first < end
    row, first, end = row[is_filled], first[is_filled], end[is_filled]
    order = np.lexsort([first, row])
    row, first = row[order], first[order]
    # The greatest end so far in the same row: `_FAR` separates the intervals of different rows.
    reach = np.maximum.accumulate(end[order] + row * _FAR)
    starts = np.flatnonzero(np.append(True, first[1:] + row[1:] * _FAR > reach[:-1])[: len(row)])
    lasts = np.append(starts[1:], len(row)) - 1 if len(row) else starts
    return BlockIntervals(row[starts], first[starts], reach[lasts] - row[starts] * _FAR)
