"""The plan: for every rank and hop which tiles are computed and which tokens travel. Pure data.

Owns the schedule of a ring pass; holds no process group, tensor or device, so that real ranks, the
simulator, the cost model and the plots all walk the same object.

[Note: reach]
A shard of origin o visits ring ranks o, o+d, o+2d, ... (d the direction, +1 or -1). What a rank receives is
exactly what it or a rank after it still reads. So one number per slot says everything: its reach, the
farthest hop at which a tile reads it. Slots with reach >= s are held at hop s; a shard whose reach is
exhausted stops; the tokens sent in total are the sum of the reaches. Computing the reach of one shard
takes one vectorised look at the tiles of all readers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np

from ds_ring.errors import RingLayoutError
from ds_ring.schedule.layout import IntArray, Layout
from ds_ring.schedule.pattern import Pattern
from ds_ring.schedule.tiles import Tiles

SlotRanges = np.ndarray  # int64 [n, 2] of [start, end), ascending, disjoint, not touching


def count_slots(ranges: SlotRanges) -> int:
    """Number of slots in a set of ranges."""
    return int((ranges[:, 1] - ranges[:, 0]).sum())


def subtract_slots(whole: SlotRanges, part: SlotRanges) -> SlotRanges:
    """The slots of `whole` that are not in its subset `part`."""
    edges = np.concatenate([whole[:, 0], part[:, 1]]), np.concatenate([part[:, 0], whole[:, 1]])
    start, end = np.sort(edges[0]), np.sort(edges[1])
    keep = end > start
    return np.stack([start[keep], end[keep]], axis=1)


def locate_slots(slots: IntArray, within: SlotRanges) -> IntArray:
    """Where slots lie once the ranges `within` are packed one after the other."""
    lengths = within[:, 1] - within[:, 0]
    offset = np.cumsum(lengths) - lengths
    row = np.searchsorted(within[:, 0], slots, side="right") - 1
    return slots - within[row, 0] + offset[row]


def locate_ranges(ranges: SlotRanges, within: SlotRanges) -> SlotRanges:
    """`locate_slots` for whole ranges, each of which lies inside one range of `within`."""
    start = locate_slots(ranges[:, 0], within)
    return np.stack([start, start + ranges[:, 1] - ranges[:, 0]], axis=1)


def _no_slots() -> SlotRanges:
    return np.empty((0, 2), dtype=np.int64)


@dataclass(frozen=True)
class Visit:
    """One hop on one rank: the shard of `origin` (what of it is still needed) is here.

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
        """Attended (query, key) pairs of this hop, per head."""
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
class RankPlan:
    """All that one ring rank does in a pass.

    Attributes:
        ring_rank: whose plan this is.
        visits: by hop, without gaps; a hop at which nothing is held is None.
        homecomings: by ascending hop.
    """

    ring_rank: int
    visits: tuple[Visit | None, ...]
    homecomings: tuple[Homecoming, ...]

    def visit(self, hop: int) -> Visit | None:
        """The visit of a hop, None where there is none."""
        return self.visits[hop] if 0 <= hop < len(self.visits) else None

    @cached_property
    def hops(self) -> int:
        """Hops at which this rank computes, receives or forwards."""
        return len(self.visits)

    @cached_property
    def backward_batches(self) -> int:
        """Batches of the backward pass: those of the forward and those that bring gradients home."""
        last_home = self.homecomings[-1].hop + 1 if self.homecomings else 0
        last_send = len(self.visits) if len(self.visits) > 1 else 0
        return max(last_home, last_send, len(self.visits) - 1) + 1

    @property
    def pairs(self) -> int:
        """Attended pairs of this rank, per head."""
        return sum(visit.pairs for visit in self.visits if visit is not None)

    @property
    def tokens_received(self) -> int:
        """Tokens (a K and a V vector of every K/V head each) that arrive in a forward pass."""
        return sum(count_slots(v.held) for v in self.visits[1:] if v is not None)

    @property
    def tokens_sent(self) -> int:
        """Tokens that leave in a forward pass."""
        return sum(count_slots(v.forward) for v in self.visits if v is not None)


