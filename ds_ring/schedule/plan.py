"""The plan: for every rank and hop which tiles are computed and which tokens travel. Pure data.

Owns the schedule of a ring pass; holds no process group, tensor or device, so that real ranks, the
simulator, the cost model and the plots all walk the same object.

A plan is one walk for each class of K/V heads that are read alike (a dilated pattern may give every head its
own offset), a walk is one or two lanes (directions of travel), and a lane is, on each rank, a visit a hop.

[Note: reach]
In a lane with direction d the shard of origin o visits ring ranks o + d, o + 2d, ... What a rank receives is
exactly what it or a rank after it still reads. So one number per slot says everything: its reach, the
farthest hop at which a tile reads it. Slots with reach >= s are held at hop s; a shard whose reach is
exhausted stops; the tokens sent in total are the sum of the reaches. Computing the reach of one shard
takes one vectorised look at the tiles of all readers. With two lanes every reader is served from the nearer
side, which is what a pattern that looks both ways needs; the lanes that send least are taken.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from ds_ring.errors import RingLayoutError, RingPatternError
from ds_ring.schedule.layout import IntArray, Layout
from ds_ring.schedule.pattern import Pattern
from ds_ring.schedule.payload import Reads, find_reach, find_reads, tiles_of_payload
from ds_ring.schedule.slots import (
    SlotRanges,
    count_slots,
    expand_ranges,
    locate_ranges,
    locate_slots,
    no_slots,
    subtract_slots,
)
from ds_ring.schedule.tiles import Tiles

SAMPLED_ORIGINS = 8  # of large rings only so many shards are looked at to choose the lanes


class Lane(NamedTuple):
    """One direction of travel: shards go from rank o to o + direction, for at most `limit` hops."""

    direction: int
    limit: int


@dataclass(frozen=True)
class Visit:
    """One hop of a lane on one rank: the shard of `origin` (what of it is still needed) is here.

    Attributes:
        hop: s; at hop 0 the rank works on its own shard, in place.
        origin: ring rank whose keys and values these are.
        came_from, goes_to: ring neighbours on the shard's way.
        held: slots of the origin's shard that are here, packed in ascending order (hop 0: in place).
        forward: the subset that travels on; what remains of `held` ends its journey here, and its
            dK/dV go home from here.
        tiles: what this rank computes with it; key slots index the packed payload. May be empty.
    """

    hop: int
    origin: int
    came_from: int
    goes_to: int
    held: SlotRanges
    forward: SlotRanges
    tiles: Tiles

    @property
    def ends_here(self) -> SlotRanges:
        """Slots of the origin's shard that travel no further."""
        return subtract_slots(self.held, self.forward)

    @property
    def forward_in_payload(self) -> SlotRanges:
        """`forward` as ranges of the packed payload."""
        return locate_ranges(self.forward, self.held)

    @property
    def ends_here_in_payload(self) -> SlotRanges:
        """`ends_here` as ranges of the packed payload."""
        return locate_ranges(self.ends_here, self.held)

    @property
    def pairs(self) -> int:
        """Rows of the attention matrix times keys, as the tiles have them (members counted apart)."""
        return int(self.tiles.pairs.sum())


@dataclass(frozen=True)
class Homecoming:
    """dK/dV of some of this rank's own slots, sent home by the rank where their journey ended.

    Attributes:
        hop: the hop at which the journey ended; the message is in the batch after it.
        sender: ring rank that sends.
        slots: own slots concerned.
    """

    hop: int
    sender: int
    slots: SlotRanges


@dataclass(frozen=True)
class LanePlan:
    """One lane on one rank.

    Attributes:
        visits: by hop, without gaps; a hop at which nothing is held is None. Hop 0 is the own shard.
        homecomings: by ascending hop.
    """

    visits: tuple[Visit | None, ...]
    homecomings: tuple[Homecoming, ...]

    def visit(self, hop: int) -> Visit | None:
        """The visit of a hop, None where there is none."""
        return self.visits[hop] if 0 <= hop < len(self.visits) else None

    @property
    def hops(self) -> int:
        """Hops at which this rank computes, receives or forwards."""
        return len(self.visits)

    @cached_property
    def backward_batches(self) -> int:
        """Batches of the backward pass: those of the forward and those that bring gradients home."""
        last_home = self.homecomings[-1].hop + 1 if self.homecomings else 0
        last_send = len(self.visits) if len(self.visits) > 1 else 0
        return max(last_home, last_send) + 1


