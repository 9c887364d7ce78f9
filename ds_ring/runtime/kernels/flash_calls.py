"""Turn tiles into calls of FlashAttention, each a rectangle with a window. Index arithmetic only.

[Note: windows]
FlashAttention aligns windows at the bottom right (since 2.1): with n queries and m keys, query i attends to
keys j with i + (m - n) - left <= j <= i + (m - n) + right; -1 leaves a side open. So each kind of tile except
PARTIAL is one window: FULL (-1, -1), CAUSAL (-1, 0), INVERSE_CAUSAL (0, -1), BI_CAUSAL (m - n, 0). We never
use a positive `right`: aten treats a `right` of m or more as an open side, which is wrong if n > m.

[Note: batches and variable lengths]
Pieces of tiles with the same window can be combined in two ways; we take the one with fewer calls. Equal
pieces at a regular distance become the batch of one call on a strided view (LongNet's segments). Other pieces
become the sequences of one variable-length call (documents); gaps between them are sequences without keys or
without queries.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from ds_ring.masks.tiles import Tiles
from ds_ring.runtime.kernels.flash_branches import branch_form
from ds_ring.runtime.kernels.flash_pieces import OPEN, Piece, end_of, join_pieces, piece_of
from ds_ring.runtime.kernels.interface import ALL_HEADS, Rows, each_tile

MOST = 1 << 15  # maximum number of sequences of one call; CUDA has a grid of at most 65,535 of them
GAP = 256  # a larger gap (slots, beyond the lengths of both sequences) costs more than another call


@dataclass(frozen=True)
class FlashCall:
    """One call: queries, keys and a window; [Note: windows]. Its properties are computed once.

    Attributes:
        q_rows, k_rows: query and key slots; `repeats` of both are the batch.
        left, right: sides of the window, in keys; OPEN masks nothing.
        head_in_group: the query head within the group of a K/V head; -1 for all.
        bias: added to every score: log m, where m is how often each pair counts.
        q_ends, k_ends: for a variable-length call, 0 and the end of each sequence, counted from the first
            row; empty if each repetition is one sequence.
    """

    q_rows: Rows
    k_rows: Rows
    left: int = OPEN
    right: int = OPEN
    head_in_group: int = -1
    bias: float = 0.0
    q_ends: tuple[int, ...] = ()
    k_ends: tuple[int, ...] = ()

    def heads(self, group: int) -> slice:
        """Return the slice of query heads, if `group` of them share a K/V head."""
        return ALL_HEADS if self.head_in_group < 0 else slice(self.head_in_group, None, group)

    @cached_property
    def is_causal(self) -> bool:
        """Return whether the window is the one of `is_causal`."""
        return self.left == OPEN and self.right == 0

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Return (queries, keys) of each sequence of one repetition."""
        if not self.q_ends:
            return [(self.q_rows.length, self.k_rows.length)]
        ends = (itertools.pairwise(self.q_ends), itertools.pairwise(self.k_ends))
        return [(i1 - i0, j1 - j0) for (i0, i1), (j0, j1) in zip(*ends, strict=True)]

    @cached_property
    def is_plain(self) -> bool:
        """Return whether the call is one sequence per sample: no batch of pieces, no variable lengths."""
        return not self.q_ends and self.q_rows.repeats == 1

    @cached_property
    def has_empty_rows(self) -> bool:
        """Return whether some query of the call has no key."""
        return any(queries and not keys for queries, keys in self.lengths) if self.q_ends else False

    @property
    def pairs(self) -> int:
        """Return the number of attended (query, key) pairs, repetitions included."""
        found = (_pairs(n, m, self.left, self.right) for n, m in self.lengths)
        return self.q_rows.repeats * sum(found)


@lru_cache(maxsize=512)
def flash_calls(tiles: Tiles) -> tuple[FlashCall, ...]:
    """Return the calls for a table of tiles; cached for each table object.

    A pair with multiplicity m is either in m calls, or in one call whose bias is log m. PARTIAL tiles are not
    a window; the caller must refuse them.
    """
    pieces = [piece_of(tile) for tile in each_tile(branch_form(tiles))]
    return tuple(_together(join_pieces(pieces)))


