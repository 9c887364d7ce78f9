"""The journey of all shards for one class of heads: who reads what, and who sends it. Index arithmetic.

[Note: relays and departures]
In a lane with direction d the shard of origin o is at hop s the matter of ring rank o + d * s. That rank
gets exactly what it reads, once: from its neighbour, if the neighbour reads it as well and so has it in hand
from the hop before (a relay), else from the origin, which always has it (a departure). So what crosses is
the least that must: each token of each K/V head once to every other rank that reads it. Handing everything
on from neighbour to neighbour would carry tokens through ranks that only pass them on: up to 16 % more for
LongNet on zigzag shards, 45 % for a window on small pieces. Nothing waits anywhere: departures leave from
the shard itself. Contiguous shards under dense, windowed and dilated patterns, and zigzag shards under a
dense causal one, have no departures: there every message goes to a neighbour.
The bytes are the same whichever way shards go; the way is chosen by the links that tokens cross (`links`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from ds_ring.masks.pattern import Pattern
from ds_ring.masks.slot_ranges import SlotRanges, count_slots, intersect_slots, no_slots, subtract_slots
from ds_ring.schedule.layout import IntArray, Layout
from ds_ring.schedule.payload import Reads, find_reads, tiles_of_payload
from ds_ring.schedule.rank_plan import Departure, Homecoming, Lane, LanePlan, Visit, WalkPlan


@dataclass(frozen=True)
class ReadsOfShards:
    """What every rank reads of every shard of a layout; looked at when first asked for, and kept.

    Attributes:
        pattern: bound to the query heads of one K/V head.
        layout: which token lies where.
    """

    pattern: Pattern
    layout: Layout
    _reads: dict[int, Reads] = field(default_factory=dict, repr=False, compare=False)
    _slots: dict[tuple[int, int], SlotRanges] = field(default_factory=dict, repr=False, compare=False)

    def slots(self, origin: int, distance: int) -> SlotRanges:
        """Slots of a shard that the rank `distance` up the ring reads."""
        key = origin, distance
        if key not in self._slots:
            near = origin in self._reads or self._may_touch(origin, distance)
            self._slots[key] = self._of_shard(origin).at(distance) if near else no_slots()
        return self._slots[key]

    def distances(self, origin: int) -> list[int]:
        """How many ranks up the ring the readers of a shard sit, ascending."""
        return np.unique(self._of_shard(origin).distances).tolist()

    def _of_shard(self, origin: int) -> Reads:
        if origin not in self._reads:
            runs = _runs_of_all(self.layout)
            readers = [*runs[origin + 1 :], *runs[:origin]]
            self._reads[origin] = find_reads(self.pattern, readers, runs[origin])
        return self._reads[origin]

    def _may_touch(self, origin: int, distance: int) -> bool:
        """False if the band of distances alone says that the rank reads nothing."""
        least, most = self.pattern.distance
        (q_first, q_last), (k_first, k_last) = (
            _hull(self.layout, rank) for rank in ((origin + distance) % self.layout.ring_size, origin)
        )
        return q_last - k_first >= least and q_first - k_last <= most


@dataclass(frozen=True)
class Walk:
    """The journey of all shards for one class of K/V heads; [Note: relays and departures].

    Attributes:
        reads: of the pattern and the layout concerned; walks that differ in their lanes may share it.
        kv_heads: the K/V heads of the class.
        lanes: how shards travel.
        prune: False sends every shard all the way, needed or not (for comparison).
    """

    reads: ReadsOfShards
    kv_heads: slice
    lanes: tuple[Lane, ...]
    prune: bool = True

    @property
    def pattern(self) -> Pattern:
        """Bound to the query heads of one K/V head."""
        return self.reads.pattern

    @property
    def layout(self) -> Layout:
        """Which token lies where."""
        return self.reads.layout

    def held(self, origin: int, lane: Lane, hop: int) -> SlotRanges:
        """Slots of a shard that are at the rank of `hop`: what it reads, at hop 0 all."""
        valid = self.layout.valid_tokens(origin)
        if hop == 0 or (not self.prune and 0 < hop <= lane.limit):
            return np.array([[0, valid]]) if valid else no_slots()
        if hop > lane.limit:
            return no_slots()
        return self.reads.slots(origin, hop * lane.direction % self.layout.ring_size)

    def relayed(self, origin: int, lane: Lane, hop: int) -> SlotRanges:
        """Those of `held` that the rank of the hop before holds, too, and hands on."""
        return intersect_slots(self.held(origin, lane, hop), self.held(origin, lane, hop - 1))

    def _hops(self, origin: int, lane: Lane) -> Iterator[int]:
        """The hops of a lane, from 1 on, at which something of a shard is read."""
        if not self.prune:
            yield from range(1, lane.limit + 1)
            return
        size = self.layout.ring_size
        hops = (distance * lane.direction % size for distance in self.reads.distances(origin))
        yield from (hop for hop in hops if hop <= lane.limit)

    def tokens_sent(self, origin: int) -> int:
        """Tokens that travel for one shard in a forward pass, over all hops and lanes, per K/V head."""
        return sum(
            count_slots(self.held(origin, lane, hop))
            for lane in self.lanes
            for hop in self._hops(origin, lane)
        )

    def links(self, origin: int) -> int:
        """Tokens times links of the ring that they cross: one for a relay, s for a departure to hop s."""
        total = 0
        for lane in self.lanes:
            for hop in self._hops(origin, lane):
                relayed = count_slots(self.relayed(origin, lane, hop))
                total += relayed + hop * (count_slots(self.held(origin, lane, hop)) - relayed)
        return total

    def tokens_needed(self, origin: int) -> int:
        """The least that must cross for one shard: the number of (token, other rank that reads it)."""
        return sum(count_slots(self.reads.slots(origin, d)) for d in self.reads.distances(origin))

    def rank(self, ring_rank: int) -> WalkPlan:
        """The part of one rank."""
        lanes = tuple(self._lane(ring_rank, lane) for lane in self.lanes)
        return WalkPlan(self.kv_heads, lanes, max(lane.limit for lane in self.lanes))

    def _lane(self, ring_rank: int, lane: Lane) -> LanePlan:
        visits = [self._visit(ring_rank, lane, hop) for hop in range(lane.limit + 1)]
        while len(visits) > 1 and visits[-1] is None:
            visits.pop()
        departures, homecomings = [], []
        for hop in range(1, lane.limit + 1):
            held = self.held(ring_rank, lane, hop)
            if not len(held):
                continue
            reader = (ring_rank + lane.direction * hop) % self.layout.ring_size
            leaving = subtract_slots(held, self.relayed(ring_rank, lane, hop))
            if len(leaving):
                departures.append(Departure(hop, reader, leaving))
            ending = subtract_slots(held, self.relayed(ring_rank, lane, hop + 1))
            if len(ending):
                homecomings.append(Homecoming(hop, reader, ending))
        return LanePlan(tuple(visits), tuple(departures), tuple(homecomings))

    def _visit(self, ring_rank: int, lane: Lane, hop: int) -> Visit | None:
        size, step = self.layout.ring_size, lane.direction
        origin = (ring_rank - step * hop) % size
        held = self.held(origin, lane, hop)
        if hop and not len(held):
            return None
        relayed = self.relayed(origin, lane, hop) if hop else no_slots()
        forward = self.relayed(origin, lane, hop + 1)
        tiles = self.pattern.tiles(self.layout.runs(ring_rank), self.layout.runs(origin))
        if hop and len(tiles):
            tiles = tiles_of_payload(tiles, held)
        came_from, goes_to = (ring_rank - step) % size, (ring_rank + step) % size
        return Visit(hop, origin, came_from, goes_to, held, relayed, forward, tiles)


@lru_cache(maxsize=16)
def _runs_of_all(layout: Layout) -> tuple[IntArray, ...]:
    """The runs of every rank: asked for by every shard, so built once."""
    return tuple(layout.runs(rank) for rank in range(layout.ring_size))


@lru_cache(maxsize=1 << 14)
def _hull(layout: Layout, ring_rank: int) -> tuple[int, int]:
    """First and last position of a shard; first beyond last where it is empty."""
    runs = _runs_of_all(layout)[ring_rank]
    if not len(runs):
        return 1 << 62, -(1 << 62)
    return int(runs[:, 0].min()), int((runs[:, 0] + (runs[:, 2] - 1) * runs[:, 1]).max())
