"""Tiles painted pair by pair: what every table of tiles is held against. Shared by the tests of this folder."""

from __future__ import annotations

import numpy as np

from ds_ring.schedule.tiles import Kind, Tiles


def paint(tiles: Tiles, queries: int, keys: int, member: int = 0) -> np.ndarray:
    """How often each (query slot, key slot) is attended by one member: multiplicities added up."""
    return _paint(tiles, queries, keys, member, tiles.multiplicity)


def coverage(tiles: Tiles, queries: int, keys: int, member: int = 0) -> np.ndarray:
    """In how many tiles of one member each (query slot, key slot) is computed."""
    return _paint(tiles, queries, keys, member, np.ones_like(tiles.multiplicity))


def _paint(tiles: Tiles, queries: int, keys: int, member: int, weight: np.ndarray) -> np.ndarray:
    canvas = np.zeros((queries, keys), dtype=int)
    assert (tiles.q.length > 0).all() and (tiles.k.length > 0).all(), "an empty tile"
    for row in np.flatnonzero((tiles.member < 0) | (tiles.member == member)):
        q, k = (a.slot[row] + a.slot_step[row] * np.arange(a.length[row]) for a in (tiles.q, tiles.k))
        i, j = np.arange(len(q))[:, None], np.arange(len(k))[None, :]
        rules = {Kind.FULL: i >= i - j * 0, Kind.CAUSAL: j <= i, Kind.ANTICAUSAL: j >= i}
        inside = np.broadcast_to(rules[Kind(tiles.kind[row])], (len(q), len(k)))
        assert tiles.kind[row] == Kind.FULL or len(q) == len(k), "a triangle is square"
        assert inside.sum() == tiles.pairs[row]
        canvas[np.ix_(q, k)] += inside * weight[row]
    return canvas


def positions_agree(tiles: Tiles, q_positions: np.ndarray, k_positions: np.ndarray) -> bool:
    """True if every tile's positions are those of its slots."""
    for row in range(len(tiles)):
        for axis, positions in ((tiles.q, q_positions), (tiles.k, k_positions)):
            index = np.arange(axis.length[row])
            slots = axis.slot[row] + axis.slot_step[row] * index
            if (positions[slots] != axis.position[row] + axis.position_step[row] * index).any():
                return False
    return True
