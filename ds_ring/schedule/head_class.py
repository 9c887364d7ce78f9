"""Who reads what of every shard, and who sends it, for one class of heads. Index arithmetic.

[Note: relays and direct sends]
In a direction with sign d the shard of origin o is at hop s the matter of ring rank o + d * s. That rank
gets exactly what it reads, once: from its neighbour, if the neighbour reads it as well and so has it in hand
from the hop before (a relay), else from the origin, which always has it (a direct send). So what crosses is
the least that must: each token of each K/V head once to every other rank that reads it. Handing everything
on from neighbour to neighbour would carry tokens through ranks that only pass them on: up to 16 % more for
LongNet on zigzag shards, 45 % for a window on small pieces. Nothing waits anywhere: direct sends leave from
the shard itself. Contiguous shards under dense, windowed and dilated patterns, and zigzag shards under a
dense causal one, have no direct sends: there every message goes to a neighbour.
The bytes are the same whichever way shards go; the way is chosen by the links that tokens cross (`links`).

[Note: where gradients are added]
In float32 the sum of a token's dK and dV is handed on with its keys, and each rank adds its own part. Rounded
to bfloat16 at every hop that sum would lose a bit for every fourfold number of ranks: the error of 64 ranks
is 5.5 to 5.9 times that of one. So with a bfloat16 payload nobody hands sums on between nodes, or in one
ring of all: each rank returns its own part to the owner, who adds in float32. Every part is rounded once, and
the same bytes cross: 1.3 times the error of one rank, whatever the ring size. Inside a node, whose links are
fast, sums are handed on in float32 and only what returns to the owner is rounded.

[Note: what direct sends cost]
The traffic of a plan is the least that must cross, in every layout. Where readers are not neighbours (LongNet
on zigzag shards: 2 to 9 % of the tokens; a window on small pieces: up to 30 %), messages go to ranks that are
further away. On a network that is nothing but a ring of links these tokens cross as many links as if they
were relayed (LongNet), or 9 to 37 % more (windows).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from ds_ring.masks.pattern import Pattern
from ds_ring.masks.slot_ranges import SlotRanges, count_slots, intersect_slots, no_slots, subtract_slots
from ds_ring.schedule.layout import IntArray, Layout
from ds_ring.schedule.payload import Reads, find_reads, tiles_of_payload
from ds_ring.schedule.rank_plan import (
    Direction,
    DirectionPlan,
    DirectSend,
    GradientReturn,
    HeadClassPlan,
    HopPlan,
)


@dataclass(frozen=True)
class ReadsOfShards:
    """Find what every rank reads of every shard of a layout; looked at when first asked for, and kept.

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
            # finding a shard's reads makes tiles for all ranks: not done where the band rules the reader out
            near = origin in self._reads or self._may_touch(origin, distance)
            self._slots[key] = self._of_shard(origin).at(distance) if near else no_slots()
        return self._slots[key]

    def distances(self, origin: int) -> list[int]:
        """Return how many ranks up the ring the readers of a shard sit, ascending."""
        return np.unique(self._of_shard(origin).distances).tolist()

    def _of_shard(self, origin: int) -> Reads:
        if origin not in self._reads:
            runs = _runs_of_all(self.layout)
            # in the order of their distance 1, 2, ... up the ring
            readers = [*runs[origin + 1 :], *runs[:origin]]
            self._reads[origin] = find_reads(self.pattern, readers, runs[origin])
        return self._reads[origin]

    def _may_touch(self, origin: int, distance: int) -> bool:
        """Return False if the band of distances alone says that the rank reads nothing."""
        least, most = self.pattern.distance
        (q_first, q_last), (k_first, k_last) = (
            _hull(self.layout, rank) for rank in ((origin + distance) % self.layout.ring_size, origin)
        )
        return q_last - k_first >= least and q_first - k_last <= most


