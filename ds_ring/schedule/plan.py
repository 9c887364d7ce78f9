"""The plan: for every rank and hop which tiles are computed and which tokens travel. Pure data.

Owns the schedule of a ring pass; holds no process group, tensor or device, so that real ranks, the
simulator, the cost model and the plots all walk the same object.

A plan is one walk for each class of K/V heads that are read alike (a dilated pattern may give every head its
own offset), a walk is one or two lanes (directions of travel), and a lane is, on each rank, a visit a hop.

Data of one rank are in `rank_plan.py`; who reads what, and how it gets there, in `walk.py`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from ds_ring.checked_numbers import MOST_HEADS, true_or_false, whole_number
from ds_ring.errors import RingLayoutError, RingPatternError, shown
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.slot_ranges import count_slots
from ds_ring.schedule.layout import Layout
from ds_ring.schedule.rank_plan import Lane, RankPlan
from ds_ring.schedule.walk import ReadsOfShards, Walk

SAMPLED_ORIGINS = 6  # of large rings only so many shards are looked at to choose the lanes


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


def head_classes(pattern: Pattern, query_heads: int, kv_heads: int) -> list[tuple[slice, Pattern]]:
    """K/V heads that are read alike, as slices, with the pattern of the query heads that share one."""
    group = query_heads // kv_heads
    classes: dict[Pattern, list[int]] = defaultdict(list)
    for head in range(kv_heads):
        sharing = tuple(range(head * group, (head + 1) * group))
        classes[pattern.bind(sharing, query_heads, kv_heads)].append(head)
    return [(part, bound) for bound, heads in classes.items() for part in _slices(heads, group)]


def _slices(heads: list[int], group: int) -> list[slice]:
    """A list of K/V heads as slices, such that the query heads that share them are a slice as well."""
    steps = set(np.diff(heads).tolist()) or {1}
    if len(steps) == 1 and (group == 1 or steps == {1}):
        return [slice(heads[0], heads[-1] + 1, steps.pop())]
    return [slice(head, head + 1, 1) for head in heads]


def sampled_origins(size: int) -> list[int]:
    """Shards that stand for all of a ring when costs are compared; all of them up to 16."""
    if size <= 16:
        return list(range(size))
    # spread by the golden ratio: at regular distances they would all lie at the same place of a segment
    return sorted({int(size * (i * 0.6180339887 % 1)) for i in range(SAMPLED_ORIGINS)} | {size - 1})


def one_way(size: int, direction: int = 1) -> tuple[Lane, ...]:
    """All shards of a ring travel in one direction."""
    return (Lane(direction, size - 1),)


def choose_lanes(reads: ReadsOfShards) -> tuple[Lane, ...]:
    """The lanes whose tokens cross the fewest links; up on a tie, one rather than two.

    What is sent is the same whichever way; [Note: relays and departures]. Two lanes serve every reader from
    the nearer side, which is what a pattern that looks both ways needs.
    """
    size = reads.layout.ring_size
    if size <= 2:
        return one_way(size)
    both_ways = (Lane(1, size // 2), Lane(-1, (size - 1) // 2))
    origins = sampled_origins(size)
    ways = (one_way(size), one_way(size, -1), both_ways)
    return min(ways, key=lambda way: sum(map(Walk(reads, slice(0, 1), way).links, origins)))


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
        prune: send only what the receiver reads.
        lanes: directions of travel; None takes those that cross the fewest links.

    Raises:
        RingLayoutError: H is not a multiple of G.
        RingPatternError: the pattern is for sequences of another length.
    """
    if not isinstance(pattern, Pattern):
        raise RingPatternError(
            f"build_plan: pattern: expected a pattern, got {shown(pattern)}; use ds_ring.Causal(), say"
        )
    if not isinstance(layout, Layout):
        raise RingLayoutError(
            f"build_plan: layout: expected a layout, got {shown(layout)}; use make_layout(name, tokens=T,"
            " ring_size=P)"
        )
    check_length(pattern, layout)
    query_heads = whole_number(query_heads, "build_plan: query_heads", RingLayoutError, MOST_HEADS)
    kv_heads = whole_number(kv_heads, "build_plan: kv_heads", RingLayoutError, MOST_HEADS)
    prune = true_or_false(prune, "build_plan: prune", RingLayoutError)
    if lanes is not None and not (isinstance(lanes, tuple) and all(isinstance(x, Lane) for x in lanes)):
        raise RingLayoutError(f"build_plan: lanes: expected a tuple of Lane or None, got {shown(lanes)}")
    return _built(pattern, layout, query_heads, kv_heads, prune, lanes)


@lru_cache(maxsize=64)
def _built(
    pattern: Pattern,
    layout: Layout,
    query_heads: int,
    kv_heads: int,
    prune: bool,
    lanes: tuple[Lane, ...] | None,
) -> Plan:
    if query_heads % kv_heads:
        raise RingLayoutError(
            f"query heads: expected a multiple of K/V heads: got {query_heads} and {kv_heads};"
            " use a number of query heads that K/V heads divide (GQA)"
        )
    classes = [
        (heads, ReadsOfShards(bound, layout)) for heads, bound in head_classes(pattern, query_heads, kv_heads)
    ]
    # the classes differ in a dilated pattern's offsets, not in where their keys lie: one choice for all
    lanes = lanes or (choose_lanes(classes[0][1]) if prune else one_way(layout.ring_size))
    walks = tuple(Walk(reads, heads, lanes, prune) for heads, reads in classes)
    return Plan(pattern, layout, query_heads, kv_heads, walks)