@dataclass(frozen=True)
class Plan:
    """pattern x layout, ready to be walked; build with `build_plan`.

    Attributes:
        pattern, layout: what it was built from.
        query_heads, kv_heads: heads per rank (H and G).
        direction: +1 if shards travel from rank o to o+1, -1 if to o-1.
        prune: False sends every shard all the way round, needed or not (for comparison).
    """

    pattern: Pattern
    layout: Layout
    query_heads: int = 1
    kv_heads: int = 1
    direction: int = 1
    prune: bool = True
    _ranks: dict[int, RankPlan] = field(default_factory=dict, repr=False, compare=False)
    _reaches: dict[int, tuple[IntArray, IntArray]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def ring_size(self) -> int:
        """Number of ranks P."""
        return self.layout.ring_size

    def rank(self, ring_rank: int) -> RankPlan:
        """The plan of one rank, built when first asked for."""
        if ring_rank not in self._ranks:
            self._ranks[ring_rank] = self._build_rank(ring_rank)
        return self._ranks[ring_rank]

    def held(self, origin: int, hop: int) -> SlotRanges:
        """Slots of a shard that are still needed at `hop` or later; [Note: reach]."""
        if hop >= self.ring_size:
            return _no_slots()
        edges, reach = self._reach(origin)
        alive = np.concatenate([[False], reach >= hop, [False]]) if len(reach) else np.zeros(2, dtype=bool)
        turns = np.flatnonzero(alive[1:] != alive[:-1])
        return edges[turns].reshape(-1, 2)

    @property
    def tokens_sent(self) -> int:
        """Tokens that travel in a forward pass, summed over ranks and hops."""
        return sum(
            int((np.diff(edges) * reach).sum()) for edges, reach in map(self._reach, range(self.ring_size))
        )

    def _reach(self, origin: int) -> tuple[IntArray, IntArray]:
        """Edges of slot intervals [n + 1] and the farthest hop that reads each [n] (0: nobody else does)."""
        if origin not in self._reaches:
            self._reaches[origin] = self._find_reach(origin)
        return self._reaches[origin]

    @cached_property
    def _all_runs(self) -> tuple[IntArray, IntArray]:
        """The runs of all ranks, one rank after the other [n, 3], and the rank of each [n]."""
        runs = [self.layout.runs(rank) for rank in range(self.ring_size)]
        return np.concatenate(runs), np.repeat(np.arange(self.ring_size), [len(r) for r in runs])

    def _find_reach(self, origin: int) -> tuple[IntArray, IntArray]:
        valid = self.layout.valid_tokens(origin)
        if not self.prune:
            return np.array([0, valid]), np.array([self.ring_size - 1])
        runs, ranks = self._all_runs
        hop_of_run = (ranks - origin) * self.direction % self.ring_size
        runs, hop_of_run = runs[hop_of_run > 0], hop_of_run[hop_of_run > 0]
        if not len(runs) or not valid:
            return np.array([0, valid]), np.array([0])
        table = self.pattern.tiles(runs, self.layout.runs(origin))
        first_slots = np.cumsum(runs[:, 2]) - runs[:, 2]
        hops = hop_of_run[np.searchsorted(first_slots, table.q.slot, side="right") - 1]
        return _farthest(table.k.slot, table.k.slot + table.k.length, hops, valid)

    def _build_rank(self, ring_rank: int) -> RankPlan:
        visits = [self._visit(ring_rank, hop) for hop in range(self.ring_size)]
        while len(visits) > 1 and visits[-1] is None:
            visits.pop()
        homecomings = []
        for hop in range(1, self.ring_size):
            slots = subtract_slots(self.held(ring_rank, hop), self.held(ring_rank, hop + 1))
            if len(slots):
                sender = (ring_rank + self.direction * hop) % self.ring_size
                homecomings.append(Homecoming(hop, sender, slots))
        return RankPlan(ring_rank, tuple(visits), tuple(homecomings))

    def _visit(self, ring_rank: int, hop: int) -> Visit | None:
        size, step = self.ring_size, self.direction
        origin = (ring_rank - step * hop) % size
        forward = self.held(origin, hop + 1)
        own = np.array([[0, self.layout.valid_tokens(origin)]])
        held = self.held(origin, hop) if hop else own
        if hop and not len(held):
            return None
        tiles = self.pattern.tiles(self.layout.runs(ring_rank), self.layout.runs(origin))
        if hop and len(tiles):
            tiles = replace(tiles, k=replace(tiles.k, slot=locate_slots(tiles.k.slot, held)))
        return Visit(hop, origin, (ring_rank - step) % size, (ring_rank + step) % size, held, forward, tiles)

    def summary(self) -> str:
        """A table for people: per rank and hop the tiles, pairs and tokens held and sent on."""
        lines = [
            f"{self.pattern} on {self.layout}; shards travel {'up' if self.direction > 0 else 'down'}",
            "rank hop origin   tiles          pairs   tokens held   sent on",
        ]
        for ring_rank in range(self.ring_size):
            for visit in filter(None, self.rank(ring_rank).visits):
                lines.append(
                    f"{ring_rank:4d} {visit.hop:3d} {visit.origin:6d} {len(visit.tiles):7d}"
                    f" {visit.pairs:14d} {count_slots(visit.held):13d} {count_slots(visit.forward):9d}"
                )
        return "\n".join(lines)


def _farthest(start: IntArray, end: IntArray, hop: IntArray, valid: int) -> tuple[IntArray, IntArray]:
    """The largest hop over all ranges [start, end) that cover each elementary interval of 0 .. valid."""
    keys, inverse = np.unique(np.stack([start, end], axis=1), axis=0, return_inverse=True)
    farthest = np.zeros(len(keys), dtype=np.int64)
    np.maximum.at(farthest, inverse.reshape(-1), hop)
    edges = np.unique(np.concatenate([[0, valid], keys.reshape(-1)]))
    reach = np.zeros(len(edges) - 1, dtype=np.int64)
    first, last = np.searchsorted(edges, keys[:, 0]), np.searchsorted(edges, keys[:, 1])
    for row in np.argsort(farthest):
        reach[first[row] : last[row]] = farthest[row]
    return edges, reach


@lru_cache(maxsize=64)
def build_plan(
    pattern: Pattern,
    layout: Layout,
    *,
    query_heads: int = 1,
    kv_heads: int = 1,
    prune: bool = True,
    direction: int | None = None,
) -> Plan:
    """Plan a ring pass.

    Args:
        pattern: what attends to what.
        layout: which token lies where.
        query_heads, kv_heads: H and G, heads per rank; H must be a multiple of G.
        prune: send only what the receiver or a rank after it reads.
        direction: +1 or -1; None takes the one that sends less (up on a tie).

    Raises:
        RingLayoutError: H is not a multiple of G, or the direction is neither +1 nor -1.
    """
    if kv_heads < 1 or query_heads % kv_heads:
        raise RingLayoutError(
            f"query heads must be a multiple of K/V heads: got {query_heads} and {kv_heads};"
            " use a number of query heads that K/V heads divide (GQA)"
        )
    if direction not in (None, 1, -1):
        raise RingLayoutError(f"direction: expected +1, -1 or None, got {direction!r}")
    if direction is not None or layout.ring_size <= 2 or not prune:
        return Plan(pattern, layout, query_heads, kv_heads, direction or 1, prune)
    plans = [Plan(pattern, layout, query_heads, kv_heads, way, prune) for way in (1, -1)]
    return min(plans, key=lambda plan: plan.tokens_sent)