@dataclass(frozen=True)
class HeadClass:
    """Say how all shards travel for one class of K/V heads; [Note: relays and direct sends].

    Attributes:
        reads: of the pattern and the layout concerned; classes that differ in their directions may share it.
        kv_heads: the K/V heads of the class.
        directions: how shards travel.
        prune: False sends every shard all the way, needed or not (for comparison).
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
        """Return the slots of a shard that are at the rank of `hop`: what it reads, at hop 0 all."""
        if hop == 0 or (not self.prune and 0 < hop <= direction.limit):
            valid = self.layout.valid_tokens(origin)
            return np.array([[0, valid]]) if valid else no_slots()
        if hop > direction.limit:
            return no_slots()
        # reads go by the distance up the ring, hops by the direction of travel
        size = self.layout.ring_size
        return self.reads.slots(origin, (direction.reader(origin, hop, size) - origin) % size)

    def relayed(self, origin: int, direction: Direction, hop: int) -> SlotRanges:
        """Return those of `held` that the rank before it on the shard's way holds, too, and hands on."""
        before = direction.before(hop)
        return intersect_slots(self.held(origin, direction, hop), self.held(origin, direction, before))

    def sums(self, origin: int, direction: Direction, hop: int) -> SlotRanges:
        """Return the slots of whose gradients the rank of a hop gets a sum.

        [Note: where gradients are added]; the owner itself sends no sum: what it finds stays with it.
        """
        apart = self.rounded and not direction.ranks_per_node
        if hop <= 1 or apart or not direction.is_next(hop):
            return no_slots()
        return self.relayed(origin, direction, hop)

    def _hops(self, origin: int, direction: Direction) -> Iterator[int]:
        """Yield the hops of a direction, from 1 on, at which something of a shard is read."""
        if not self.prune:
            yield from range(1, direction.limit + 1)
            return
        size = self.layout.ring_size
        distances = self.reads.distances(origin)
        hops = (direction.hop(origin, (origin + distance) % size, size) for distance in distances)
        yield from (hop for hop in hops if hop <= direction.limit)

    def tokens_sent(self, origin: int) -> int:
        """Return the tokens that travel for one shard in a forward pass, over all hops, per K/V head."""
        return sum(
            count_slots(self.held(origin, direction, hop))
            for direction in self.directions
            for hop in self._hops(origin, direction)
        )

    def links(self, origin: int) -> int:
        """Return tokens times links that they cross: one for a relay, s for a direct send to hop s."""
        total = 0
        for direction in self.directions:
            for hop in self._hops(origin, direction):
                relayed = count_slots(self.relayed(origin, direction, hop))
                total += relayed + hop * (count_slots(self.held(origin, direction, hop)) - relayed)
        return total

    def busiest_adapter(self, origins: Iterable[int], ranks_per_node: int) -> int:
        """Return tokens that leave nodes through the network adapters of one place, the most of all places.

        Args:
            origins: whose shards count: all of a node, or of several.
            ranks_per_node: R; each rank has an adapter, and all nodes are alike.
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
        """Return the least that must cross for one shard: the number of (token, other rank that reads it)."""
        return sum(count_slots(self.reads.slots(origin, d)) for d in self.reads.distances(origin))

    def rank(self, ring_rank: int) -> HeadClassPlan:
        """Return the part of one rank."""
        directions = tuple(self._direction(ring_rank, direction) for direction in self.directions)
        return HeadClassPlan(self.kv_heads, directions, max(direction.limit for direction in self.directions))

    def _direction(self, ring_rank: int, direction: Direction) -> DirectionPlan:
        hops = [self._hop_plan(ring_rank, direction, hop) for hop in range(direction.limit + 1)]
        # only at the end: a hop's index in the tuple is its number
        while len(hops) > 1 and hops[-1] is None:
            hops.pop()
        direct_sends, gradient_returns = [], []
        for hop in range(1, direction.limit + 1):
            held = self.held(ring_rank, direction, hop)
            if not len(held):
                continue
            reader = direction.reader(ring_rank, hop, self.layout.ring_size)
            # what the rank before the reader does not have, this rank, the owner, sends
            leaving = subtract_slots(held, self.relayed(ring_rank, direction, hop))
            if len(leaving):
                direct_sends.append(DirectSend(hop, reader, leaving))
            # what the reader adds to no sum of the next one comes back from there
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
        # at hop 0 keys lie in place, so key slots are those of the shard already
        if hop and len(tiles):
            tiles = tiles_of_payload(tiles, held)
        enters = inner > 0 and hop % inner == 0  # the first in its node to have the shard
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
    """Return the runs of every rank: asked for by every shard, so built once."""
    return tuple(layout.runs(rank) for rank in range(layout.ring_size))


@lru_cache(maxsize=1 << 14)
def _hull(layout: Layout, ring_rank: int) -> tuple[int, int]:
    """Return the first and last position of a shard; first beyond last where it is empty."""
    runs = _runs_of_all(layout)[ring_rank]
    if not len(runs):
        # beyond UNBOUNDED: no band reaches an empty shard
        return 1 << 62, -(1 << 62)
    return int(runs[:, 0].min()), int((runs[:, 0] + (runs[:, 2] - 1) * runs[:, 1]).max())
