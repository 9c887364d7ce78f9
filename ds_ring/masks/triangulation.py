"""Cutting tiles by the distance of query and key: what a diagonal, or two, leave of a rectangle.

[Note: square triangles]
What a diagonal leaves of a rectangle is always a union of full rectangles and *square* triangles with the
diagonal inside (j <= i, or mirrored j >= i): rows and columns that see nothing are dropped first, which
also absorbs the strict diagonals of striped layouts. So a kernel needs one causal form, not a family.
A window leaves a band: one parallelogram (BI_CAUSAL) of any length for the rows whose keys are all there, and
a triangle at each end.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ds_ring.masks.tiles import UNBOUNDED, IntArray, Kind, Tiles, repeat_rows


def cut_by_distance(tiles: Tiles, least: IntArray | int, most: IntArray | int) -> Tiles:
    """Keep the pairs with least <= query position - key position <= most; see [Note: square triangles].

    Rectangles that a bound cuts are first split until both sides have the same position step.

    Args:
        tiles: rectangles.
        least, most: one bound for all, or one for each row.
    """
    least, most = (np.broadcast_to(np.asarray(x, dtype=np.int64), len(tiles)) for x in (least, most))
    nearest = tiles.q.position - tiles.k.last_position
    farthest = tiles.q.last_position - tiles.k.position
    whole = (nearest >= least) & (farthest <= most)
    # what is neither whole nor cut lies outside the bounds and is dropped
    cut = ~whole & (farthest >= least) & (nearest <= most)
    if not cut.any():
        return tiles if whole.all() else tiles.rows(whole)
    return Tiles.concat([tiles.rows(whole), *_cut(tiles.rows(cut), least[cut], most[cut])])


def distances_of_kind(tiles: Tiles) -> tuple[IntArray, IntArray]:
    """Return the least and the most distance of the pairs that each tile shows, by its kind."""
    diagonal = tiles.q.position - tiles.k.position  # of query i and key i, sides having one step
    # j - i of a band goes from 0 to keys - queries
    edge = (tiles.k.length - tiles.q.length) * tiles.k.position_step
    bi_causal = tiles.kind == Kind.BI_CAUSAL
    least = np.where(bi_causal, diagonal - edge, np.where(tiles.kind == Kind.CAUSAL, diagonal, -UNBOUNDED))
    most = np.where(bi_causal | (tiles.kind == Kind.INVERSE_CAUSAL), diagonal, UNBOUNDED)
    return least, most


def _equal_steps(tiles: Tiles) -> tuple[Tiles, IntArray]:
    """Split rows so that both sides have the same position step; also the row that each was split from."""
    q_step, k_step = tiles.q.position_step, tiles.k.position_step
    if (q_step == k_step).all():
        return tiles, np.arange(len(tiles))
    # each side is split into common // step interleaved progressions; all combinations are rows
    common = np.lcm(q_step, k_step)
    row, which = repeat_rows((common // q_step) * (common // k_step))
    tiles, q_parts, k_parts = tiles.rows(row), (common // q_step)[row], (common // k_step)[row]
    q_first, k_first = which // k_parts, which % k_parts
    q = tiles.q.take(q_first, np.maximum(-((q_first - tiles.q.length) // q_parts), 0), q_parts)
    k = tiles.k.take(k_first, np.maximum(-((k_first - tiles.k.length) // k_parts), 0), k_parts)
    exists = (q.length > 0) & (k.length > 0)
    return tiles.sides(q, k), row[exists]


def _cut(tiles: Tiles, least: IntArray, most: IntArray) -> list[Tiles]:
    """Cut rectangles of which every one is cut by a bound."""
    tiles, row = _equal_steps(tiles)
    least, most = least[row], most[row]
    step = tiles.q.position_step
    # the pair (i, j) has distance gap + (i - j) * step
    gap = tiles.q.position - tiles.k.position
    low = -((gap - least) // step)  # ceil((least - gap) / step): i - j >= low
    high = (most - gap) // step  # i - j <= high
    tiles, low, high, least, most = _drop_empty(tiles, low, high, least, most)
    inner = high >= tiles.q.length - 1  # the upper bound cuts nothing: i - 0 <= high for every i
    outer = low <= -(tiles.k.length - 1)  # the lower bound cuts nothing
    parts = [
        tiles.rows(inner & outer),
        *_cut_causal(tiles.rows(inner & ~outer), low[inner & ~outer]),
        *_cut_inverse_causal(tiles.rows(~inner & outer), high[~inner & outer]),
    ]
    both = ~inner & ~outer
    if both.any():
        parts += _cut_bi_causal(tiles.rows(both), least[both], most[both], low[both], high[both])
    return parts


def _drop_empty(
    tiles: Tiles, low: IntArray, high: IntArray, least: IntArray, most: IntArray
) -> tuple[Tiles, IntArray, IntArray, IntArray, IntArray]:
    """Drop tiles, then rows and columns, in which no pair has low <= i - j <= high."""
    # row i sees a key only if low <= i < keys + high; columns likewise
    q_first = np.maximum(0, low)
    q_end = np.minimum(tiles.q.length, tiles.k.length + high)
    k_first = np.maximum(0, -high)
    k_end = np.minimum(tiles.k.length, tiles.q.length - low)
    keep = (q_end > q_first) & (k_end > k_first) & (low <= high)
    # low and high are for i - j counted from the new corner
    shift = q_first - k_first
    part = replace(tiles, q=tiles.q.take(q_first, q_end - q_first), k=tiles.k.take(k_first, k_end - k_first))
    return part.rows(keep), (low - shift)[keep], (high - shift)[keep], least[keep], most[keep]


def _cut_causal(tiles: Tiles, low: IntArray) -> list[Tiles]:
    """Cut by j <= i - low with low <= 0 and no empty rows or columns."""
    nq, nk, left = tiles.q.length, tiles.k.length, -low
    side = nk - left
    # columns that all rows see; the triangle; rows below it
    return [
        tiles.take(0, nq, 0, left),
        tiles.take(0, side, left, side).of_kind(Kind.CAUSAL),
        tiles.take(side, nq - side, left, side),
    ]


def _cut_inverse_causal(tiles: Tiles, high: IntArray) -> list[Tiles]:
    """Cut by j >= i - high with high >= 0 and no empty rows or columns: `_cut_causal` turned around."""
    nq, nk = tiles.q.length, tiles.k.length
    side = nq - high
    # columns that all rows see; the triangle; rows above it
    return [
        tiles.take(0, nq, side, nk - side),
        tiles.take(nq - side, side, 0, side).of_kind(Kind.INVERSE_CAUSAL),
        tiles.take(0, nq - side, 0, side),
    ]


def _cut_bi_causal(
    tiles: Tiles, least: IntArray, most: IntArray, low: IntArray, high: IntArray
) -> list[Tiles]:
    """Cut by both bounds: parallelograms of rows whose keys are all there, and what is around them."""
    # rows i whose keys i - high to i - low are all there
    whole_first, whole_end = np.maximum(high, 0), np.minimum(tiles.q.length, tiles.k.length + low)
    # at least as many such rows as the band has keys in a row; otherwise strips
    is_long = whole_end - whole_first > high - low
    parts = []
    if not is_long.all():
        rest = ~is_long
        parts = _cut_strips(tiles.rows(rest), least[rest], most[rest], low[rest], high[rest])
    if is_long.any():
        tiles, low, high = tiles.rows(is_long), low[is_long], high[is_long]
        first, end = whole_first[is_long], whole_end[is_long]
        least, most = least[is_long], most[is_long]
        length, keys = end - first, tiles.k.length
        band = tiles.take(first, length, first - high, length + high - low).of_kind(Kind.BI_CAUSAL)
        after = np.maximum(end - high, 0)
        # other rows, over the keys that the band leaves them
        before = _sub_rectangles(tiles, 0, first, 0, np.minimum(first - low, keys))
        behind = _sub_rectangles(tiles, end, tiles.q.length - end, after, keys - after)
        parts.append(band)
        parts += [cut_by_distance(part, least[left], most[left]) for part, left in (before, behind)]
    return parts


def _sub_rectangles(
    tiles: Tiles,
    q_first: IntArray | int,
    q_length: IntArray | int,
    k_first: IntArray | int,
    k_length: IntArray | int,
) -> tuple[Tiles, IntArray]:
    """Return `Tiles.take`, and which rows are left."""
    q, k = tiles.q.take(q_first, q_length), tiles.k.take(k_first, k_length)
    return tiles.sides(q, k), (q.length > 0) & (k.length > 0)


def _cut_strips(tiles: Tiles, least: IntArray, most: IntArray, low: IntArray, high: IntArray) -> list[Tiles]:
    """Cut strips of rows as high as the band is wide, where one bound cuts each column block.

    For a strip of `width` rows from row r on, columns below r - low are cut by the upper bound alone,
    and columns from r - low on by the lower bound alone.
    """
    width = high - low + 1
    row, strip = repeat_rows(-(-tiles.q.length // width))
    tiles, low, high, width, least, most = tiles.rows(row), *(x[row] for x in (low, high, width, least, most))
    first = strip * width
    split = np.clip(first - low, 0, tiles.k.length)
    begin = np.clip(first - high, 0, tiles.k.length)
    queries = np.minimum(width, tiles.q.length - first)
    left, in_left = _sub_rectangles(tiles, first, queries, begin, split - begin)
    right, in_right = _sub_rectangles(tiles, first, queries, split, np.minimum(width, tiles.k.length - split))
    return [
        cut_by_distance(left, -UNBOUNDED, most[in_left]),
        cut_by_distance(right, least[in_right], UNBOUNDED),
    ]
