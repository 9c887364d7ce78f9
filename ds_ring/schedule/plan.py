"""The plan: for every rank and hop which tiles are computed and which tokens are sent. Pure data.

It has one entry for each class of K/V heads with equal patterns (`Dilated` may give every head its own
offset). A class has one or two directions of travel. A direction has, on each rank, one entry for each
hop. `rank_plan.py` holds the data of one rank; `head_class.py` computes who reads which tokens and who sends
them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ds_ring.errors import (
    RingLayoutError,
    RingPatternError,
    check_bool,
    check_whole_number,
    shown,
)
from ds_ring.limits import MAX_HEADS
from ds_ring.masks.pattern import Pattern, cache_by_pattern
from ds_ring.masks.slots import count_slots
from ds_ring.plugin import GRADIENT_PAYLOADS
from ds_ring.schedule.head_class import HeadClass, ReadsOfShards
from ds_ring.schedule.layout import Layout
from ds_ring.schedule.rank_plan import Direction, RankPlan, make_one_way, make_two_levels, sum_over_heads


@dataclass(frozen=True)
class Plan:
    """The plan of a pattern on a layout; build it with `build_plan`."""

    pattern: Pattern
    layout: Layout
    query_heads: int  # H, per rank
    kv_heads: int  # G, per rank
    classes: tuple[HeadClass, ...]  # one for each class of K/V heads with equal patterns
    reason: str = field(default="", compare=False)  # why this plan was taken, if there was a choice
    derived: dict[Any, Plan] = field(
        default_factory=dict, repr=False, compare=False
    )  # of other passes, cached
    _ranks: dict[int, RankPlan] = field(default_factory=dict, repr=False, compare=False)

    @property
    def ring_size(self) -> int:
        """Return the number of ranks P."""
        return self.layout.ring_size

    @property
    def group(self) -> int:
        """Return the number of query heads that share a K/V head."""
        return self.query_heads // self.kv_heads

    def rank(self, ring_rank: int) -> RankPlan:
        """Return the plan of one rank, built on first use."""
        if ring_rank not in self._ranks:
            classes = tuple(head_class.rank(ring_rank) for head_class in self.classes)
            self._ranks[ring_rank] = RankPlan(ring_rank, classes, self.group, self.kv_heads)
        return self._ranks[ring_rank]

    @property
    def tokens_sent(self) -> int:
        """Return tokens sent in a forward pass, summed over ranks, hops and K/V heads."""
        origins = range(self.ring_size)
        return sum_over_heads(
            self.classes, self.kv_heads, lambda head_class: sum(head_class.tokens_sent([x]) for x in origins)
        )

    @property
    def tokens_needed(self) -> int:
        """Return the minimum of `tokens_sent`: each token once to every other rank that reads it.

        An upper bound for a pattern with a mask function, such as MaskMod: the plan hides no pair for it.
        """
        origins = range(self.ring_size)
        return sum_over_heads(
            self.classes, self.kv_heads, lambda head_class: sum(map(head_class.tokens_needed, origins))
        )

    def summary(self) -> str:
        """Return a readable table: tiles, pairs, and tokens held and sent on, by rank, class and hop.

        Pairs and tokens are upper bounds for a pattern with a mask function, as in `tokens_needed`.
        """
        bound = "; pairs and tokens are upper bounds: mask functions hide more" if self.pattern.masks else ""
        lines = [f"{self.pattern} on {self.layout}{bound}"]
        for head_class in self.classes:
            heads = list(range(self.kv_heads)[head_class.kv_heads])
            lines += [f"K/V heads {heads}: shards travel {head_class.ways}"]
            lines += ["rank hop origin   tiles          pairs   tokens held   sent on"]
            for ring_rank in range(self.ring_size):
                for hop in head_class.rank(ring_rank).hops:
                    lines.append(
                        f"{ring_rank:4d} {hop.hop:3d} {hop.origin:6d} {len(hop.tiles):7d}"
                        f" {hop.pairs:14d} {count_slots(hop.held):13d} {count_slots(hop.forward):9d}"
                    )
        return "\n".join(lines)


def find_head_classes(pattern: Pattern, query_heads: int, kv_heads: int) -> list[tuple[slice, Pattern]]:
    """Return the K/V heads with equal patterns as slices, each with the pattern of its query heads."""
    group = query_heads // kv_heads
    classes: dict[Pattern, list[int]] = defaultdict(list)
    for head in range(kv_heads):
        sharing = tuple(range(head * group, (head + 1) * group))
        classes[pattern.bind(sharing, query_heads, kv_heads)].append(head)
    heads_and_patterns: list[tuple[slice, Pattern]] = []
    for bound, heads in classes.items():
        # Use one slice if the query heads that share these K/V heads are a slice as well. If a group has
        # several query heads, this holds only for consecutive K/V heads.
        steps = set(np.diff(heads).tolist()) or {1}
        if len(steps) == 1 and (group == 1 or steps == {1}):
            heads_and_patterns.append((slice(heads[0], heads[-1] + 1, steps.pop()), bound))
        else:
            heads_and_patterns += [(slice(head, head + 1, 1), bound) for head in heads]
    return heads_and_patterns


def check_length(pattern: Pattern, layout: Layout) -> None:
    """Raise RingPatternError unless the pattern fits the layout's sequence length.

    Not called for replicated queries: their pattern may cover less than a cache has room for.
    """
    for primitive in pattern.primitives:
        if primitive.only_length not in (None, layout.tokens):
            raise RingPatternError(
                f"{pattern}: expected a pattern of {layout.tokens} tokens, as the layout, got one of"
                f" {primitive.only_length}; give document ids for all tokens, negative for padding"
            )


def build_plan(
    pattern: Pattern,
    layout: Layout,
    *,
    query_heads: int = 1,
    kv_heads: int = 1,
    prune: bool = True,
    directions: tuple[Direction, ...] | None = None,
    gradient_payload: str = "float32",
    ranks_per_node: int | None = None,
    stage_shards: int | None = None,
) -> Plan:
    """Plan a ring pass.

    Args:
        pattern: which query attends to which key.
        layout: the rank and slot of each token.
        query_heads, kv_heads: H and G, heads per rank; H must be a multiple of G.
        prune: send only the tokens that the receiver reads.
        directions: directions of travel; None chooses those whose tokens cross the fewest links.
        gradient_payload: dtype in which dK and dV return, a name of `plugin.GRADIENT_PAYLOADS`. They are
            added in the accumulators' dtype. In stages "float32" may mean the inputs' dtype: [Note: stages].
        ranks_per_node: number of neighbours on the ring that share a node, a divisor of the ring size; None
            if unknown. If it is known, `build_plan` chooses one ring or two levels: [Note: two levels].
        stage_shards: most shards of other ranks that are computed with at once; [Note: stages]. Owners then
            send directly to readers: `directions` must be None, and `ranks_per_node` has no effect. None:
            keys travel hop by hop.

    Raises:
        RingLayoutError: H is not a multiple of G; stages together with `directions`.
        RingPatternError: the pattern is for sequences of another length.
    """
    if not isinstance(pattern, Pattern):
        raise RingPatternError.wrong("build_plan: pattern", "a pattern", shown(pattern), "use Causal()")
    if not isinstance(layout, Layout):
        raise RingLayoutError.wrong("build_plan: layout", "a layout", shown(layout), "use make_layout(...)")
    check_length(pattern, layout)
    query_heads = check_whole_number(query_heads, "build_plan: query_heads", RingLayoutError, MAX_HEADS)
    kv_heads = check_whole_number(kv_heads, "build_plan: kv_heads", RingLayoutError, MAX_HEADS)
    prune = check_bool(prune, "build_plan: prune", RingLayoutError)
    if directions is not None and not (
        isinstance(directions, tuple) and all(isinstance(x, Direction) for x in directions)
    ):
        raise RingLayoutError(f"build_plan: directions: expected Directions or None, got {shown(directions)}")
    if not isinstance(gradient_payload, str) or gradient_payload not in GRADIENT_PAYLOADS:
        raise RingLayoutError(
            f"build_plan: gradient_payload: expected {' or '.join(GRADIENT_PAYLOADS)},"
            f" got {shown(gradient_payload)}"
        )
    size, nodes = layout.ring_size, 0
    if ranks_per_node is not None:
        nodes = check_whole_number(ranks_per_node, "build_plan: ranks_per_node", RingLayoutError)
    if nodes and size % nodes:
        raise RingLayoutError(
            f"build_plan: ranks_per_node: expected a divisor of the ring size {size}, got {nodes};"
            " leave it out where nodes have unequal parts of the ring"
        )
    nodes = nodes if 1 < nodes < size else 0
    if stage_shards is not None:
        stage_shards = check_whole_number(stage_shards, "build_plan: stage_shards", RingLayoutError)
        if directions is not None:
            raise RingLayoutError.wrong(
                "build_plan: stage_shards", "None with directions", stage_shards, "leave one of them out"
            )
        nodes = 0
        if size > 1:
            from ds_ring.schedule.directions import make_stages

            directions = make_stages(size, stage_shards)
    rounded = not GRADIENT_PAYLOADS[gradient_payload].exact
    return _build_plan(pattern, layout, query_heads, kv_heads, prune, directions, rounded, nodes)


@partial(cache_by_pattern, 64)
def _build_plan(
    pattern: Pattern,
    layout: Layout,
    query_heads: int,
    kv_heads: int,
    prune: bool,
    directions: tuple[Direction, ...] | None,
    rounded: bool,
    ranks_per_node: int,
) -> Plan:
    if query_heads % kv_heads:
        raise RingLayoutError(
            f"query heads: expected a multiple of K/V heads: got {query_heads} and {kv_heads}"
        )
    bound = [
        (heads, ReadsOfShards(alike, layout))
        for heads, alike in find_head_classes(pattern, query_heads, kv_heads)
    ]
    # Choose the directions once: in all classes the keys are about equally far from the queries. The patterns
    # of two classes differ in the offset of a dilation, for example.
    size = layout.ring_size
    if directions is None and prune and size > 2:
        from ds_ring.schedule.directions import choose_directions

        directions = choose_directions(bound[0][1], ranks_per_node)
    elif directions is None:
        directions = make_two_levels(size, ranks_per_node) if ranks_per_node else make_one_way(size)
    classes = tuple(HeadClass(reads, heads, directions, prune, rounded) for heads, reads in bound)
    return Plan(pattern, layout, query_heads, kv_heads, classes)
