"""Cut tiles into calls of PyTorch's operator: small triangles, strips of bands, equal tiles folded.

[Note: square triangles]
A tile keeps its band whole. A kernel that knows only full rectangles and triangles cuts it: what one bound
leaves of a rectangle is a union of full rectangles and square triangles with the diagonal inside (j <= i, or
j >= i). Rows and columns without a pair are dropped first, which also absorbs the strict diagonals of striped
layouts. Two bounds leave a parallelogram (i <= j <= i + keys - queries) of the rows whose keys are all there,
and a triangle at each end.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from ds_ring.kernels.cpu import BIASED, BLOCK, TRIANGLE
from ds_ring.kernels.interface import Rows, Tile, each_tile
from ds_ring.masks.joins import trimmed
from ds_ring.masks.pattern import cache_by_pattern
from ds_ring.masks.slots import IntArray, repeat_rows
from ds_ring.masks.tiles import Tiles

SMALL = 1024  # tiles of up to so many queries are folded with equal ones


@dataclass(frozen=True)
class Sizes:
    """Describe how tiles are cut.

    Attributes:
        block: maximum number of queries of a call; in a backward pass, also the maximum number of keys.
        triangle: side of the smallest triangle; see [Note: small triangles].
        backward: whether the calls are those of a backward pass.
    """

    block: int = BLOCK
    triangle: int = TRIANGLE
    backward: bool = False


@partial(cache_by_pattern, 512)
def calls(tiles: Tiles, sizes: Sizes) -> tuple[Tile, ...]:
    """Return the calls of the operator that compute a table of tiles, cached by the table.

    Calls with many contiguous rows come first, because the first results of a row are assigned, not merged.
    """
    # Drop the positions, which only score functions read, so that equal tiles fold into one call.
    placeless = (tile._replace(q_at=(0, 1), k_at=(0, 1)) for tile in each_tile(triangulate(tiles)))
    pieces = (piece for tile in placeless for piece in _split(tile, sizes))

    def order_scattered_last(call: Tile) -> tuple[bool, int]:
        rows, of_all_heads = call.q_rows, call.head_in_group < 0
        dense = rows.step == 1 and (rows.repeats == 1 or rows.stride == rows.length)
        return not (dense and of_all_heads), -rows.repeats * rows.length

    return tuple(sorted(_fold(pieces, sizes.block), key=order_scattered_last))


class PreparedCall(NamedTuple):
    """A call of the kernel, with what every pass would compute from its tile again.

    log_weight is added to every score. With has_bias some pairs are masked, or their weights differ.
    """

    tile: Tile
    heads: slice
    q_rows: Rows
    k_rows: Rows
    is_causal: bool
    is_masked: bool
    log_weight: float
    has_bias: bool


@partial(cache_by_pattern, 512)
def _prepare_calls(tiles: Tiles, sizes: Sizes, group: int) -> tuple[PreparedCall, ...]:
    """Return the calls for a table of tiles, if `group` query heads share a K/V head."""
    prepared = []
    for tile in calls(tiles, sizes):
        causal = tile.is_causal
        has_bias = tile.inside is not None or (any(tile.edges) and not causal)
        rows = tile.q_rows, tile.k_rows
        prepared.append(
            PreparedCall(tile, tile.heads(group), *rows, causal, tile.is_masked, tile.bias, has_bias)
        )
    return tuple(prepared)


# [Note: small triangles]
# `is_causal` skips work only in steps of 512 keys, so a triangle is halved until its side is at most
# `TRIANGLE`: two triangles and one full square each time. The work on masked pairs is then TRIANGLE / side of
# the work on the triangle. The squares of one size are at a regular distance along the diagonal, and so are
# the smallest triangles: each size is one call on a strided view (`Rows`), up to `BLOCK` rows at a time, so
# that there are neither many small calls nor large workspaces. Other equal small tiles at a regular distance
# are folded in the same way.
def _split(tile: Tile, sizes: Sizes) -> Iterator[Tile]:
    """Yield a tile as calls of the permitted sizes."""
    if tile.is_masked:  # small already, and its mask is its own
        yield tile
    elif not any(tile.edges):
        yield from _split_rectangle(tile, sizes)
    elif all(tile.edges):
        yield from _split_band(tile, sizes)
    else:
        # The smallest triangles along the diagonal, the one that the end clips, and the squares between them.
        side, triangle = tile.q_rows.length, sizes.triangle
        yield from _repeat_piece(tile, (0, 0), (triangle, triangle), triangle, side // triangle, sizes)
        rest = side % triangle
        if rest:
            yield tile.part(side - rest, rest, side - rest, rest)
        yield from _split_triangle(tile, sizes)


def _split_rectangle(tile: Tile, sizes: Sizes) -> Iterator[Tile]:
    """Yield a full tile in pieces. Forward calls may have any number of keys, which need no workspace."""
    # With a bias for each pair a call has at most BIASED on a side, as the bias is cut from a square.
    most = sizes.block if tile.inside is None else min(sizes.block, BIASED)
    bounded = sizes.backward or tile.inside is not None
    k_parts = _split_length(tile.k_rows.length, most if bounded else tile.k_rows.length)
    for (i, queries), (j, keys) in itertools.product(_split_length(tile.q_rows.length, most), k_parts):
        yield tile.part(i, queries, j, keys)


def _split_triangle(tile: Tile, sizes: Sizes) -> Iterator[Tile]:
    """Yield the full squares of a triangle: of every size triangle * 2^n, each second one on the diagonal."""
    total, side, below = tile.q_rows.length, sizes.triangle, tile.is_causal
    while side < total:
        first = (side, 0) if below else (0, side)
        # Squares that fit entirely; the end of the triangle may clip one more.
        whole = total // (2 * side)
        yield from _repeat_piece(tile, first, (side, side), 2 * side, whole, sizes)
        start = (2 * whole + 1) * side
        if start < total:  # the far side is what the end of the triangle clips
            far = min(total - start, side)
            near, end = (start - side, side), (start, far)
            (i, queries), (j, keys) = (end, near) if below else (near, end)
            yield from _split(tile.part(i, queries, j, keys), sizes)
        side *= 2


# [Note: strips of a band]
# A narrow window has only small triangles, so it would need many calls. Instead a band is cut into strips. A
# strip is one rectangle whose bias masks the two corners outside the band. In the forward pass a strip has
# all keys of some queries, so these rows are complete after one call and nothing is merged. In the backward
# pass it has all queries of some keys: dK and dV are complete after one call and only dQ is accumulated, and
# aten is faster on many queries and few keys than on few queries and many keys.
def _split_band(tile: Tile, sizes: Sizes) -> Iterator[Tile]:
    """Yield a band in strips, [Note: strips of a band]; a band too wide for strips: `_split_short_band`."""
    queries, width = tile.q_rows.length, tile.k_rows.length - tile.q_rows.length + 1
    strip = _strip(width, sizes)
    # If strips would exceed a block, cut pieces as long as the band is wide: triangles and rectangles.
    if width + strip > sizes.block:
        for first, length in _split_length(queries, width):
            yield from _split_short_band(tile.part(first, length, first, length + width - 1), sizes)
    elif sizes.backward:
        yield from _split_keys(tile, width, sizes)
    else:
        count, rest = divmod(queries, strip)
        yield from _repeat_piece(tile, (0, 0), (strip, strip + width - 1), strip, count, sizes)
        if rest:
            yield tile.part(queries - rest, rest, queries - rest, rest + width - 1)


def _split_keys(tile: Tile, width: int, sizes: Sizes) -> Iterator[Tile]:
    queries, strip, edge = tile.q_rows.length, _strip(width, sizes), width - 1
    if queries <= edge:
        yield from _split_short_band(tile, sizes)
        return
    # The first and the last `edge` keys are seen by fewer queries than the others: a triangle each.
    if edge:
        first, last = tile.part(0, edge, 0, edge), tile.part(queries - edge, edge, queries, edge)
        yield from _split(first, sizes)
        yield from _split(last, sizes)
    count, rest = divmod(queries - edge, strip)
    apart = -(-(strip + edge) // strip)  # strips whose queries do not overlap
    # dQ of a call is added to one strided view, in which no query may occur twice.
    for turn in range(min(apart, count)):
        first_at = (turn * strip, edge + turn * strip)
        times = (count - turn + apart - 1) // apart
        yield from _repeat_piece(tile, first_at, (strip + edge, strip), apart * strip, times, sizes)
    if rest:
        yield tile.part(queries - edge - rest, rest + edge, queries - rest, rest)


def _strip(width: int, sizes: Sizes) -> int:
    """Return a strip's side: the waste in its corners against the price of narrow calls (measured)."""
    if sizes.backward:
        return 2 * sizes.triangle if width >= 8 * sizes.triangle else sizes.triangle
    return max(sizes.triangle // (2 if width >= 4 * sizes.triangle else 4), 1)


def _split_short_band(tile: Tile, sizes: Sizes) -> Iterator[Tile]:
    """Yield a band not longer than it is wide: a triangle, what all queries see, and a triangle."""
    queries, width = tile.q_rows.length, tile.k_rows.length - tile.q_rows.length + 1
    yield from _split(tile.part(0, queries, 0, queries), sizes)
    if width > queries:
        yield from _split(tile.part(0, queries, queries, width - queries), sizes)
    if queries > 1:
        yield from _split(tile.part(1, queries - 1, width, queries - 1), sizes)


def _repeat_piece(
    tile: Tile, first: tuple[int, int], shape: tuple[int, int], every: int, count: int, sizes: Sizes
) -> Iterator[Tile]:
    """Yield `count` pieces of one shape from `first` on, one `every` so many queries and keys."""
    (i, j), (queries, keys) = first, shape
    pieces = [tile.part(i + n * every, queries, j + n * every, keys) for n in range(count)]
    # One bias serves all repetitions of a call: pieces with different ones are calls of their own.
    if queries > sizes.block or (count > 1 and pieces[0].inside != pieces[1].inside):
        for piece in pieces:
            yield from _split(piece, sizes) if queries > sizes.block else (piece,)
        return
    at_once = max(sizes.block // queries, 1)
    for turn in range(0, count, at_once):
        repeats = min(at_once, count - turn)
        yield pieces[turn].again(repeats, every)


def _split_length(length: int, most: int) -> list[tuple[int, int]]:
    """Return (first, length) of consecutive parts of at most `most`, of nearly equal length."""
    count = -(-length // most)
    bounds = [length * part // count for part in range(count + 1)]
    return [(first, end - first) for first, end in itertools.pairwise(bounds)]


def _fold(pieces: Iterator[Tile], block: int) -> Iterator[Tile]:
    """Yield small equal pieces at a regular distance as one repeated piece; the others as they are."""
    alike: dict[tuple[object, ...], list[Tile]] = defaultdict(list)
    for piece in pieces:
        q, k = piece.q_rows, piece.k_rows
        # Repeated strips, and calls that already fill more than half a block, stay as they are.
        whole = q.repeats > 1 and (all(piece.edges) or 2 * q.repeats * q.length > block)
        if whole or q.length > SMALL or piece.is_masked:
            yield piece
        else:
            key = (q.step, q.length, k.step, k.length, k.start - q.start, *piece[2:])
            alike[key].extend(_split_repeats(piece))
    for group in alike.values():
        yield from _fold_equal(sorted(group, key=lambda piece: piece.q_rows.start), block)


def _split_repeats(piece: Tile) -> Iterator[Tile]:
    """Yield the repetitions of a piece, one by one."""
    q, k = piece.q_rows, piece.k_rows
    for n in range(q.repeats):
        q_rows, k_rows = (r._replace(start=r.start + n * r.stride, repeats=1, stride=0) for r in (q, k))
        yield piece._replace(q_rows=q_rows, k_rows=k_rows)


def _fold_equal(group: list[Tile], block: int) -> Iterator[Tile]:
    """Fold equal pieces, ascending: runs of a constant distance at which neither queries nor keys overlap."""
    first = group[0]
    span = max(rows.step * rows.length for rows in (first.q_rows, first.k_rows))
    most = max(block // first.q_rows.length, 1)
    index = 0
    while index < len(group):
        head, count, stride = group[index], 1, 0
        if index + 1 < len(group):
            stride = group[index + 1].q_rows.start - head.q_rows.start
        while (
            stride >= span
            and count < most
            and index + count < len(group)
            and group[index + count].q_rows.start == head.q_rows.start + count * stride
        ):
            count += 1
        q_rows, k_rows = head.q_rows, head.k_rows
        if count > 1:
            q_rows, k_rows = (rows._replace(repeats=count, stride=stride) for rows in (q_rows, k_rows))
        yield head._replace(q_rows=q_rows, k_rows=k_rows)
        index += count


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
