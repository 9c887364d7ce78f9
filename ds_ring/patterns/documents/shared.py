"""Shards of packed documents: short ones whole on one rank, long ones shared among a few ranks."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

from ds_ring.masks.slots import IntArray
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
        pieces = sorted(_dealt(starts, lengths, np.asarray(works), ring_size, share))
        begins, owners = zip(*pieces, strict=True)
        layout = PieceLayout(tokens, ring_size, multiple_of, (*begins, tokens), owners)
        found.setdefault((layout.boundaries, layout.owners), layout)
    return list(found.values())


def _dealt(
    starts: IntArray, lengths: IntArray, works: IntArray, ring_size: int, share: float
) -> Iterator[tuple[int, int]]:
    """Yield the start and the owner of every piece, the documents with most work first."""
    tokens = int(lengths.sum())
    free = np.diff(np.arange(ring_size + 1) * tokens // ring_size)  # slots left on each rank
    load = np.zeros(ring_size)
    most_work, most_tokens = max(share * works.sum() / ring_size, 1), max(share * tokens / ring_size, 1)
    parts = np.ceil(np.maximum(works / most_work, lengths / most_tokens)).astype(np.int64)
    order = np.argsort(-works, kind="stable")
    left: list[tuple[int, int]] = []  # (start, length) of what found no room
    for index in order[parts[order] > 1].tolist():
        start, length, work = int(starts[index]), int(lengths[index]), int(works[index])
        count = min(int(parts[index]), ring_size, length)
        room = np.flatnonzero(free >= -(-length // count) + 1)
        if len(room) < count:
            left.append((start, length))
            continue
        ranks = np.sort(room[np.argpartition(load[room], count - 1)[:count]])
        # both halves of a rank, the near one and the far one, have the same work together in each rank
        borders = start + np.arange(2 * count + 1) * length // (2 * count)
        lengths_of_halves = np.diff(borders)
        free[ranks] -= lengths_of_halves[:count] + lengths_of_halves[: count - 1 : -1]
        load[ranks] += work / count
        kept = lengths_of_halves > 0
        owners = np.concatenate([ranks, ranks[::-1]])
        yield from zip(borders[:-1][kept].tolist(), owners[kept].tolist(), strict=True)
    ranks_by_load = [(load[rank], rank) for rank in range(ring_size)]
    heapq.heapify(ranks_by_load)
    room_of = free.tolist()
    for index in order[parts[order] <= 1].tolist():
        start, length = int(starts[index]), int(lengths[index])
        asked: list[tuple[float, int]] = []
        while ranks_by_load and len(asked) < TRIES:
            asked.append(heapq.heappop(ranks_by_load))
            if room_of[asked[-1][1]] >= length:
                found, rank = asked.pop()
                room_of[rank] -= length
                heapq.heappush(ranks_by_load, (found + int(works[index]), rank))
                yield start, rank
                break
        else:
            left.append((start, length))
        for one in asked:
            if room_of[one[1]]:
                heapq.heappush(ranks_by_load, one)
    # Cut the others where ranks have room, the largest room first.
    rooms = [(-room, rank) for rank, room in enumerate(room_of) if room]
    heapq.heapify(rooms)
    for start, length in sorted(left, key=lambda one: -one[1]):
        while length:
            room, rank = heapq.heappop(rooms)
            taken = min(-room, length)
            yield start, rank
            start, length = start + taken, length - taken
            if -room > taken:
                heapq.heappush(rooms, (room + taken, rank))
