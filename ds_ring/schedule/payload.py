"""From tiles to payloads: which slots of a shard a rank reads, and tiles that index the packed slots.

Owns the translation in both directions. `head_class.py` owns who sends them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ds_ring.masks.pattern import Pattern
from ds_ring.masks.slot_ranges import IntArray, SlotRanges, locate_slots, ranges_of_progressions
from ds_ring.masks.tiles import Kind, Tiles
from ds_ring.masks.triangulation import cut_by_distance, distances_of_kind


class Reads(NamedTuple):
    """Progressions of a shard's slots that other ranks read, and the distance up the ring to each reader.

    Attributes:
        slots: int64 [n, 3] of (slot, slot step, length); no row occurs twice for one distance.
        distances: int64 [n], ascending; reader = origin + distance (mod P).
    """

    slots: IntArray
    distances: IntArray

    def at(self, distance: int) -> SlotRanges:
        """Return the slots that the reader at one distance reads."""
        first, end = np.searchsorted(self.distances, [distance, distance + 1])
        return ranges_of_progressions(self.slots[first:end])


def find_reads(pattern: Pattern, reader_runs: list[IntArray], origin_runs: IntArray) -> Reads:
    """Return what every reader reads of a shard.

    Args:
        pattern: which query attends to which key.
        reader_runs: runs of the readers' shards, ordered by distance 1, 2, ... up the ring.
        origin_runs: runs of the shard that is read.
    """
    if not reader_runs or not len(origin_runs):
        return Reads(np.empty((0, 3), dtype=np.int64), np.empty(0, dtype=np.int64))
    runs = np.concatenate(reader_runs)
    distance_of_run = np.repeat(np.arange(1, len(reader_runs) + 1), [len(r) for r in reader_runs])
    # Make one table for all readers: their runs follow one another in its query slots.
    table = pattern.tiles(runs, origin_runs)
    first_slots = np.cumsum(runs[:, 2]) - runs[:, 2]
    distances = distance_of_run[np.searchsorted(first_slots, table.q.slot, side="right") - 1]
    rows = np.stack([distances, table.k.slot, table.k.slot_step, table.k.length], axis=1)
    # Several queries of one reader often read the same keys. The sort is by distance first.
    rows = np.unique(rows, axis=0)
    return Reads(rows[:, 1:], rows[:, 0])


def tiles_of_payload(tiles: Tiles, held: SlotRanges) -> Tiles:
    """Return the same tiles with key slots that index the packed payload.

    A tile's keys are an arithmetic progression of the shard's slots. Where the payload omits slots between
    them, the packed keys may have another stride; the tile is cut there.
    """
    broken = _broken(tiles, held)
    if broken.any():
        pieces = [
            _cut_where_stride_changes(tiles.rows(np.array([row])), held) for row in np.flatnonzero(broken)
        ]
        parts = Tiles.concat([piece for group in pieces for piece in group])
        partial = parts.kind == Kind.PARTIAL
        # The pairs of a triangle or band are also a band of distances, so cut its pieces by that band.
        row = np.repeat(np.flatnonzero(broken), [len(group) for group in pieces])[~partial]
        least, most = distances_of_kind(tiles)
        again = cut_by_distance(parts.rows(~partial).of_kind(Kind.FULL), least[row], most[row])
        tiles = Tiles.concat([tiles.rows(~broken), parts.rows(partial), again])
    first = locate_slots(tiles.k.slot, held)
    last = locate_slots(tiles.k.slot + (tiles.k.length - 1) * tiles.k.slot_step, held)
    step = np.where(tiles.k.length > 1, (last - first) // np.maximum(tiles.k.length - 1, 1), 1)
    return replace(tiles, k=replace(tiles.k, slot=first, slot_step=step))


def _members(slot: int, step: int, length: int) -> IntArray:
    return slot + step * np.arange(length)


def _broken(tiles: Tiles, held: SlotRanges) -> np.ndarray:
    """Return the rows whose keys are not an arithmetic progression in the packed payload."""
    k = tiles.k
    first, last = locate_slots(k.slot, held), locate_slots(k.slot + (k.length - 1) * k.slot_step, held)
    # Neighbouring slots stay neighbours when packed, and two keys are always a progression.
    suspicious = (k.slot_step > 1) & (k.length > 2) & (len(held) > 1)
    broken = np.zeros(len(tiles), dtype=bool)
    # Tiles of different queries share their keys, so check each progression once.
    verdicts: dict[tuple[int, int, int], bool] = {}
    for row in np.flatnonzero(suspicious):
        key = (int(k.slot[row]), int(k.slot_step[row]), int(k.length[row]))
        if key not in verdicts:
            stride = np.diff(locate_slots(_members(*key), held))
            verdicts[key] = bool((stride != stride[0]).any())
        broken[row] = verdicts[key]
    assert (last - first >= k.length - 1).all(), "a tile reads keys that are not in the payload"
    return broken


def _cut_where_stride_changes(row: Tiles, held: SlotRanges) -> list[Tiles]:
    """Cut one tile into several, so that the keys of each are a progression of the payload."""
    length = int(row.k.length[0])
    where = locate_slots(_members(int(row.k.slot[0]), int(row.k.slot_step[0]), length), held)
    pieces, first = [], 0
    while first < length:
        stride = np.diff(where[first:])
        same = np.flatnonzero(stride != stride[0]) if len(stride) else np.empty(0, dtype=int)
        count = int(same[0]) + 1 if len(same) else length - first
        pieces.append(row.take(0, row.q.length, first, count))
        first += count
    return pieces
