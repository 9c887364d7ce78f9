"""Shards of packed documents: short ones whole on one rank, long ones shared among a few ranks."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right

import numpy as np

from ds_ring.masks.slots import IntArray, repeat_rows
from ds_ring.patterns.documents.table import Table
from ds_ring.schedule.choose import count_run_work
from ds_ring.schedule.layout import Layout, Mix
from ds_ring.schedule.pieces import PieceLayout

# Most of a rank's mean work, or of its tokens, that it takes of one document: each is a layout to compare.
SHARES = (1.0, 0.7, 0.5, 0.3)
TRIES = 4  # ranks of least work that are asked for room


def whole_and_shared(tokens: int, ring_size: int, multiple_of: int, mix: Mix) -> list[Layout]:
    """Return layouts for the documents of a pattern; none without documents."""
    primitives = dict.fromkeys(part for pattern, _ in mix for part in pattern.primitives)
    tables = [part for part in primitives if isinstance(part, Table) and part.tokens == tokens]
    if not tables or tokens < ring_size:
        return []
    starts = np.unique(np.concatenate([np.array(table.starts, dtype=np.int64) for table in tables]))
    lengths = np.diff(starts, append=tokens)
    runs = np.stack([starts, np.ones_like(starts), lengths], axis=1)
    works = sum(layers * count_run_work(pattern, runs, tokens) for pattern, layers in mix)
    layouts: dict[tuple[tuple[int, ...], tuple[int, ...]], Layout] = {}
    for share in SHARES:
        begins, owners = _dealt(starts, lengths, np.asarray(works), ring_size, share)
        layout = PieceLayout(
            tokens, ring_size, multiple_of, (*begins.tolist(), tokens), tuple(owners.tolist())
        )
        layouts.setdefault((layout.boundaries, layout.owners), layout)
    return list(layouts.values())


def _dealt(
    starts: IntArray, lengths: IntArray, works: IntArray, ring_size: int, share: float
) -> tuple[IntArray, IntArray]:
    """Return the start and the owner of every piece, by start; the documents with most work come first."""
    tokens = int(lengths.sum())
    ranks = _Ranks(tokens, ring_size)
    most_work, most_tokens = max(share * works.sum() / ring_size, 1), max(share * tokens / ring_size, 1)
    parts = np.ceil(np.maximum(works / most_work, lengths / most_tokens)).astype(np.int64)
    parts = np.minimum(np.maximum(parts, 1), np.minimum(ring_size, lengths))
    order = np.argsort(-works, kind="stable")
    long, short = order[parts[order] > 1], order[parts[order] == 1]
    shared, owners = ranks.share(parts[long], lengths[long], works[long])
    alone = np.array(ranks.alone(lengths[short], works[short]), dtype=np.int64)
    ordered, counts = np.concatenate([long, short]), np.concatenate([shared, alone >= 0])
    placed, left = ordered[counts > 0], ordered[counts == 0]
    begins, owners = _pieces(
        starts[placed], lengths[placed], counts[counts > 0], np.concatenate([owners, alone[alone >= 0]])
    )
    left = left[np.argsort(-lengths[left], kind="stable")]
    dealt = np.array(ranks.cut(starts[left], lengths[left]), dtype=np.int64)
    begins, owners = np.concatenate([np.stack([begins, owners]), dealt], axis=1)
    by_start = np.argsort(begins)
    return begins[by_start], owners[by_start]


def _pieces(
    starts: IntArray, lengths: IntArray, counts: IntArray, ranks: IntArray
) -> tuple[IntArray, IntArray]:
    """Return the start and the owner of every piece of documents, each shared by the next `counts` ranks.

    Each of n ranks has two pieces, the near one and the far one of 2 n: as much work together in each rank.
    """
    pieces = np.where(counts > 1, 2 * counts, 1)
    row, piece = repeat_rows(pieces)
    first, end = (at * lengths[row] // pieces[row] for at in (piece, piece + 1))
    owners = ranks[(np.cumsum(counts) - counts)[row] + np.minimum(piece, pieces[row] - 1 - piece)]
    filled = end > first
    return (starts[row] + first)[filled], owners[filled]


class _Ranks:
    """Hold the slots left on each rank, and the ranks by the work that they have, then by their number.

    Lists of numbers alone: Python's garbage collector walks lists of tuples.
    """

    def __init__(self, tokens: int, ring_size: int) -> None:
        self._room: list[int] = np.diff(np.arange(ring_size + 1) * tokens // ring_size).tolist()
        self._works, self._ranks = [0.0] * ring_size, list(range(ring_size))

    def _add(self, work: float, rank: int) -> None:
        at = bisect_left(self._works, work)
        at = bisect_left(self._ranks, rank, at, bisect_right(self._works, work, at))
        self._works.insert(at, work)
        self._ranks.insert(at, rank)

    def _take(self, at: int) -> tuple[float, int]:
        return self._works.pop(at), self._ranks.pop(at)

    def share(self, counts: IntArray, lengths: IntArray, works: IntArray) -> tuple[IntArray, IntArray]:
        """Share each document among the `counts` ranks of least work that have room, or none.

        Return how many ranks share each document, and these ranks.
        """
        room, sharing, ranks_of = self._room, list[int](), list[int]()
        needed = -(-lengths // counts) + 1
        least = np.minimum.accumulate(needed[::-1])[::-1]  # what any later document needs of a rank
        row, place = repeat_rows(counts)
        length, pieces = lengths[row], 2 * counts[row]
        # tokens of the two pieces of each rank, as `_pieces` cuts them
        near = (place + 1) * length // pieces - place * length // pieces
        far = (pieces - place) * length // pieces - (pieces - 1 - place) * length // pieces
        tokens, first = (near + far).tolist(), 0
        full = list[tuple[float, int]]()  # ranks with less room than any later document needs
        columns = (column.tolist() for column in (counts, works, needed, least))
        for count, work, most, any_later in zip(*columns, strict=True):
            taken, gone = list[int](), list[int]()
            for at, rank in enumerate(self._ranks):
                if room[rank] >= most:
                    taken.append(at)
                    if len(taken) == count:
                        break
                elif room[rank] < any_later:
                    gone.append(at)
            chosen = [self._ranks[at] for at in taken] if len(taken) == count else []
            had = [self._works[at] for at in taken]
            if gone:
                full += [(self._works[at], self._ranks[at]) for at in gone]
            for at in sorted(gone + taken if chosen else gone, reverse=True):
                self._take(at)
            for before, rank in zip(had, chosen, strict=False):
                self._add(before + work / count, rank)
            chosen.sort()
            for rank, used in zip(chosen, tokens[first : first + count], strict=False):
                room[rank] -= used
            first += count
            sharing.append(len(chosen))
            ranks_of += chosen
        for entry in full:
            self._add(*entry)
        return np.array(sharing, dtype=np.int64), np.array(ranks_of, dtype=np.int64)

    def alone(self, lengths: IntArray, works: IntArray) -> list[int]:
        """Return for each document a rank of little work that takes it; -1 if `TRIES` ranks have no room."""
        room, owners = self._room, list[int]()
        for length, work in zip(lengths.tolist(), works.tolist(), strict=True):
            candidates, owner = self._ranks[:TRIES], -1
            for at, rank in enumerate(candidates):
                if room[rank] >= length:
                    candidates, owner, had = candidates[:at], rank, self._take(at)[0]
                    room[rank] -= length
                    if room[rank]:
                        self._add(had + work, rank)
                    break
            for at in range(len(candidates) - 1, -1, -1):  # ranks without any room are not asked again
                if not room[candidates[at]]:
                    self._take(at)
            owners.append(owner)
        return owners

    def cut(self, starts: IntArray, lengths: IntArray) -> tuple[list[int], list[int]]:
        """Return the start and the owner of each part of documents, the largest room first."""
        size = len(self._room)
        heap = [rank - room * size for rank, room in enumerate(self._room) if room]
        heapq.heapify(heap)
        begins, owners = list[int](), list[int]()
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            while length:
                negative, rank = divmod(heap[0], size)
                begins.append(start)
                owners.append(rank)
                if -negative > length:
                    heapq.heapreplace(heap, heap[0] + length * size)
                    break
                heapq.heappop(heap)
                start, length = start - negative, length + negative
        return begins, owners