@dataclass(frozen=True)
class WalkPlan:
    """What one rank does for one class of heads.

    Attributes:
        kv_heads: the K/V heads of the class, a slice of all of them.
        lanes: one or two; only the first computes the own shard (hop 0).
    """

    kv_heads: slice
    lanes: tuple[LanePlan, ...]

    @property
    def visits(self) -> list[Visit]:
        """Every visit at which something is computed, held or sent on, hop by hop."""
        own = [v for v in self.lanes[0].visits[:1] if v is not None]
        return own + [v for lane in self.lanes for v in lane.visits[1:] if v is not None]

    def pairs(self, group: int) -> int:
        """Attended pairs per K/V head: over the `group` query heads that share it."""
        total = 0
        for visit in self.visits:
            heads = np.where(visit.tiles.member < 0, group, 1)
            total += int((visit.tiles.pairs * heads).sum())
        return total

    @property
    def tokens_received(self) -> int:
        """Tokens that arrive in a forward pass, per K/V head."""
        return sum(count_slots(v.held) for v in self.visits if v.hop)

    @property
    def tokens_sent(self) -> int:
        """Tokens that leave in a forward pass, per K/V head."""
        first = [count_slots(lane.visits[0].forward) for lane in self.lanes if lane.visits[0] is not None]
        return sum(first) + sum(count_slots(v.forward) for v in self.visits if v.hop)


@dataclass(frozen=True)
class RankPlan:
    """All that one ring rank does in a pass.

    Attributes:
        ring_rank: whose plan this is.
        walks: one for each class of heads, one after the other.
        group: query heads that share a K/V head.
        kv_heads: number of K/V heads G.
    """

    ring_rank: int
    walks: tuple[WalkPlan, ...]
    group: int
    kv_heads: int

    def _total(self, amounts: list[int]) -> int:
        heads = [len(range(self.kv_heads)[walk.kv_heads]) for walk in self.walks]
        return sum(amount * count for amount, count in zip(amounts, heads, strict=True))

    @property
    def pairs(self) -> int:
        """Attended (query, key) pairs of this rank, over all query heads."""
        return self._total([walk.pairs(self.group) for walk in self.walks])

    @property
    def tokens_received(self) -> int:
        """Token-units (K and V of one token of one head) that arrive in a forward pass."""
        return self._total([walk.tokens_received for walk in self.walks])

    @property
    def tokens_sent(self) -> int:
        """Token-units that leave in a forward pass."""
        return self._total([walk.tokens_sent for walk in self.walks])


