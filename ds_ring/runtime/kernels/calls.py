"""From tiles to the calls of a kernel that takes rectangles and small triangles. Index arithmetic only.

[Note: small triangles]
`is_causal` skips work only in steps of 512 keys, so a triangle is halved until its side is at most
`TRIANGLE`: two triangles and one full square each time. What is computed beyond the triangle is then
TRIANGLE / side of it. The squares of one size lie at a regular distance along the diagonal, and so do the
smallest triangles: each size is one call on a strided view (`Rows`), up to `BLOCK` rows at a time, so
that neither small calls nor large workspaces cost. Equal small tiles at a regular distance are folded alike.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache

from ds_ring.runtime.kernels.interface import Rows, Tile, each_tile
from ds_ring.schedule.tiles import Kind, Tiles

TRIANGLE = 128  # side of the smallest triangle, tokens
BLOCK = 2048  # most queries and most keys of one call: bounds the workspace
SMALL = 1024  # tiles of up to so many queries are folded with equal ones


@lru_cache(maxsize=512)
def calls(tiles: Tiles, block: int = BLOCK, triangle: int = TRIANGLE) -> tuple[Tile, ...]:
    """All calls for a table of tiles (the same object gives the same answer at once)."""
    pieces = (piece for tile in each_tile(tiles) for piece in _split(tile, block, triangle))
    return tuple(_fold(pieces, block))


def _split(tile: Tile, block: int, triangle: int) -> Iterator[Tile]:
    """A tile as rectangles of at most block x block, and triangles of at most `triangle`."""
    if tile.kind == Kind.PARTIAL:  # small already, and its mask is its own
        yield tile
        return
    if tile.kind == Kind.FULL:
        q_parts, k_parts = _parts(tile.q_rows, block), _parts(tile.k_rows, block)
        for q_rows, k_rows in itertools.product(q_parts, k_parts):
            yield tile._replace(q_rows=q_rows, k_rows=k_rows)
        return
    side = tile.q_rows.length
    yield from _repeated(tile, 0, 0, triangle, side, triangle, block)
    rest = side % triangle
    if rest:
        q_rows, k_rows = (rows.part(side - rest, rest) for rows in (tile.q_rows, tile.k_rows))
        yield tile._replace(q_rows=q_rows, k_rows=k_rows)
    yield from _squares(tile._replace(kind=Kind.FULL), tile.kind == Kind.CAUSAL, block, triangle)


def _squares(tile: Tile, below: bool, block: int, triangle: int) -> Iterator[Tile]:
    """The full squares of a triangle: of every size triangle * 2^n, each second one along the diagonal."""
    total, side = tile.q_rows.length, triangle
    while side < total:
        q_first, k_first = (side, 0) if below else (0, side)
        # the far side is what the end of the triangle may clip
        yield from _repeated(tile, q_first, k_first, side, total, 2 * side, block)
        whole = (total - side) // (2 * side) if total >= side else 0
        start = (2 * whole + 1) * side if (total - side) % (2 * side) < side else None
        if start is not None and start < total:
            near, far = tile.q_rows.part(start - side, side), tile.k_rows.part(start, total - start)
            if below:
                near, far = tile.k_rows.part(start - side, side), tile.q_rows.part(start, total - start)
            q_rows, k_rows = (far, near) if below else (near, far)
            yield from _split(tile._replace(q_rows=q_rows, k_rows=k_rows), block, triangle)
        side *= 2


def _repeated(
    tile: Tile, q_first: int, k_first: int, side: int, total: int, every: int, block: int
) -> Iterator[Tile]:
    """Squares (or triangles) of `side` from (q_first, k_first) on, one `every` so many, all that fit."""
    offset = max(q_first, k_first)
    count = (total - offset - side) // every + 1 if total - offset >= side else 0
    if side > block:
        for turn in range(count):
            q_rows = tile.q_rows.part(q_first + turn * every, side)
            k_rows = tile.k_rows.part(k_first + turn * every, side)
            yield from _split(tile._replace(q_rows=q_rows, k_rows=k_rows), block, side)
        return
    at_once = max(block // side, 1)
    for turn in range(0, count, at_once):
        repeats, shift = min(at_once, count - turn), turn * every
        q_rows = tile.q_rows.again(q_first + shift, every, side, repeats)
        k_rows = tile.k_rows.again(k_first + shift, every, side, repeats)
        yield tile._replace(q_rows=q_rows, k_rows=k_rows)


def _parts(rows: Rows, block: int) -> list[Rows]:
    """A progression cut into consecutive parts of at most `block` members, of nearly equal length."""
    count = -(-rows.length // block)
    bounds = [rows.length * part // count for part in range(count + 1)]
    return [rows.part(first, end - first) for first, end in itertools.pairwise(bounds)]


def _fold(pieces: Iterator[Tile], block: int) -> Iterator[Tile]:
    """Small equal pieces at a regular distance as one repeated piece; the others as they are."""
    alike: dict[tuple[object, ...], list[Tile]] = defaultdict(list)
    for piece in pieces:
        q, k = piece.q_rows, piece.k_rows
        if q.repeats > 1 or q.length > SMALL or piece.kind == Kind.PARTIAL:
            yield piece
        else:
            key = (
                q.step,
                q.length,
                k.step,
                k.length,
                piece.kind,
                piece.member,
                piece.bias,
                k.start - q.start,
            )
            alike[key].append(piece)
    for group in alike.values():
        yield from _fold_equal(sorted(group, key=lambda piece: piece.q_rows.start), block)


def _fold_equal(group: list[Tile], block: int) -> Iterator[Tile]:
    """Equal pieces, ascending: runs of a constant distance at which neither queries nor keys overlap."""
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
