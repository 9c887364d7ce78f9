"""Tiles -> blocks of the attention matrix, by interval arithmetic: what a block-sparse kernel must visit.

Owns the rounding of tiles to blocks of B queries x B keys (FlexAttention's unit); knows no tensor. The
cost is that of the non-empty blocks, never of all (T / B)^2.
"""

from __future__ import annotations

import numpy as np

from ds_ring.masks.slot_ranges import IntArray
from ds_ring.masks.tiles import Kind, Tiles, repeat_rows


def blocks_of_tiles(tiles: Tiles, block: int) -> IntArray:
    """Return the non-empty blocks of a table of tiles, each once.

    Args:
        tiles: of one hop and one query head.
        block: side of a block in slots, B.

    Returns:
        int64 [n, 2] of (query block, key block), ascending.
    """
    pieces = _query_pieces(tiles, block)
    row, q_block, k_first, k_last = pieces
    k = tiles.k
    low = k.slot[row] + k_first * k.slot_step[row]
    high = k.slot[row] + k_last * k.slot_step[row]
    dense = k.slot_step[row] <= block  # no block between the first and the last is skipped
    count = np.where(dense, high // block - low // block + 1, k_last - k_first + 1)
    again, which = repeat_rows(count)
    skipped = (low[again] + which * k.slot_step[row][again]) // block
    k_block = np.where(dense[again], low[again] // block + which, skipped)
    return np.unique(np.stack([q_block[again], k_block], axis=1), axis=0)


def _query_pieces(tiles: Tiles, block: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Cut every tile along its queries at block borders: tile, query block, first and last key index seen."""
    q = tiles.q
    last_slot = q.slot + (q.length - 1) * q.slot_step
    dense = q.slot_step <= block
    # steps wider than a block: each query is a piece of its own
    count = np.where(dense, last_slot // block - q.slot // block + 1, q.length)
    row, which = repeat_rows(count)
    q_block = np.where(
        dense[row], q.slot[row] // block + which, (q.slot[row] + which * q.slot_step[row]) // block
    )
    # ceil and floor: indices of the tile's first and last query inside the block
    first = np.maximum(-((q.slot[row] - q_block * block) // q.slot_step[row]), 0)
    last = np.minimum(((q_block + 1) * block - 1 - q.slot[row]) // q.slot_step[row], q.length[row] - 1)
    # keys that a piece's queries see together: up to its last query (j <= i), from its first on (j >= i)
    k_last = np.where(tiles.kind[row] == Kind.CAUSAL, last, tiles.k.length[row] - 1)
    is_band = tiles.kind[row] == Kind.BI_CAUSAL
    k_last = np.where(is_band, last + (tiles.k.length - q.length)[row], k_last)
    k_first = np.where(is_band | (tiles.kind[row] == Kind.INVERSE_CAUSAL), first, 0)
    return row, q_block, k_first, k_last