@dataclass(frozen=True)
class Walk:
    """The journey of all shards for one class of K/V heads.

    Attributes:
        pattern: bound to the query heads of one K/V head.
        layout: which token lies where.
        kv_heads: the K/V heads of the class.
        lanes: how shards travel.
        prune: False sends every shard all the way, needed or not (for comparison).
    """

    pattern: Pattern
    layout: Layout
    kv_heads: slice
    lanes: tuple[Lane, ...]
    prune: bool = True
    _reads: dict[int, Reads] = field(default_factory=dict, repr=False, compare=False)
    _reaches: dict[tuple[int, Lane], tuple[IntArray, IntArray]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def held(self, origin: int, lane: Lane, hop: int) -> SlotRanges:
        """Slots of a shard that are still needed at `hop` of a lane or later; [Note: reach]."""
        if hop > lane.limit or (self.prune and hop > self._reach_bound(origin, lane)):
            return no_slots()
        edges, reach = self.reach(origin, lane)
        alive = np.concatenate([[False], reach >= hop, [False]])
        turns = np.flatnonzero(alive[1:] != alive[:-1])
        return edges[turns].reshape(-1, 2)

    def reach(self, origin: int, lane: Lane) -> tuple[IntArray, IntArray]:
        """Edges of slot intervals [n + 1] and the farthest hop that reads each [n] (0: nobody else does)."""
        key = origin, lane
        if key not in self._reaches:
            self._reaches[key] = self._find_reach(origin, lane)
        return self._reaches[key]

    def _reach_bound(self, origin: int, lane: Lane) -> int:
        """A hop beyond which certainly nobody reads: distances alone, without looking at tiles."""
        least, most = self.pattern.distance
        own = self.layout.runs(origin)
        if not len(own):
            return 0
        ranks, first, last = _hulls(self.layout)
        touches = (last - own[:, 0].min() >= least) & (first - _last(own).max() <= most)
        hops = (ranks[touches] - origin) * lane.direction % self.layout.ring_size
        return int(hops.max(initial=0))

    def tokens_sent(self, origin: int) -> int:
        """Tokens that travel for one shard in a forward pass, over all hops and lanes, per K/V head."""
        reaches = [self.reach(origin, lane) for lane in self.lanes]
        return sum(int((np.diff(edges) * reach).sum()) for edges, reach in reaches)

    def tokens_needed(self, origin: int) -> int:
        """The least that must cross for one shard: the number of (token, other rank that reads it)."""
        reads, valid, total = self.reads(origin), self.layout.valid_tokens(origin), 0
        for hop in np.unique(reads.hops):
            read = np.zeros(valid, dtype=bool)
            for slot, step, length in reads.slots[reads.hops == hop].tolist():
                read[slot : slot + (length - 1) * step + 1 : step] = True
            total += int(read.sum())
        return total

    def reads(self, origin: int) -> Reads:
        """What the other ranks read of a shard."""
        if origin not in self._reads:
            runs = _runs_of_all(self.layout)
            readers = [*runs[origin + 1 :], *runs[:origin]]
            self._reads[origin] = find_reads(self.pattern, readers, self.layout.runs(origin))
        return self._reads[origin]

    def _find_reach(self, origin: int, lane: Lane) -> tuple[IntArray, IntArray]:
        valid, size = self.layout.valid_tokens(origin), self.layout.ring_size
        if not self.prune or size == 1 or not valid:
            farthest = lane.limit if valid else 0
            return np.array([0, valid]), np.array([farthest])
        reads = self.reads(origin)
        hops = reads.hops if lane.direction > 0 else size - reads.hops
        return find_reach(reads, np.where(hops <= lane.limit, hops, 0), valid)

    def rank(self, ring_rank: int) -> WalkPlan:
        """The part of one rank."""
        return WalkPlan(self.kv_heads, tuple(self._lane(ring_rank, lane) for lane in self.lanes))

    def _lane(self, ring_rank: int, lane: Lane) -> LanePlan:
        visits = [self._visit(ring_rank, lane, hop) for hop in range(lane.limit + 1)]
        while len(visits) > 1 and visits[-1] is None:
            visits.pop()
        homecomings = []
        for hop in range(1, lane.limit + 1):
            slots = subtract_slots(self.held(ring_rank, lane, hop), self.held(ring_rank, lane, hop + 1))
            if len(slots):
                sender = (ring_rank + lane.direction * hop) % self.layout.ring_size
                homecomings.append(Homecoming(hop, sender, slots))
        return LanePlan(tuple(visits), tuple(homecomings))

    def _visit(self, ring_rank: int, lane: Lane, hop: int) -> Visit | None:
        size, step = self.layout.ring_size, lane.direction
        origin = (ring_rank - step * hop) % size
        forward = self.held(origin, lane, hop + 1)
        held = self.held(origin, lane, hop) if hop else np.array([[0, self.layout.valid_tokens(origin)]])
        if hop and not len(held):
            return None
        tiles = self.pattern.tiles(self.layout.runs(ring_rank), self.layout.runs(origin))
        if hop and len(tiles):
            tiles = tiles_of_payload(tiles, held, self.pattern.distance)
        return Visit(hop, origin, (ring_rank - step) % size, (ring_rank + step) % size, held, forward, tiles)


@dataclass(frozen=True)
class Plan:
    """pattern x layout, ready to be walked; build with `build_plan`.

    Attributes:
        pattern, layout: what it was built from.
        query_heads, kv_heads: heads per rank (H and G).
        walks: one for each class of heads.
    """

    pattern: Pattern
    layout: Layout
    query_heads: int
    kv_heads: int
    walks: tuple[Walk, ...]
    _ranks: dict[int, RankPlan] = field(default_factory=dict, repr=False, compare=False)

    @property
    def ring_size(self) -> int:
        """Number of ranks P."""
        return self.layout.ring_size

    @property
    def group(self) -> int:
        """Query heads that share a K/V head."""
        return self.query_heads // self.kv_heads

    def rank(self, ring_rank: int) -> RankPlan:
        """The plan of one rank, built when first asked for."""
        if ring_rank not in self._ranks:
            walks = tuple(walk.rank(ring_rank) for walk in self.walks)
            self._ranks[ring_rank] = RankPlan(ring_rank, walks, self.group, self.kv_heads)
        return self._ranks[ring_rank]

    def _over_heads(self, per_walk: list[int]) -> int:
        heads = [len(range(self.kv_heads)[walk.kv_heads]) for walk in self.walks]
        return sum(amount * count for amount, count in zip(per_walk, heads, strict=True))

    @property
    def tokens_sent(self) -> int:
        """Token-units that travel in a forward pass, summed over ranks, hops and K/V heads."""
        origins = range(self.ring_size)
        return self._over_heads([sum(map(walk.tokens_sent, origins)) for walk in self.walks])

    @property
    def tokens_needed(self) -> int:
        """Token-units that must cross at the least: each token once to every other rank that reads it."""
        origins = range(self.ring_size)
        return self._over_heads([sum(map(walk.tokens_needed, origins)) for walk in self.walks])

    def summary(self) -> str:
        """A table for people: per rank, head class, and hop the tiles, pairs and tokens held and sent on."""
        lines = [f"{self.pattern} on {self.layout}"]
        for walk in self.walks:
            ways = " and ".join("up" if lane.direction > 0 else "down" for lane in walk.lanes)
            heads = list(range(self.kv_heads)[walk.kv_heads])
            lines += [f"K/V heads {heads}: shards travel {ways}"]
            lines += ["rank hop origin   tiles          pairs   tokens held   sent on"]
            for ring_rank in range(self.ring_size):
                for visit in walk.rank(ring_rank).visits:
                    lines.append(
                        f"{ring_rank:4d} {visit.hop:3d} {visit.origin:6d} {len(visit.tiles):7d}"
                        f" {visit.pairs:14d} {count_slots(visit.held):13d} {count_slots(visit.forward):9d}"
                    )
        return "\n".join(lines)


def _last(runs: IntArray) -> IntArray:
    return runs[:, 0] + (runs[:, 2] - 1) * runs[:, 1]


@lru_cache(maxsize=16)
def _runs_of_all(layout: Layout) -> tuple[IntArray, ...]:
    """The runs of every rank: asked for by every shard, so built once."""
    return tuple(layout.runs(rank) for rank in range(layout.ring_size))


@lru_cache(maxsize=16)
def _hulls(layout: Layout) -> tuple[IntArray, IntArray, IntArray]:
    """Ring rank, first and last position of every run of every rank."""
    runs = _runs_of_all(layout)
    ranks = np.repeat(np.arange(layout.ring_size), [len(r) for r in runs])
    together = np.concatenate(runs)
    return ranks, together[:, 0], _last(together)


def head_classes(pattern: Pattern, query_heads: int, kv_heads: int) -> list[tuple[slice, Pattern]]:
    """K/V heads that are read alike, as slices, with the pattern of the query heads that share one."""
    group = query_heads // kv_heads
    classes: dict[Pattern, list[int]] = defaultdict(list)
    for head in range(kv_heads):
        sharing = tuple(range(head * group, (head + 1) * group))
        classes[pattern.bind(sharing, query_heads, kv_heads)].append(head)
    return [(part, bound) for bound, heads in classes.items() for part in _slices(heads, group)]


def query_heads_of(kv_heads: slice, group: int) -> slice:
    """The query heads that share the K/V heads of a slice."""
    if group == 1:
        return kv_heads
    return slice(kv_heads.start * group, kv_heads.stop * group)


def _slices(heads: list[int], group: int) -> list[slice]:
    """A list of K/V heads as slices, such that the query heads that share them are a slice as well."""
    steps = set(np.diff(heads).tolist()) or {1}
    if len(steps) == 1 and (group == 1 or steps == {1}):
        return [slice(heads[0], heads[-1] + 1, steps.pop())]
    return [slice(head, head + 1, 1) for head in heads]


def sampled_origins(size: int) -> list[int]:
    """Shards that stand for all of a ring when costs are compared; all of them up to 16."""
    count = SAMPLED_ORIGINS if size > 16 else size
    return sorted({size * i // count for i in range(count)} | {size - 1})


def choose_lanes(
    pattern: Pattern, layout: Layout, prune: bool = True, reads: dict[int, Reads] | None = None
) -> tuple[Lane, ...]:
    """The lanes that send least; up on a tie, one rather than two. `reads` keeps what was looked at."""
    size = layout.ring_size
    one_way = [(Lane(1, size - 1),), (Lane(-1, size - 1),)]
    if size <= 2 or not prune:
        return one_way[0]
    both_ways = (Lane(1, size // 2), Lane(-1, (size - 1) // 2))
    origins = sampled_origins(size)
    reads = {} if reads is None else reads
    walks = [Walk(pattern, layout, slice(0, 1), lanes, True, reads) for lanes in (*one_way, both_ways)]
    return min(walks, key=lambda walk: sum(map(walk.tokens_sent, origins))).lanes


def check_length(pattern: Pattern, layout: Layout) -> None:
    """RingPatternError unless the pattern is one for the layout's sequence.

    Queries that are on every rank may know less of a cache than it has room for: those are not checked.
    """
    for tokens in pattern.known_tokens:
        if tokens != layout.tokens:
            raise RingPatternError(
                f"{pattern}: expected a pattern of {layout.tokens} tokens, as the layout, got one of"
                f" {tokens}; give document ids for every token, negative for padding, or make the layout with"
                f" tokens={tokens}"
            )


@lru_cache(maxsize=64)
def build_plan(
    pattern: Pattern,
    layout: Layout,
    *,
    query_heads: int = 1,
    kv_heads: int = 1,
    prune: bool = True,
    lanes: tuple[Lane, ...] | None = None,
) -> Plan:
    """Plan a ring pass.

    Args:
        pattern: what attends to what.
        layout: which token lies where.
        query_heads, kv_heads: H and G, heads per rank; H must be a multiple of G.
        prune: send only what the receiver or a rank after it reads.
        lanes: directions of travel; None takes those that send least.

    Raises:
        RingLayoutError: H is not a multiple of G.
        RingPatternError: the pattern is for sequences of another length.
    """
    check_length(pattern, layout)
    if kv_heads < 1 or query_heads % kv_heads:
        raise RingLayoutError(
            f"query heads must be a multiple of K/V heads: got {query_heads} and {kv_heads};"
            " use a number of query heads that K/V heads divide (GQA)"
        )
    walks = []
    for heads, bound in head_classes(pattern, query_heads, kv_heads):
        reads: dict[int, Reads] = {}
        taken = lanes if lanes is not None else choose_lanes(bound, layout, prune, reads)
        walks.append(Walk(bound, layout, heads, taken, prune, reads))
    return Plan(pattern, layout, query_heads, kv_heads, tuple(walks))


__all__ = [
    "Lane",
    "LanePlan",
    "Plan",
    "RankPlan",
    "SlotRanges",
    "Visit",
    "Walk",
    "WalkPlan",
    "build_plan",
    "count_slots",
    "expand_ranges",
    "head_classes",
    "locate_slots",
    "query_heads_of",
    "subtract_slots",
]
