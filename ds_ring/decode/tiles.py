"""The tiles of replicated queries: every rank has all queries, and keys stay where they are.

So there are no hops and no payloads: one table of tiles for each class of heads is all.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np

from ds_ring.errors import RingShapeError
from ds_ring.masks.catalog import Full
from ds_ring.masks.pattern import Pattern, cache_by_pattern
from ds_ring.masks.slots import IntArray
from ds_ring.masks.tiles import Tiles
from ds_ring.schedule.layout import Layout
from ds_ring.schedule.lowering import get_query_heads
from ds_ring.schedule.plan import find_head_classes


class HeadTiles(NamedTuple):
    """The tiles of the query heads with equal patterns."""

    heads: slice
    kv_heads: slice  # that these share
    tiles: Tiles  # query slots count the queries, key slots are those of the rank's shard


def query_positions(pattern: Pattern, layout: Layout, queries: int, positions: IntArray | None) -> IntArray:
    """Return global positions of replicated queries, int64 [queries]; RingShapeError for wrong ones.

    If none are given, they are the last positions of the layout, the convention of decoding. Where all attend
    to all (`Full`) positions have no meaning and there may be any number.
    """
    if positions is None:
        if isinstance(pattern, Full):
            return np.arange(queries, dtype=np.int64)
        if queries > layout.tokens:
            raise RingShapeError.wrong(
                "q", f"at most {layout.tokens} queries (positions)", queries, "pass positions, or Full()"
            )
        return np.arange(layout.tokens - queries, layout.tokens, dtype=np.int64)
    if positions.ndim != 1 or not np.issubdtype(positions.dtype, np.integer):
        raise RingShapeError(
            f"positions: expected integers [Q], got {positions.dtype} {list(positions.shape)}"
        )
    if len(positions) != queries:
        raise RingShapeError(f"positions: expected {queries} positions, as queries, got {len(positions)}")
    outside = positions[(positions < 0) | (positions >= layout.tokens)]
    if len(outside):
        raise RingShapeError(f"positions: expected 0 to {layout.tokens - 1}, got {int(outside[0])}")
    return positions.astype(np.int64)


def query_runs(positions: IntArray) -> IntArray:
    """Write any list of positions as runs (start, step, length), in its own order; int64 [n, 3].

    A progression stays one run where it is longer than its step is wide: a diagonal splits the two sides of
    a tile to their common step, and a few positions far apart are cheaper one by one.
    """
    steps = np.diff(positions)
    # indices in `steps` at which each stretch of equal steps ends
    turns = np.append(np.flatnonzero(np.diff(steps)) + 1, len(steps))
    runs, first = [], 0
    while first < len(positions):
        step, length = 1, 1
        if first < len(steps):
            step = int(steps[first])
            length = int(turns[np.searchsorted(turns, first, side="right")]) - first + 1
        # runs ascend, so positions that repeat or fall are single ones
        if step < 1 or length <= step:
            step, length = 1, 1
        runs.append((int(positions[first]), step, length))
        first += length
    return np.array(runs, dtype=np.int64).reshape(len(runs), 3)


@partial(cache_by_pattern, 64)
def replicated_tiles(
    pattern: Pattern, layout: Layout, ring_rank: int, positions: bytes, query_heads: int, kv_heads: int
) -> tuple[HeadTiles, ...]:
    """Return what a rank computes: all queries against its own shard.

    The queries' int64 positions are given as bytes: layers that ask alike get the same tables.
    """
    runs = query_runs(np.frombuffer(positions, dtype=np.int64))
    keys, group = layout.runs(ring_rank), query_heads // kv_heads
    return tuple(
        HeadTiles(get_query_heads(heads, group), heads, bound.tiles(runs, keys))
        for heads, bound in find_head_classes(pattern, query_heads, kv_heads)
    )
