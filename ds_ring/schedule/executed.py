"""Count the pairs that a kernel which computes in blocks executes on each rank of a layout.

[Note: sampled rows]
A rank's work is the sum over its rows of blocks, and rows of a long shard are alike over and over: of more
than `ROWS` rows of blocks so many are looked at, at regular distances, and stand for all. Of more than eight
ranks the first, the last and one between do. Shards of up to ROWS blocks on up to eight ranks are counted to
the block, as `FlexKernel.executed_pairs` does.
"""

from __future__ import annotations

import numpy as np

from ds_ring.masks.blocks import block_intervals, cut_at_blocks
from ds_ring.masks.partitions import Residue
from ds_ring.masks.pattern import BoundPattern, Head, Pattern
from ds_ring.masks.tiles import Axis
from ds_ring.schedule.head_class import HeadClass, ReadsOfShards
from ds_ring.schedule.layout import IntArray, Layout
from ds_ring.schedule.payload import tiles_of_payload
from ds_ring.schedule.plan import one_way, sampled_origins

ROWS = 32
FEW_RANKS = 8


def is_dilated(pattern: Pattern) -> bool:
    """Return whether a dilation is among what a pattern is made of."""
    primitives = (one for branch in pattern.branches(Head()) for one in branch.queries.primitives)
    return any(isinstance(one, Residue) for one in primitives)


def executed_of_fullest(pattern: BoundPattern, layout: Layout, block: int) -> int:
    """Return the pairs of one query head that the fullest rank executes, in blocks of block x block slots.

    Args:
        pattern: of one head.
        layout: which token lies where.
        block: side of a block, slots.
    """
    size = layout.ring_size
    head_class = HeadClass(ReadsOfShards(pattern, layout), slice(0, 1), one_way(size))
    sampled = sampled_origins(size)
    ranks = range(size) if size <= FEW_RANKS else (sampled[0], sampled[len(sampled) // 2], sampled[-1])
    return max(_executed(head_class, rank, block) for rank in ranks)


def _executed(head_class: HeadClass, rank: int, block: int) -> int:
    layout, (way,) = head_class.layout, head_class.directions
    runs, share = _sampled_rows(layout.runs(rank), block)
    total = 0
    for hop in range(layout.ring_size) if len(runs) else ():
        origin = way.origin(rank, hop, layout.ring_size)
        held = head_class.held(origin, way, hop)
        if not len(held):
            continue
        tiles = head_class.pattern.tiles(runs, layout.runs(origin))
        if len(tiles):
            placed = tiles_of_payload(tiles, held) if hop else tiles
            total += sum(int((part.end - part.first).sum()) for part in block_intervals(placed, block))
    return round(total * block**2 / share)


def _sampled_rows(runs: IntArray, block: int) -> tuple[IntArray, float]:
    """Return the runs of some rows of blocks, and which part of all rows they are; [Note: sampled rows]."""
    rows = -(-int(runs[:, 2].sum()) // block)
    if rows <= ROWS:
        return runs, 1.0
    chosen = np.unique(np.linspace(0, rows - 1, ROWS).astype(np.int64))
    run, row, first, last = cut_at_blocks(Axis.from_runs(runs), block)
    kept = np.isin(row, chosen)
    run, first, last = run[kept], first[kept], last[kept]
    start, step = runs[run, 0], runs[run, 1]
    return np.stack([start + first * step, step, last - first + 1], axis=1), len(chosen) / rows
