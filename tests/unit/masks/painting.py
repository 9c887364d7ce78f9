"""Tiles painted pair by pair: what every table of tiles is held against. Shared by this folder's tests."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from hypothesis import strategies as st

from ds_ring.masks.tiles import Tiles

runs = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=4)
Weight = Callable[[Tiles, int, np.ndarray, np.ndarray], np.ndarray]


def paint(tiles: Tiles, queries: int, keys: int, head_in_group: int = 0) -> np.ndarray:
    """How often each (query slot, key slot) is attended by one head in a group: multiplicities added up."""
    return _paint(tiles, queries, keys, head_in_group, _multiplicity)


def coverage(tiles: Tiles, queries: int, keys: int, head_in_group: int = 0) -> np.ndarray:
    """In how many tiles of one head each (query slot, key slot) is computed."""
    return _paint(tiles, queries, keys, head_in_group, lambda tiles, row, i, j: np.ones(1, dtype=int))


def _paint(tiles: Tiles, queries: int, keys: int, head_in_group: int, weight: Weight) -> np.ndarray:
    canvas = np.zeros((queries, keys), dtype=int)
    assert (tiles.q.length > 0).all() and (tiles.k.length > 0).all(), "an empty tile"
    (lows, highs), pairs = tiles.band, tiles.pairs
    for row in np.flatnonzero((tiles.head_in_group < 0) | (tiles.head_in_group == head_in_group)):
        q, k = (a.slot[row] + a.slot_step[row] * np.arange(a.length[row]) for a in (tiles.q, tiles.k))
        i, j = np.arange(len(q))[:, None], np.arange(len(k))[None, :]
        if tiles.is_masked[row]:
            inside = np.broadcast_to(_visible(tiles, row, i, j), (len(q), len(k)))
        else:
            q_positions, k_positions = _positions(tiles, row, i, j)
            gap = q_positions - k_positions
            inside = (gap >= tiles.least[row]) & (gap <= tiles.most[row])
            slots = i - j
            assert (inside == ((slots >= lows[row]) & (slots <= highs[row]))).all(), (row, inside)
            assert inside.any(0).all() and inside.any(1).all(), "a row or column without a pair"
            assert inside.sum() == pairs[row]
        canvas[np.ix_(q, k)] += inside * weight(tiles, row, i, j)
    return canvas


def _multiplicity(tiles: Tiles, row: int, i: np.ndarray, j: np.ndarray) -> np.ndarray:
    """m of the pairs i, j of a tile."""
    index, m = tiles.weight[row], tiles.multiplicity[row]
    return m if index < 0 else m * tiles.weights[index](*_positions(tiles, row, i, j))


def _visible(tiles: Tiles, row: int, i: np.ndarray, j: np.ndarray) -> np.ndarray:
    """What a tile's mask function shows of its pairs i, j."""
    q, k = (torch.from_numpy(x.reshape(-1)) for x in _positions(tiles, row, i, j))
    return tiles.masks[tiles.mask[row]](1, q, k).numpy()


def _positions(tiles: Tiles, row: int, i: np.ndarray, j: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    q, k = tiles.q, tiles.k
    return q.position[row] + q.position_step[row] * i, k.position[row] + k.position_step[row] * j


def positions_agree(tiles: Tiles, q_positions: np.ndarray, k_positions: np.ndarray) -> bool:
    """True if every tile's positions are those of its slots."""
    for row in range(len(tiles)):
        for axis, positions in ((tiles.q, q_positions), (tiles.k, k_positions)):
            index = np.arange(axis.length[row])
            slots = axis.slot[row] + axis.slot_step[row] * index
            if (positions[slots] != axis.position[row] + axis.position_step[row] * index).any():
                return False
    return True


def in_order(gaps: list[tuple[int, int, int]]) -> np.ndarray:
    """Runs (gap before it, step, length) one after the other, so that no position is in two of them."""
    rows, position = [], 0
    for gap, step, length in gaps:
        rows.append((position + gap, step, length))
        position += gap + (length - 1) * step + 1
    return np.array(rows)
