"""Who reads which tokens of every shard, and who sends them, for one class of heads. Index arithmetic.

A class is the K/V heads whose patterns are equal. Terms: the origin of a shard is the rank that owns it. At
each hop, one rank, the reader, computes with the shard; the slots that it reads are the held slots of the
hop. The relayed slots are those held slots that the rank before the reader reads as well.

[Note: relays and direct sends]
In a ring of P ranks and a direction of sign d, rank (o + d * s) mod P computes at hop s with the shard of
rank o. That rank receives exactly the tokens that it reads, each once. If the rank before it on the shard's
way reads a token as well, that rank has it from the hop before and passes it on (a relay). Otherwise the
origin sends it (a direct send), which never waits for another message. So the traffic is minimal: each token
of each K/V head crosses once to every other rank that reads it. Passing everything from neighbour to
neighbour instead would send up to 16 % more for LongNet on zigzag shards, 45 % for a window on small pieces.
Direct sends do not occur for contiguous shards with dense, windowed and dilated patterns, nor for zigzag
shards with a dense causal pattern. They are 2 to 9 % of the tokens for LongNet on zigzag shards, and up to
30 % for a window on small pieces. On a network that is only a ring of links, those tokens cross as many links
as if they were relayed (LongNet), or 9 to 37 % more (windows). The number of bytes is the same in both
directions; we choose the direction by the number of links that tokens cross (`links`).

[Note: where gradients are added]
With a float32 payload, the sum of a token's dK and dV is passed on with its keys, and each rank adds its own
part. If that sum were rounded to bfloat16 at every hop, it would lose a bit for every fourfold number of
ranks: the error with 64 ranks is 5.5 to 5.9 times that of one rank. So with a bfloat16 payload ranks do not
pass sums on between nodes, nor in a ring without nodes: each rank returns its own part to the owner, which
adds in float32. Every part is then rounded once and the number of bytes is the same: the error is 1.3 times
that of one rank, whatever the ring size. Inside a node, where links are fast, sums are passed on in float32,
and only what returns to the owner is rounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ds_ring.masks.pattern import Pattern
from ds_ring.masks.tiles import (
    IntArray,
    SlotRanges,
    Tiles,
    count_slots,
    intersect_slots,
    locate_slots,
    no_slots,
    ranges_of_progressions,
    subtract_slots,
)
from ds_ring.masks.triangulation import trimmed
from ds_ring.schedule.layout import Layout
from ds_ring.schedule.rank_plan import (
    Direction,
    DirectionPlan,
    DirectSend,
    GradientReturn,
    HeadClassPlan,
    HopPlan,
)


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
        rows = (tiles.rows(np.array([row])) for row in np.flatnonzero(broken))
        pieces = (piece for row in rows for piece in _cut_where_stride_changes(row, held))
        tiles = Tiles.concat([tiles.rows(~broken), *map(trimmed, pieces)])
    first = locate_slots(tiles.k.slot, held)
    last = locate_slots(tiles.k.slot + (tiles.k.length - 1) * tiles.k.slot_step, held)
    step = np.where(tiles.k.length > 1, (last - first) // np.maximum(tiles.k.length - 1, 1), 1)
    return replace(tiles, k=replace(tiles.k, slot=first, slot_step=step))


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
            slot, step, length = key
            stride = np.diff(locate_slots(slot + step * np.arange(length), held))
            verdicts[key] = bool((stride != stride[0]).any())
        broken[row] = verdicts[key]
    assert (last - first >= k.length - 1).all(), "a tile reads keys that are not in the payload"
    return broken


def _cut_where_stride_changes(row: Tiles, held: SlotRanges) -> list[Tiles]:
    """Cut one tile into several, so that the keys of each are a progression of the payload."""
    length = int(row.k.length[0])
    where = locate_slots(row.k.slot + row.k.slot_step * np.arange(length), held)
    pieces, first = [], 0
    while first < length:
        stride = np.diff(where[first:])
        same = np.flatnonzero(stride != stride[0]) if len(stride) else np.empty(0, dtype=int)
        count = int(same[0]) + 1 if len(same) else length - first
        pieces.append(row.take(0, row.q.length, first, count))
        first += count
    return pieces


@dataclass(frozen=True)
class ReadsOfShards:
    """The slots that every rank reads of every shard of a layout; computed on demand and cached.

    Attributes:
        pattern: bound to the query heads of one K/V head.
        layout: which token lies where.
    """

    pattern: Pattern
    layout: Layout
    _reads: dict[int, Reads] = field(default_factory=dict, repr=False, compare=False)
    _slots: dict[tuple[int, int], SlotRanges] = field(default_factory=dict, repr=False, compare=False)

    def slots(self, origin: int, distance: int) -> SlotRanges:
        """Return the slots of a shard that the rank `distance` up the ring reads."""
        key = origin, distance
        if key not in self._slots:
            # Computing a shard's reads makes tiles for all ranks; skip it if the band excludes this reader.
            near = origin in self._reads or self._may_touch(origin, distance)
            self._slots[key] = self._of_shard(origin).at(distance) if near else no_slots()
        return self._slots[key]

    def distances(self, origin: int) -> list[int]:
        """Return the distances up the ring from a shard's origin to its readers, ascending."""
        return np.unique(self._of_shard(origin).distances).tolist()

    def _of_shard(self, origin: int) -> Reads:
        if origin not in self._reads:
            runs = _runs_of_all(self.layout)
            # ordered by distance 1, 2, ... up the ring
            readers = [*runs[origin + 1 :], *runs[:origin]]
            self._reads[origin] = find_reads(self.pattern, readers, runs[origin])
        return self._reads[origin]

    def _may_touch(self, origin: int, distance: int) -> bool:
        """Return False if the band of distances alone shows that the rank reads nothing."""
        least, most = self.pattern.distance
        (q_first, q_last), (k_first, k_last) = (
            _hull(self.layout, rank) for rank in ((origin + distance) % self.layout.ring_size, origin)
        )
        return q_last - k_first >= least and q_first - k_last <= most


