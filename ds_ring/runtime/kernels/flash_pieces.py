"""Tiles as pieces, each one window, and pieces joined to larger ones. Index arithmetic only.

[Note: fewer calls]
Each call's result is merged into the accumulator, so calls cost more than their pairs. Neighbouring tiles are
joined where one window says what both attend to: FULL ones with a side in common, two triangles on one
diagonal with the square below between them, a triangle with what is FULL before it, a triangle with the band
that goes on from it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from ds_ring.masks.tiles import Kind
from ds_ring.runtime.kernels.interface import Rows, Tile

OPEN = -1  # of a window's side that hides nothing


class Piece(NamedTuple):
    """Hold a call of one sequence, repeated nowhere."""

    q: Rows
    k: Rows
    left: int
    right: int
    head_in_group: int
    bias: float

    @property
    def look(self) -> tuple[object, ...]:
        """Return what pieces that may be joined have in common, beside their window."""
        return self.q.step, self.k.step, self.head_in_group, self.bias

    @property
    def is_full(self) -> bool:
        return self.left == OPEN and self.right == OPEN

    @property
    def is_triangle(self) -> bool:
        """Return whether it is square and causal."""
        return self.left == OPEN and self.right == 0 and self.q.length == self.k.length


def piece_of(tile: Tile) -> Piece:
    """Return a tile as a window; [Note: windows] in flash_calls.py."""
    q, k = tile.q_rows, tile.k_rows
    assert tile.kind != Kind.PARTIAL and tile.inside is None, "a tile that is no window"
    windows = {
        Kind.FULL: (OPEN, OPEN),
        Kind.CAUSAL: (OPEN, 0),
        Kind.INVERSE_CAUSAL: (0, OPEN),
        Kind.BI_CAUSAL: (k.length - q.length, 0),
    }
    # of one query nothing is hidden: tiles have no rows or columns that see nothing
    left, right = windows[tile.kind] if q.length > 1 else (OPEN, OPEN)
    return Piece(q, k, left, right, tile.head_in_group, tile.bias)


def end_of(rows: Rows) -> int:
    """Return the slot at which the next member would stand."""
    return rows.start + rows.length * rows.step


def _and(first: Rows, second: Rows) -> Rows:
    return first._replace(length=first.length + second.length)


def join_pieces(pieces: list[Piece]) -> list[Piece]:
    """Return fewer pieces with the same pairs; [Note: fewer calls]."""
    full = [piece for piece in pieces if piece.is_full]
    triangles = [piece for piece in pieces if piece.is_triangle and not piece.is_full]
    others = [piece for piece in pieces if not piece.is_full and not piece.is_triangle]
    full = _side_by_side(full, along_keys=False)
    triangles, full = _diagonals(triangles, full)
    full = _side_by_side(full, along_keys=True)
    triangles, full = _diagonals(triangles, full)
    triangles, others = _bands(triangles, others)
    causal, full = _after_full(triangles, full)
    return full + causal + others


def _side_by_side(full: list[Piece], along_keys: bool) -> list[Piece]:
    """Join FULL pieces with the same keys (or queries) and neighbouring queries (or keys)."""
    alike: dict[tuple[object, ...], list[Piece]] = defaultdict(list)
    for piece in full:
        alike[(*piece.look, piece.q if along_keys else piece.k)].append(piece)
    found = []
    for group in alike.values():
        group.sort(key=lambda piece: (piece.k if along_keys else piece.q).start)
        last = group[0]
        for piece in group[1:]:
            if along_keys and end_of(last.k) == piece.k.start:
                last = last._replace(k=_and(last.k, piece.k))
            elif not along_keys and end_of(last.q) == piece.q.start:
                last = last._replace(q=_and(last.q, piece.q))
            else:
                found.append(last)
                last = piece
        found.append(last)
    return found


def _diagonals(triangles: list[Piece], full: list[Piece]) -> tuple[list[Piece], list[Piece]]:
    """Join two triangles on one diagonal and the FULL rectangle below between them."""
    squares: dict[tuple[object, ...], list[Piece]] = defaultdict(list)
    for piece in full:
        squares[(*piece.look, piece.q, piece.k)].append(piece)
    done: list[Piece] = []
    for piece in sorted(triangles, key=lambda piece: (piece.q.start, piece.k.start)):
        while done and (end_of(done[-1].q), end_of(done[-1].k)) == (piece.q.start, piece.k.start):
            between = squares.get((*piece.look, piece.q, done[-1].k))
            if not between or done[-1].look != piece.look:
                break
            between.pop()
            before = done.pop()
            piece = piece._replace(q=_and(before.q, piece.q), k=_and(before.k, piece.k))
        done.append(piece)
    return done, [piece for left in squares.values() for piece in left]


def _bands(triangles: list[Piece], others: list[Piece]) -> tuple[list[Piece], list[Piece]]:
    """Join a triangle as long as a window is wide and the band that goes on from it."""
    bands = {(*p.look, p.q.start, p.k.start, p.left): p for p in others if p.left > 0 and p.right == 0}
    left, joined = [], []
    for piece in triangles:
        band = bands.pop((*piece.look, end_of(piece.q), piece.k.start, piece.q.length), None)
        if band is None:
            left.append(piece)
        else:
            joined.append(band._replace(q=_and(piece.q, band.q)))
    kept = [p for p in others if not (p.left > 0 and p.right == 0)]
    return left, kept + joined + list(bands.values())


def _after_full(triangles: list[Piece], full: list[Piece]) -> tuple[list[Piece], list[Piece]]:
    """Join a triangle and a FULL piece of the same queries, whose keys stand before it."""
    before: dict[tuple[object, ...], list[Piece]] = defaultdict(list)
    for piece in full:
        before[(*piece.look, piece.q, end_of(piece.k))].append(piece)
    causal = []
    for piece in triangles:
        whole = before.get((*piece.look, piece.q, piece.k.start))
        causal.append(piece._replace(k=_and(whole.pop().k, piece.k)) if whole else piece)
    return causal, [piece for left in before.values() for piece in left]
