"""Cut tiles as aten's CPU operators compute them: a band as full rectangles and triangles.

[Note: square triangles]
A tile keeps its band whole. A kernel that knows only full rectangles and triangles cuts it: what one bound
leaves of a rectangle is a union of full rectangles and square triangles with the diagonal inside (j <= i, or
j >= i). Rows and columns without a pair are dropped first, which also absorbs the strict diagonals of striped
layouts. Two bounds leave a parallelogram (i <= j <= i + keys - queries) of the rows whose keys are all there,
and a triangle at each end.
"""

from __future__ import annotations

import numpy as np

from ds_ring.masks.joins import trimmed
from ds_ring.masks.slots import IntArray, repeat_rows
from ds_ring.masks.tiles import Tiles


def triangulate(tiles: Tiles) -> Tiles:
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
        parts += _split_parallelograms(tiles.rows(lower & upper))
    return Tiles.concat(parts)


def _split_parallelograms(tiles: Tiles) -> list[Tiles]:
    """Split tiles that both bounds cut: parallelograms, of rows with all keys of the band, and the rest."""
    low, high = tiles.band
    # rows i that have all keys i - high to i - low
    first, end = np.maximum(high, 0), np.minimum(tiles.q.length, tiles.k.length + low)
    # at least as many such rows as the band has keys in a row; otherwise strips
    is_long = end - first > high - low
    parts = [] if is_long.all() else _split_strips(tiles.rows(~is_long))
    if is_long.any():
        tiles, low, high = tiles.rows(is_long), low[is_long], high[is_long]
        first, end, keys = first[is_long], end[is_long], tiles.k.length
        after = np.maximum(end - high, 0)
        parts += [
            tiles.take(first, end - first, first - high, end - first + high - low),
            # other rows, over the keys that the parallelogram leaves them
            triangulate(trimmed(tiles.take(0, first, 0, np.minimum(first - low, keys)))),
            triangulate(trimmed(tiles.take(end, tiles.q.length - end, after, keys - after))),
        ]
    return parts


def _split_strips(tiles: Tiles) -> list[Tiles]:
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
    return [triangulate(trimmed(left)), triangulate(trimmed(right))]
