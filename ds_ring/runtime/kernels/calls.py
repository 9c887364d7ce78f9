"""Turn tiles into calls of a kernel that takes rectangles and small triangles. Index arithmetic only."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from ds_ring.masks.tiles import Kind, Tiles
from ds_ring.runtime.kernels.interface import Tile, each_tile
from ds_ring.schedule.workspace import BIASED, BLOCK, TRIANGLE

SMALL = 1024  # tiles of up to so many queries are folded with equal ones


@dataclass(frozen=True)
class Sizes:
    """Describe how tiles are cut.

    Attributes:
        block: most queries of one call, and most keys of one that returns dK and dV.
        triangle: side of the smallest triangle; [Note: small triangles].
        backward: calls that return gradients: keys are bounded and bands cut along the keys.
    """

    block: int = BLOCK
    triangle: int = TRIANGLE
    backward: bool = False


@lru_cache(maxsize=512)
def calls(tiles: Tiles, sizes: Sizes) -> tuple[Tile, ...]:
    """Return all calls for a table of tiles (the same object gives the same answer at once).

    Those with many rows side by side come first: they are assigned, and later ones find their rows written.
    """
    # Without positions, which only scores ask for: equal tiles at other places fold into one call.
    placeless = (tile._replace(q_at=(0, 1), k_at=(0, 1)) for tile in each_tile(tiles))
    pieces = (piece for tile in placeless for piece in _split(tile, sizes))
    return tuple(sorted(_fold(pieces, sizes.block), key=_scattered_last))


def _scattered_last(call: Tile) -> tuple[bool, int]:
    rows = call.q_rows
    scattered = rows.step > 1 or (rows.repeats > 1 and rows.stride != rows.length) or call.head_in_group >= 0
    return scattered, -rows.repeats * rows.length


# [Note: small triangles]
# `is_causal` skips work only in steps of 512 keys, so a triangle is halved until its side is at most
# `TRIANGLE`: two triangles and one full square each time. What is computed beyond the triangle is then
# TRIANGLE / side of it. The squares of one size lie at a regular distance along the diagonal, and so do the
# smallest triangles: each size is one call on a strided view (`Rows`), up to `BLOCK` rows at a time, so that
# neither small calls nor large workspaces cost. Equal small tiles at a regular distance are folded alike.
def _split(tile: Tile, sizes: Sizes) -> Iterator[Tile]:
    """Yield a tile as calls of the permitted sizes."""
    if tile.kind == Kind.PARTIAL:  # small already, and its mask is its own
        yield tile
    elif tile.kind == Kind.FULL:
        yield from _rectangles(tile, sizes)
    elif tile.kind == Kind.BI_CAUSAL:
        yield from _band(tile, sizes)
    else:
        # The smallest triangles along the diagonal, the one that the end clips, and the squares between them.
        side, triangle = tile.q_rows.length, sizes.triangle
        yield from _repeated(tile, (0, 0), (triangle, triangle), triangle, side // triangle, sizes)
        rest = side % triangle
        if rest:
            yield tile.part(side - rest, rest, side - rest, rest)
        yield from _squares(tile._replace(kind=Kind.FULL), tile.kind == Kind.CAUSAL, sizes)


def _rectangles(tile: Tile, sizes: Sizes) -> Iterator[Tile]:
    """Yield a full tile in pieces; forward, keys need no workspace and their number no bound."""
    # With a bias for each pair a call has at most BIASED on a side, as the bias is cut from a square.
    most = sizes.block if tile.inside is None else min(sizes.block, BIASED)
    bounded = sizes.backward or tile.inside is not None
    k_parts = _parts(tile.k_rows.length, most if bounded else tile.k_rows.length)
    for (i, queries), (j, keys) in itertools.product(_parts(tile.q_rows.length, most), k_parts):
        yield tile.part(i, queries, j, keys)


def _squares(tile: Tile, below: bool, sizes: Sizes) -> Iterator[Tile]:
    """Yield the full squares of a triangle: of every size triangle * 2^n, each second one on the diagonal."""
    total, side = tile.q_rows.length, sizes.triangle
    while side < total:
        first = (side, 0) if below else (0, side)
        # Squares that fit entirely; the end of the triangle may clip one more.
        whole = total // (2 * side)
        yield from _repeated(tile, first, (side, side), 2 * side, whole, sizes)
        start = (2 * whole + 1) * side
        if start < total:  # the far side is what the end of the triangle clips
            far = min(total - start, side)
            near, end = (start - side, side), (start, far)
            (i, queries), (j, keys) = (end, near) if below else (near, end)
            yield from _split(tile.part(i, queries, j, keys), sizes)
        side *= 2


# [Note: strips of a band]
# A window's triangles would be small ones only. Instead a band is cut into strips, each one masked rectangle
# with a corner too many at both ends. Forward strips are of queries: a row is complete at once and nothing is
# merged. Backward strips are of keys: aten is faster on many queries and few keys than the other way round,
# dK and dV are complete at once, and only dQ is added up.
def _band(tile: Tile, sizes: Sizes) -> Iterator[Tile]:
    """Cut a band, [Note: strips of a band]; wider than a block, or than it is long, as `_short_band` does."""
    queries, width = tile.q_rows.length, tile.k_rows.length - tile.q_rows.length + 1
    strip = _strip(width, sizes)
    # Strips would exceed a block: pieces as long as the band is wide are triangles and rectangles.
    if width + strip > sizes.block:
        for first, length in _parts(queries, width):
            yield from _short_band(tile.part(first, length, first, length + width - 1), sizes)
    elif sizes.backward:
        yield from _strips_of_keys(tile, width, sizes)
    else:
        count, rest = divmod(queries, strip)
        yield from _repeated(tile, (0, 0), (strip, strip + width - 1), strip, count, sizes)
        if rest:
            yield tile.part(queries - rest, rest, queries - rest, rest + width - 1)


def _strips_of_keys(tile: Tile, width: int, sizes: Sizes) -> Iterator[Tile]:
    queries, strip, edge = tile.q_rows.length, _strip(width, sizes), width - 1
    if queries <= edge:
        yield from _short_band(tile, sizes)
        return
    # The first and the last `edge` keys are seen by fewer queries than the others: a triangle each.
    if edge:
        first, last = tile.part(0, edge, 0, edge), tile.part(queries - edge, edge, queries, edge)
        yield from _split(first._replace(kind=Kind.INVERSE_CAUSAL), sizes)
        yield from _split(last._replace(kind=Kind.CAUSAL), sizes)
    count, rest = divmod(queries - edge, strip)
    apart = -(-(strip + edge) // strip)  # strips whose queries do not overlap
    # dQ of a call is added to one strided view, in which no query may stand twice.
    for turn in range(min(apart, count)):
        first_at = (turn * strip, edge + turn * strip)
        times = (count - turn + apart - 1) // apart
        yield from _repeated(tile, first_at, (strip + edge, strip), apart * strip, times, sizes)
    if rest:
        yield tile.part(queries - edge - rest, rest + edge, queries - rest, rest)


def _strip(width: int, sizes: Sizes) -> int:
    """Return a strip's side: the waste in its corners against the price of narrow calls (measured)."""
    if sizes.backward:
        return 2 * sizes.triangle if width >= 8 * sizes.triangle else sizes.triangle
    return max(sizes.triangle // (2 if width >= 4 * sizes.triangle else 4), 1)


def _short_band(tile: Tile, sizes: Sizes) -> Iterator[Tile]:
    """Yield a band not longer than it is wide: a triangle, what all queries see, and a triangle."""
    queries, width = tile.q_rows.length, tile.k_rows.length - tile.q_rows.length + 1
    yield from _split(tile.part(0, queries, 0, queries)._replace(kind=Kind.INVERSE_CAUSAL), sizes)
    if width > queries:
        yield from _split(tile.part(0, queries, queries, width - queries)._replace(kind=Kind.FULL), sizes)
    if queries > 1:
        last = tile.part(1, queries - 1, width, queries - 1)
        yield from _split(last._replace(kind=Kind.CAUSAL), sizes)


def _repeated(
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


def _parts(length: int, most: int) -> list[tuple[int, int]]:
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
        whole = q.repeats > 1 and (piece.kind == Kind.BI_CAUSAL or 2 * q.repeats * q.length > block)
        if whole or q.length > SMALL or piece.kind == Kind.PARTIAL:
            yield piece
        else:
            key = (q.step, q.length, k.step, k.length, k.start - q.start, *piece[2:])
            alike[key].extend(_singles(piece))
    for group in alike.values():
        yield from _fold_equal(sorted(group, key=lambda piece: piece.q_rows.start), block)


def _singles(piece: Tile) -> Iterator[Tile]:
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
