"""Shards of packed documents: short ones whole on one rank, long ones shared among a few ranks."""

from __future__ import annotations

import heapq

import numpy as np

from ds_ring.masks.slots import IntArray, repeat_rows
from ds_ring.patterns.documents.table import Table
from ds_ring.schedule.choose import work_of_runs
from ds_ring.schedule.layout import Layout, Mix, PieceLayout

# Most of a rank's mean work, or of its tokens, that it takes of one document: each is a layout to compare.
SHARES = (1.0, 0.7, 0.5, 0.3)
TRIES = 4  # ranks of least work that are asked for room


def whole_and_shared(tokens: int, ring_size: int, multiple_of: int, mix: Mix) -> list[Layout]:
    """Return layouts for the documents of a pattern; none without documents."""
    primitives = dict.fromkeys(one for pattern, _ in mix for one in pattern.primitives)
    tables = [one for one in primitives if isinstance(one, Table) and one.tokens == tokens]
    if not tables or tokens < ring_size:
        return []
    starts = np.unique(np.concatenate([np.array(table.starts, dtype=np.int64) for table in tables]))
    lengths = np.diff(starts, append=tokens)
    runs = np.stack([starts, np.ones_like(starts), lengths], axis=1)
    works = sum(layers * work_of_runs(one, runs, tokens) for one, layers in mix)
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], Layout] = {}
    for share in SHARES:
        begins, owners = _dealt(starts, lengths, np.asarray(works), ring_size, share)
        layout = PieceLayout(
            tokens, ring_size, multiple_of, (*begins.tolist(), tokens), tuple(owners.tolist())
        )
        found.setdefault((layout.boundaries, layout.owners), layout)
    return list(found.values())


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
    owners_of = ranks.share(parts[long], lengths[long], works[long])
    owners_of += [ranks.alone(*one) for one in _rows(lengths[short], works[short])]
    ordered = np.concatenate([long, short])
    placed = np.array([bool(owners) for owners in owners_of])
    begins, owners = _pieces(
        starts[ordered[placed]], lengths[ordered[placed]], [one for one in owners_of if one]
    )
    left = ordered[~placed]
    left = left[np.argsort(-lengths[left], kind="stable")]
    more = [piece for one in _rows(starts[left], lengths[left]) for piece in ranks.cut(*one)]
    if more:
        begins, owners = np.concatenate([np.stack([begins, owners]), np.array(more).T], axis=1)
    by_start = np.argsort(begins)
    return begins[by_start], owners[by_start]


def _rows(*columns: IntArray) -> list[tuple[int, ...]]:
    """Return the rows of a table as Python ints."""
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _pieces(starts: IntArray, lengths: IntArray, owners_of: list[list[int]]) -> tuple[IntArray, IntArray]:
    """Return the start and the owner of every piece of documents that their ranks share.

    Each of n ranks has two pieces, the near one and the far one of 2 n: as much work together in each rank.
    """
    counts = np.array([len(owners) for owners in owners_of], dtype=np.int64)
    pieces = np.where(counts > 1, 2 * counts, 1)
    flat = np.array([rank for owners in owners_of for rank in owners], dtype=np.int64)
    row, piece = repeat_rows(pieces)
    first, end = (at * lengths[row] // pieces[row] for at in (piece, piece + 1))
    owners = flat[(np.cumsum(counts) - counts)[row] + np.minimum(piece, pieces[row] - 1 - piece)]
    kept = end > first
    return (starts[row] + first)[kept], owners[kept]


class _Ranks:
    """Hold the slots left on each rank, and the ranks by the work that they have."""

    def __init__(self, tokens: int, ring_size: int) -> None:
        self._room: list[int] = np.diff(np.arange(ring_size + 1) * tokens // ring_size).tolist()
        self._by_work = [(0.0, rank) for rank in range(ring_size)]
        self._by_room: list[tuple[int, int]] = []  # the largest room first, as it is when `cut` begins

    def share(self, counts: IntArray, lengths: IntArray, works: IntArray) -> list[list[int]]:
        """Return for each document the `counts` ranks of least work that share it; none without room."""
        room, ranks_of = self._room, list[list[int]]()
        needed = -(-lengths // counts) + 1
        least = np.minimum.accumulate(needed[::-1])[::-1]  # what any later document needs of a rank
        apart = list[tuple[float, int]]()  # ranks with less room
        for count, length, work, most, any_later in _rows(counts, lengths, works, needed, least):
            taken, others = list[tuple[float, int]](), list[tuple[float, int]]()
            while self._by_work and len(taken) < count:
                one = heapq.heappop(self._by_work)
                free = room[one[1]]
                (taken if free >= most else others if free >= any_later else apart).append(one)
            found = sorted(rank for _, rank in taken) if len(taken) == count else []
            for place, rank in enumerate(found):  # as `_pieces` cuts it
                for piece in (place, 2 * count - 1 - place):
                    room[rank] -= (piece + 1) * length // (2 * count) - piece * length // (2 * count)
            others += [(had + work / count, rank) for had, rank in taken] if found else taken
            for one in others:
                heapq.heappush(self._by_work, one)
            ranks_of.append(found)
        for one in apart:
            heapq.heappush(self._by_work, one)
        return ranks_of

    def alone(self, length: int, work: int) -> list[int]:
        """Return a rank of little work that takes a whole document; none if `TRIES` ranks have no room."""
        asked: list[tuple[float, int]] = []
        found: list[int] = []
        while self._by_work and len(asked) < TRIES and not found:
            had, rank = heapq.heappop(self._by_work)
            if self._room[rank] >= length:
                self._room[rank] -= length
                found, had = [rank], had + work
            asked.append((had, rank))
        for one in asked:
            if self._room[one[1]]:
                heapq.heappush(self._by_work, one)
        return found

    def cut(self, start: int, length: int) -> list[tuple[int, int]]:
        """Return the start and the owner of each part of a document, the largest room first."""
        if not self._by_room:
            self._by_room = [(-room, rank) for rank, room in enumerate(self._room) if room]
            heapq.heapify(self._by_room)
        found: list[tuple[int, int]] = []
        while length:
            room, rank = heapq.heappop(self._by_room)
            taken = min(-room, length)
            found.append((start, rank))
            start, length = start + taken, length - taken
            if -room > taken:
                heapq.heappush(self._by_room, (room + taken, rank))
        return found