def _pairs(queries: int, keys: int, left: int, right: int) -> int:
    if left == OPEN and right == OPEN:
        return queries * keys
    i, shift = np.arange(queries), keys - queries
    first = np.zeros_like(i) if left == OPEN else np.maximum(i + shift - left, 0)
    last = np.minimum(keys - 1, keys - 1 if right == OPEN else i + shift + right)
    return int(np.maximum(last - first + 1, 0).sum())


def _together(pieces: list[Piece]) -> Iterator[FlashCall]:
    """Combine pieces with one window into few calls: batches or variable-length sequences."""
    alike: dict[tuple[object, ...], list[Piece]] = defaultdict(list)
    for piece in pieces:
        alike[(*piece.look, piece.left, piece.right)].append(piece)
    for group in alike.values():
        group.sort(key=lambda piece: (piece.q.start, piece.k.start))
        batches = list(_batches(group))
        chains = list(_chains(group)) if len(batches) > 1 else batches
        yield from batches if len(batches) <= len(chains) else chains


def _batches(pieces: Iterable[Piece]) -> Iterator[FlashCall]:
    """Combine equal pieces at a regular distance into one call each."""
    equal: dict[tuple[int, int], list[Piece]] = defaultdict(list)
    for piece in pieces:
        equal[piece.q.length, piece.k.length].append(piece)
    for group in equal.values():
        index = 0
        while index < len(group):
            head, count = group[index], 1
            q_apart = k_apart = 0
            if index + 1 < len(group):
                q_apart = group[index + 1].q.start - head.q.start
                k_apart = group[index + 1].k.start - head.k.start
            while (
                index + count < len(group)
                and count < MOST
                and group[index + count].q.start == head.q.start + count * q_apart
                and group[index + count].k.start == head.k.start + count * k_apart
                and _apart(head.q, count + 1, q_apart)
                and _apart(head.k, count + 1, k_apart)
            ):
                count += 1
            if count > 1:
                q, k = (
                    rows._replace(repeats=count, stride=apart)
                    for rows, apart in ((head.q, q_apart), (head.k, k_apart))
                )
                yield FlashCall(q, k, *head[2:])
            else:
                yield FlashCall(*head)
            index += count


def _apart(rows: Rows, repeats: int, stride: int) -> bool:
    """Return whether no slot is in two repetitions: they follow one another, or are interleaved."""
    span = rows.step * (rows.length - 1) + 1
    return stride >= span or (stride > 0 and stride * (repeats - 1) < rows.step)


def _chains(pieces: list[Piece]) -> Iterator[FlashCall]:
    """Combine pieces, in the order of their queries, into variable-length calls."""
    chain: list[Piece] = []
    for piece in pieces:
        if chain and not _follows(chain[-1], piece, len(chain)):
            yield _variable(chain)
            chain = []
        chain.append(piece)
    if chain:
        yield _variable(chain)


def _follows(last: Piece, piece: Piece, count: int) -> bool:
    sides = ((last.q, piece.q), (last.k, piece.k))
    return 2 * count + 2 < MOST and all(
        0 <= after.start - end_of(before) <= (before.length + after.length + GAP) * after.step
        and (after.start - before.start) % after.step == 0
        for before, after in sides
    )


def _variable(chain: list[Piece]) -> FlashCall:
    """Return one call for pieces that follow one another on both sides."""
    first, last = chain[0], chain[-1]
    if len(chain) == 1:
        return FlashCall(*first)
    q_ends, k_ends = [0], [0]
    for piece in chain:
        # The gap before the piece becomes a sequence of queries without keys, or of keys without queries.
        gaps = [(r.start - o.start) // r.step for r, o in ((piece.q, first.q), (piece.k, first.k))]
        if gaps[0] > q_ends[-1]:
            q_ends.append(gaps[0])
            k_ends.append(k_ends[-1])
        if gaps[1] > k_ends[-1]:
            q_ends.append(q_ends[-1])
            k_ends.append(gaps[1])
        q_ends.append(gaps[0] + piece.q.length)
        k_ends.append(gaps[1] + piece.k.length)
    q, k = (
        one._replace(length=(end_of(end) - one.start) // one.step)
        for one, end in ((first.q, last.q), (first.k, last.k))
    )
    return FlashCall(q, k, *first[2:], tuple(q_ends), tuple(k_ends))
