"""The work of a layout in blocks of B x B slots, by which "auto" chooses for this kernel.

[Note: sampled rows]
A rank's work in blocks is the sum over its rows of blocks, and most rows of a long shard have equal work.
So only `ROWS` rows at regular distances are counted, and of more than eight ranks only the first, the last
and one in the middle. Smaller cases are counted to the block, as `FlexKernel.count_executed_pairs` does.
"""

from __future__ import annotations

import itertools

import numpy as np

from ds_ring.kernels.flex.blocks import cut_at_blocks, find_block_intervals
from ds_ring.masks.pattern import BoundPattern
from ds_ring.masks.slots import IntArray
from ds_ring.masks.tiles import Axis
from ds_ring.plugin import LAYOUTS, load
from ds_ring.schedule.choose import Candidate, count_rank_work
from ds_ring.schedule.directions import sample_origins
from ds_ring.schedule.head_class import HeadClass, ReadsOfShards, map_tiles_to_payload
from ds_ring.schedule.layout import Layout
from ds_ring.schedule.rank_plan import make_one_way

ROWS = 32
FEW_RANKS = 8


def rate_in_blocks(
    options: list[Candidate], mix: tuple[tuple[BoundPattern, int], ...], block: int
) -> list[Candidate] | None:
    """Return the options, and layouts made for blocks, with the imbalance of the work in whole blocks.

    None: blocks add about the same work to each option.
    """
    first = options[0].layout
    tokens, ring_size, multiple_of = first.tokens, first.ring_size, first.multiple_of
    makers = [load(row.for_blocks) for row in LAYOUTS.values() if row.for_blocks]
    added = [layouts for make in makers if (layouts := make(tokens, ring_size, multiple_of, mix)) is not None]
    # Where no layout is made for blocks, the runs of all are long.
    if not added and ring_size > FEW_RANKS:
        return None
    mean = sum(layers * count_rank_work(pattern, first).mean() for pattern, layers in mix) or 1.0
    rated = []
    for layout in [*(option.layout for option in options), *itertools.chain(*added)]:
        executed = sum(layers * count_fullest_pairs(pattern, layout, block) for pattern, layers in mix)
        rated.append(Candidate(layout, executed / mean))
    return rated


def count_fullest_pairs(pattern: BoundPattern, layout: Layout, block: int) -> int:
    """Return the pairs of one query head that the fullest rank executes, in blocks of block x block slots."""
    size = layout.ring_size
    head_class = HeadClass(ReadsOfShards(pattern, layout), slice(0, 1), make_one_way(size))
    sampled = sample_origins(size)
    ranks = range(size) if size <= FEW_RANKS else (sampled[0], sampled[len(sampled) // 2], sampled[-1])
    return max(_count_executed(head_class, rank, block) for rank in ranks)


def _count_executed(head_class: HeadClass, rank: int, block: int) -> int:
    layout, (way,) = head_class.reads.layout, head_class.directions
    runs, share = _sample_rows(layout.runs(rank), block)
    total = 0
    for hop in range(layout.ring_size) if len(runs) else ():
        origin = way.origin(rank, hop, layout.ring_size)
        held = head_class.held(origin, way, hop)
        if not len(held):
            continue
        tiles = head_class.pattern.tiles(runs, layout.runs(origin))
        if len(tiles):
            placed = map_tiles_to_payload(tiles, held) if hop else tiles
            total += sum(int((part.end - part.first).sum()) for part in find_block_intervals(placed, block))
    return round(total * block**2 / share)


def _sample_rows(runs: IntArray, block: int) -> tuple[IntArray, float]:
    """Return the runs of some rows of blocks, and which part of all rows they are; [Note: sampled rows]."""
    rows = -(-int(runs[:, 2].sum()) // block)
    if rows <= ROWS:
        return runs, 1.0
    chosen = np.unique(np.linspace(0, rows - 1, ROWS).astype(np.int64))
    run, row, first, last = cut_at_blocks(Axis.from_runs(runs), block)
    is_chosen = np.isin(row, chosen)
    run, first, last = run[is_chosen], first[is_chosen], last[is_chosen]
    start, step = runs[run, 0], runs[run, 1]
    return np.stack([start + first * step, step, last - first + 1], axis=1), len(chosen) / rows
