"""Cutting tiles by the distance of query and key: what a diagonal, or two, leave of a rectangle.

[Note: square triangles]
What a diagonal leaves of a rectangle is always a union of full rectangles and *square* triangles with the
diagonal inside (j <= i, or mirrored j >= i): rows and columns that see nothing are dropped first, which
also absorbs the strict diagonals of striped layouts. So a kernel needs one causal form, not a family.
A window leaves a band: the rows whose keys are all there are one parallelogram (BAND), however long it is.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ds_ring.masks.slot_ranges import IntArray
from ds_ring.masks.tiles import UNBOUNDED, Kind, Tiles, repeat_rows


def cut_by_distance(tiles: Tiles, least: int, most: int) -> Tiles:
    """Keep the pairs with least <= query position - key position <= most; see [Note: square triangles].

    Rectangles that a bound cuts are first split until both sides have the same position step.
    """
    nearest = tiles.q.position - tiles.k.last_position
    farthest = tiles.q.last_position - tiles.k.position
    whole = (nearest >= least) & (farthest <= most)
    cut = ~whole & (farthest >= least) & (nearest <= most)
    if not cut.any():
        return tiles if whole.all() else tiles.rows(whole)
    return Tiles.concat([tiles.rows(whole), *_cut(_equal_steps(tiles.rows(cut)), least, most)])


def _equal_steps(tiles: Tiles) -> Tiles:
    """Split rows so that both sides have the same position step: their least common multiple."""
    q_step, k_step = tiles.q.position_step, tiles.k.position_step
    if (q_step == k_step).all():
        return tiles
    common = np.lcm(q_step, k_step)
    row, which = repeat_rows((common // q_step) * (common // k_step))
    tiles, q_parts, k_parts = tiles.rows(row), (common // q_step)[row], (common // k_step)[row]
    q_first, k_first = which // k_parts, which % k_parts
    q = tiles.q.take(q_first, np.maximum(-((q_first - tiles.q.length) // q_parts), 0), q_parts)
    k = tiles.k.take(k_first, np.maximum(-((k_first - tiles.k.length) // k_parts), 0), k_parts)
    return tiles.sides(q, k)


def _cut(tiles: Tiles, least: int, most: int) -> list[Tiles]:
    """`cut_by_distance` for rectangles whose sides have a common step."""
    step = tiles.q.position_step
    gap = tiles.q.position - tiles.k.position
    low = -((gap - least) // step)  # ceil((least - gap) / step): i - j >= low
    high = (most - gap) // step  # i - j <= high
    tiles, low, high = _drop_empty(tiles, low, high)
    inner = high >= tiles.q.length - 1  # the upper bound cuts nothing: i - 0 <= high for every i
    outer = low <= -(tiles.k.length - 1)  # the lower bound cuts nothing
    parts = [
        tiles.rows(inner & outer),
        *_cut_causal(tiles.rows(inner & ~outer), low[inner & ~outer]),
        *_cut_anticausal(tiles.rows(~inner & outer), high[~inner & outer]),
    ]
    both = ~inner & ~outer
    if both.any():
        parts += _cut_band(tiles.rows(both), least, most, low[both], high[both])
    return parts


def _drop_empty(tiles: Tiles, low: IntArray, high: IntArray) -> tuple[Tiles, IntArray, IntArray]:
    """Drop tiles, then rows and columns, in which no pair has low <= i - j <= high."""
    q_first = np.maximum(0, low)
    q_end = np.minimum(tiles.q.length, tiles.k.length + high)
    k_first = np.maximum(0, -high)
    k_end = np.minimum(tiles.k.length, tiles.q.length - low)
    keep = (q_end > q_first) & (k_end > k_first) & (low <= high)
    shift = q_first - k_first
    part = replace(tiles, q=tiles.q.take(q_first, q_end - q_first), k=tiles.k.take(k_first, k_end - k_first))
    return part.rows(keep), (low - shift)[keep], (high - shift)[keep]


def _cut_causal(tiles: Tiles, low: IntArray) -> list[Tiles]:
    """j <= i - low with low <= 0 and no empty rows or columns."""
    nq, nk, left = tiles.q.length, tiles.k.length, -low
    side = nk - left
    return [
        tiles.take(0, nq, 0, left),
        tiles.take(0, side, left, side).of_kind(Kind.CAUSAL),
        tiles.take(side, nq - side, left, side),
    ]


def _cut_anticausal(tiles: Tiles, high: IntArray) -> list[Tiles]:
    """j >= i - high with high >= 0 and no empty rows or columns: `_cut_causal` turned by 180 degrees."""
    nq, nk = tiles.q.length, tiles.k.length
    side = nq - high
    return [
        tiles.take(0, nq, side, nk - side),
        tiles.take(nq - side, side, 0, side).of_kind(Kind.ANTICAUSAL),
        tiles.take(0, nq - side, 0, side),
    ]


def _cut_band(tiles: Tiles, least: int, most: int, low: IntArray, high: IntArray) -> list[Tiles]:
    """Both bounds cut: BANDs of the rows whose keys are all there, and what one bound cuts around them."""
    whole_first, whole_end = np.maximum(high, 0), np.minimum(tiles.q.length, tiles.k.length + low)
    is_long = whole_end - whole_first > high - low
    parts = (
        [] if is_long.all() else _cut_strips(tiles.rows(~is_long), least, most, low[~is_long], high[~is_long])
    )
    if is_long.any():
        tiles, low, high = tiles.rows(is_long), low[is_long], high[is_long]
        first, end = whole_first[is_long], whole_end[is_long]
        length, keys = end - first, tiles.k.length
        band = tiles.take(first, length, first - high, length + high - low).of_kind(Kind.BAND)
        before = tiles.take(0, first, 0, np.minimum(first - low, keys))
        after = np.maximum(end - high, 0)
        behind = tiles.take(end, tiles.q.length - end, after, keys - after)
        parts += [band, cut_by_distance(before, least, most), cut_by_distance(behind, least, most)]
    return parts


def _cut_strips(tiles: Tiles, least: int, most: int, low: IntArray, high: IntArray) -> list[Tiles]:
    """Strips of rows as high as the band is wide, where one bound cuts each column block.

    For a strip of `width` rows from row r on, columns below r - low are cut by the upper bound alone,
    and columns from r - low on by the lower bound alone.
    """
    width = high - low + 1
    row, strip = repeat_rows(-(-tiles.q.length // width))
    tiles, low, high, width = tiles.rows(row), low[row], high[row], width[row]
    first = strip * width
    q = tiles.q.take(first, np.minimum(width, tiles.q.length - first))
    split = np.clip(first - low, 0, tiles.k.length)
    begin = np.clip(first - high, 0, tiles.k.length)
    left = tiles.sides(q, tiles.k.take(begin, split - begin))
    right = tiles.sides(q, tiles.k.take(split, np.minimum(width, tiles.k.length - split)))
    return [cut_by_distance(left, -UNBOUNDED, most), cut_by_distance(right, least, UNBOUNDED)]
