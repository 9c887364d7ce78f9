"""Cut tiles as kernels compute them: a band as rectangles and triangles, or the blocks that hold its pairs.

[Note: square triangles]
A tile keeps its band whole. A kernel that knows only full rectangles and triangles cuts it: what one bound
leaves of a rectangle is a union of full rectangles and square triangles with the diagonal inside (j <= i, or
j >= i). Rows and columns without a pair are dropped first, which also absorbs the strict diagonals of striped
layouts. Two bounds leave a parallelogram (i <= j <= i + keys - queries) of the rows whose keys are all there,
and a triangle at each end.

A block-sparse kernel visits blocks of B queries x B keys (FlexAttention's unit). Blocks of a row come as
intervals, so the cost is that of the tiles and their rows, not of the blocks inside.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ds_ring.masks.slots import IntArray, repeat_rows
from ds_ring.masks.tiles import Axis, Tiles


def within_distances(tiles: Tiles, least: int, most: int) -> Tiles:
    """Keep the pairs with least <= query position - key position <= most.

    Rectangles that a bound cuts lose the rows and columns that have no pair. Before that they are split until
    both sides have the same position step.
    """
    tiles = replace(tiles, least=np.maximum(tiles.least, least), most=np.minimum(tiles.most, most))
    nearest, farthest = tiles.distances
    whole = (nearest >= tiles.least) & (farthest <= tiles.most)
    # tiles that are neither whole nor cut are outside the bounds and are dropped
    cut = ~whole & (farthest >= tiles.least) & (nearest <= tiles.most)
    if not cut.any():
        return tiles if whole.all() else tiles.rows(whole)
    return Tiles.concat([tiles.rows(whole), trimmed(_equal_steps(tiles.rows(cut)))])


def trimmed(tiles: Tiles) -> Tiles:
    """Drop rows and columns of tiles that have no pair in their band, and tiles without any."""
    low, high = tiles.band
    # row i sees a key only if low <= i < keys + high; columns likewise
    q_first, k_first = np.maximum(0, low), np.maximum(0, -high)
    q_end = np.minimum(tiles.q.length, tiles.k.length + high)
    k_end = np.minimum(tiles.k.length, tiles.q.length - low)
    keep = (q_end > q_first) & (k_end > k_first) & (low <= high)
    if not keep.all():
        tiles = tiles.rows(keep)
        q_first, q_end, k_first, k_end = q_first[keep], q_end[keep], k_first[keep], k_end[keep]
    return tiles.take(q_first, q_end - q_first, k_first, k_end - k_first)


def _equal_steps(tiles: Tiles) -> Tiles:
    """Split rows so that both sides have the same position step."""
    q_step, k_step = tiles.q.position_step, tiles.k.position_step
    if (q_step == k_step).all():
        return tiles
    # each side is split into common // step interleaved progressions; all combinations are rows
    common = np.lcm(q_step, k_step)
    row, which = repeat_rows((common // q_step) * (common // k_step))
    tiles, q_parts, k_parts = tiles.rows(row), (common // q_step)[row], (common // k_step)[row]
    q_first, k_first = which // k_parts, which % k_parts
    q = tiles.q.take(q_first, np.maximum(-((q_first - tiles.q.length) // q_parts), 0), q_parts)
    k = tiles.k.take(k_first, np.maximum(-((k_first - tiles.k.length) // k_parts), 0), k_parts)
    return tiles.sides(q, k)


def triangulated(tiles: Tiles) -> Tiles:
    """Return the pairs of `trimmed` tiles as full rectangles, square triangles and parallelograms.

    See [Note: square triangles]. Their values of `Tiles.edges` are 0, 1 and 2.
    """
    low, high = tiles.band
    lower, upper = low > 1 - tiles.k.length, high < tiles.q.length - 1
    is_cut = lower | upper
    if not is_cut.any():
        return tiles
    parts = [tiles.rows(~is_cut)]
    # j <= i - low with low <= 0: columns that all rows see, the triangle, the rows below it
    if (rest := lower & ~upper).any():
        cut = tiles.rows(rest)
        rows, left = cut.q.length, -low[rest]
        side = cut.k.length - left
        parts += [
            cut.take(0, rows, 0, left),
            cut.take(0, side, left, side),
            cut.take(side, rows - side, left, side),
        ]
    # j >= i - high with high >= 0: columns that all rows see, the triangle, the rows above it
    if (rest := ~lower & upper).any():
        cut = tiles.rows(rest)
        rows, side = cut.q.length, cut.q.length - high[rest]
        parts += [
            cut.take(0, rows, side, cut.k.length - side),
            cut.take(rows - side, side, 0, side),
            cut.take(0, rows - side, 0, side),
        ]
    if (lower & upper).any():
        parts += _both_bounds(tiles.rows(lower & upper))
    return Tiles.concat(parts)


def _both_bounds(tiles: Tiles) -> list[Tiles]:
    """Split tiles that both bounds cut: parallelograms, of rows with all keys of the band, and the rest."""
    low, high = tiles.band
    # rows i that have all keys i - high to i - low
    first, end = np.maximum(high, 0), np.minimum(tiles.q.length, tiles.k.length + low)
    # at least as many such rows as the band has keys in a row; otherwise strips
    is_long = end - first > high - low
    parts = [] if is_long.all() else _strips(tiles.rows(~is_long))
    if is_long.any():
        tiles, low, high = tiles.rows(is_long), low[is_long], high[is_long]
        first, end, keys = first[is_long], end[is_long], tiles.k.length
        after = np.maximum(end - high, 0)
        parts += [
            tiles.take(first, end - first, first - high, end - first + high - low),
            # other rows, over the keys that the parallelogram leaves them
            triangulated(trimmed(tiles.take(0, first, 0, np.minimum(first - low, keys)))),
            triangulated(trimmed(tiles.take(end, tiles.q.length - end, after, keys - after))),
        ]
    return parts


def _strips(tiles: Tiles) -> list[Tiles]:
    """Cut strips of rows as high as the band is wide, where one bound cuts each block of columns.

    For a strip of `width` rows from row r on, columns below r - low are cut by the upper bound alone,
    and columns from r - low on by the lower bound alone.
    """
    low, high = tiles.band
    row, strip = repeat_rows(-(-tiles.q.length // (high - low + 1)))
    tiles, low, high = tiles.rows(row), low[row], high[row]
    width: IntArray = high - low + 1
    first = strip * width
    split = np.clip(first - low, 0, tiles.k.length)
    begin = np.clip(first - high, 0, tiles.k.length)
    queries = np.minimum(width, tiles.q.length - first)
    left = tiles.take(first, queries, begin, split - begin)
    right = tiles.take(first, queries, split, np.minimum(width, tiles.k.length - split))
    return [triangulated(trimmed(left)), triangulated(trimmed(right))]


_FAR = 1 << 32  # more than any number of a block


class BlockIntervals(NamedTuple):
    """Hold blocks first <= b < end of a row, each; ascending by row and block, disjoint; int64 [n]."""

    row: IntArray
    first: IntArray
    end: IntArray


def block_intervals(tiles: Tiles, block: int, by_key: bool = False) -> tuple[BlockIntervals, BlockIntervals]:
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
    partial = _union(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
    return partial, _union(row[whole], full_first[whole], full_end[whole])


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


def _union(row: IntArray, first: IntArray, end: IntArray) -> BlockIntervals:
    """Join intervals of a row that overlap or touch; empty ones are dropped."""
    kept = first < end
    row, first, end = row[kept], first[kept], end[kept]
    order = np.lexsort([first, row])
    row, first = row[order], first[order]
    # The greatest end so far in the same row: `_FAR` separates the intervals of different rows.
    reach = np.maximum.accumulate(end[order] + row * _FAR)
    starts = np.flatnonzero(np.append(True, first[1:] + row[1:] * _FAR > reach[:-1])[: len(row)])
    lasts = np.append(starts[1:], len(row)) - 1 if len(row) else starts
    return BlockIntervals(row[starts], first[starts], reach[lasts] - row[starts] * _FAR)