@dataclass(frozen=True)
class HeadClass:
    """How all shards travel for one class of K/V heads; [Note: relays and direct sends].

    Attributes:
        reads: the reads of the pattern and the layout; classes that differ only in directions may share it.
        kv_heads: the K/V heads of the class.
        directions: the directions in which shards travel.
        prune: False sends every shard all the way round, also to ranks that do not read it (for comparison).
        rounded: dK and dV return in bfloat16; [Note: where gradients are added].
    """

    reads: ReadsOfShards
    kv_heads: slice
    directions: tuple[Direction, ...]
    prune: bool = True
    rounded: bool = False

    @property
    def pattern(self) -> Pattern:
        """Return the pattern, bound to the query heads of one K/V head."""
        return self.reads.pattern

    @property
    def layout(self) -> Layout:
        """Return which token lies where."""
        return self.reads.layout

    def held(self, origin: int, direction: Direction, hop: int) -> SlotRanges:
        """Return the slots of a shard that its reader at `hop` holds.

        Those that it reads, at hop 0 all slots.
        """
        if hop == 0 or (not self.prune and 0 < hop <= direction.limit):
            valid = self.layout.valid_tokens(origin)
            return np.array([[0, valid]]) if valid else no_slots()
        if hop > direction.limit:
            return no_slots()
        # Reads are indexed by the distance up the ring, hops by the direction of travel.
        size = self.layout.ring_size
        return self.reads.slots(origin, (direction.reader(origin, hop, size) - origin) % size)

    def relayed(self, origin: int, direction: Direction, hop: int) -> SlotRanges:
        """Return the held slots that the rank before the reader also holds, and therefore passes on to it."""
        before = direction.before(hop)
        return intersect_slots(self.held(origin, direction, hop), self.held(origin, direction, before))

    def sums(self, origin: int, direction: Direction, hop: int) -> SlotRanges:
        """Return the slots for which the rank at `hop` receives a sum of gradients.

        See [Note: where gradients are added]. The owner itself sends no sum: its own part stays on it.
        """
        apart = self.rounded and not direction.ranks_per_node
        if hop <= 1 or apart or not direction.is_next(hop):
            return no_slots()
        return self.relayed(origin, direction, hop)

    def _hops(self, origin: int, direction: Direction) -> Iterator[int]:
        """Yield the hops of a direction, from 1 on, at which some rank reads tokens of the shard."""
        if not self.prune:
            yield from range(1, direction.limit + 1)
            return
        size = self.layout.ring_size
        distances = self.reads.distances(origin)
        hops = (direction.hop(origin, (origin + distance) % size, size) for distance in distances)
        yield from (hop for hop in hops if hop <= direction.limit)

    def tokens_sent(self, origin: int) -> int:
        """Return the tokens of one shard that are sent in a forward pass, over all hops, per K/V head."""
        return sum(
            count_slots(self.held(origin, direction, hop))
            for direction in self.directions
            for hop in self._hops(origin, direction)
        )

    def links(self, origin: int) -> int:
        """Return the sum over tokens sent of the links that each crosses.

        1 for a relay, s for a direct send.
        """
        total = 0
        for direction in self.directions:
            for hop in self._hops(origin, direction):
                relayed = count_slots(self.relayed(origin, direction, hop))
                total += relayed + hop * (count_slots(self.held(origin, direction, hop)) - relayed)
        return total

    def busiest_adapter(self, origins: Iterable[int], ranks_per_node: int) -> int:
        """Return the tokens sent between nodes through the busiest network adapters.

        The adapters at the same place in every node are counted together, and the maximum over places is
        returned.

        Args:
            origins: the shards that are counted: all of one node, or of several nodes.
            ranks_per_node: R. Each rank has one adapter; all nodes have the same size.
        """
        size, left = self.layout.ring_size, [0] * ranks_per_node
        ways = ((one, way, hop) for one in origins for way in self.directions for hop in self._hops(one, way))
        for origin, direction, hop in ways:
            node = direction.reader(origin, hop, size) // ranks_per_node
            before = direction.reader(origin, direction.before(hop), size)
            if node == before // ranks_per_node == origin // ranks_per_node:
                continue
            relayed = count_slots(self.relayed(origin, direction, hop))
            left[before % ranks_per_node] += relayed if before // ranks_per_node != node else 0
            if origin // ranks_per_node != node:
                left[origin % ranks_per_node] += count_slots(self.held(origin, direction, hop)) - relayed
        return max(left)

    def tokens_needed(self, origin: int) -> int:
        """Return the minimum traffic for one shard: the number of (token, other rank that reads it) pairs."""
        return sum(count_slots(self.reads.slots(origin, d)) for d in self.reads.distances(origin))

    def rank(self, ring_rank: int) -> HeadClassPlan:
        """Return the plan of one rank."""
        directions = tuple(self._direction(ring_rank, direction) for direction in self.directions)
        return HeadClassPlan(self.kv_heads, directions, max(direction.limit for direction in self.directions))

    def _direction(self, ring_rank: int, direction: Direction) -> DirectionPlan:
        hops = [self._hop_plan(ring_rank, direction, hop) for hop in range(direction.limit + 1)]
        # Remove empty hops at the end only, because the index in the tuple is the hop's number.
        while len(hops) > 1 and hops[-1] is None:
            hops.pop()
        direct_sends, gradient_returns = [], []
        for hop in range(1, direction.limit + 1):
            held = self.held(ring_rank, direction, hop)
            if not len(held):
                continue
            reader = direction.reader(ring_rank, hop, self.layout.ring_size)
            # This rank is the owner: it sends the slots that the rank before the reader does not have.
            leaving = subtract_slots(held, self.relayed(ring_rank, direction, hop))
            if len(leaving):
                direct_sends.append(DirectSend(hop, reader, leaving))
            # Gradients that the reader does not pass on as a sum return to this rank directly.
            ending = subtract_slots(held, self.sums(ring_rank, direction, hop + 1))
            if len(ending):
                gradient_returns.append(GradientReturn(hop, reader, ending))
        sends, returns = tuple(direct_sends), tuple(gradient_returns)
        return DirectionPlan(tuple(hops), sends, returns, direction, self.rounded)

    def _hop_plan(self, ring_rank: int, direction: Direction, hop: int) -> HopPlan | None:
        size, inner = self.layout.ring_size, direction.ranks_per_node
        origin = direction.origin(ring_rank, hop, size)
        held = self.held(origin, direction, hop)
        if hop and not len(held):
            return None
        tiles = self.pattern.tiles(self.layout.runs(ring_rank), self.layout.runs(origin))
        # At hop 0 keys are used in place, so the tiles' key slots are slots of the shard already.
        if hop and len(tiles):
            tiles = tiles_of_payload(tiles, held)
        enters = inner > 0 and hop % inner == 0  # the reader is the first rank of its node to get the shard
        none = no_slots()
        return HopPlan(
            hop,
            origin,
            came_from=direction.reader(origin, direction.before(hop), size) if hop else ring_rank,
            goes_to=direction.reader(origin, hop + 1, size),
            held=held,
            relayed=self.relayed(origin, direction, hop) if hop else none,
            forward=self.relayed(origin, direction, hop + 1) if direction.is_next(hop + 1) else none,
            across=self.relayed(origin, direction, hop + inner) if enters else none,
            across_to=direction.reader(origin, hop + inner, size),
            sums_in=self.sums(origin, direction, hop),
            sums_on=self.sums(origin, direction, hop + 1) if hop else none,
            tiles=tiles,
        )


@lru_cache(maxsize=16)
def _runs_of_all(layout: Layout) -> tuple[IntArray, ...]:
    """Return the runs of every rank, cached because the reads of every shard need them."""
    return tuple(layout.runs(rank) for rank in range(layout.ring_size))


@lru_cache(maxsize=1 << 14)
def _hull(layout: Layout, ring_rank: int) -> tuple[int, int]:
    """Return the first and last position of a shard; first > last if the shard is empty."""
    runs = _runs_of_all(layout)[ring_rank]
    if not len(runs):
        # beyond UNBOUNDED, so that no band reaches an empty shard
        return 1 << 62, -(1 << 62)
    return int(runs[:, 0].min()), int((runs[:, 0] + (runs[:, 2] - 1) * runs[:, 1]).max())
