"""One rank's part of a plan: what it holds, computes, sends and receives, hop by hop. Pure data.

`head_class.py` computes it, and `lowering.py` makes steps of it. Terms: the origin of a shard is the rank
that owns it. The held slots of a hop are those of the origin's shard that this rank reads. The relayed slots
are the held slots that the previous rank on the shard's way passes on.

[Note: two levels]
With nodes of R ranks each, the shard of rank l of node n is at hop s = t * R + i at rank l + i of node n + t
(modulo R and modulo the number of nodes; or downwards). So it goes around inside a node over the node's fast
links, and the first rank of a node that receives it sends it to the rank at the same place of the next node.
That message has R batches of time, so it is split into R parts, one per batch. Every network adapter of a
node then sends 1 / R of a shard in every batch. In one ring of all ranks, one adapter of the node sends a
whole shard and the others send nothing. Sums of gradients follow the keys inside a node. They leave the node
once, directly to the owner of the keys, also in R parts. Published as DoubleRing (Gu et al. 2024, LoongTrain,
arXiv 2406.18485, section 4.2) and as BurstAttention's two rings (Sun et al. 2024, arXiv 2403.09347, section
3); TASP (Wang et al. 2025, arXiv 2509.26541) uses all links by Hamiltonian cycles. The split into one part
per batch is ours.

If the ranks of a node are known (LOCAL_WORLD_SIZE, or `ranks_per_node` of `RingMesh.from_world`),
`build_plan` takes one ring or two levels, whichever sends less through the busiest network adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ds_ring.masks.tiles import (
    SlotRanges,
    Tiles,
    count_slots,
    locate_ranges,
    no_slots,
    subtract_slots,
    take_slots,
)


class Direction(NamedTuple):
    """The order in which shards reach the ranks of a ring, for at most `limit` hops; [Note: two levels].

    Attributes:
        sign: +1 from rank o to o + 1, -1 for the other way.
        limit: maximum number of hops.
        ranks_per_node: R, a divisor of the ring size; 0 for one ring of all ranks.
    """

    sign: int
    limit: int
    ranks_per_node: int = 0

    def reader(self, origin: int, hop: int, size: int) -> int:
        """Return the rank at which the shard of `origin` is at a hop, in a ring of `size` ranks."""
        return _moved(origin, self.sign, hop, self.ranks_per_node or size, size)

    def origin(self, ring_rank: int, hop: int, size: int) -> int:
        """Return the rank whose shard a rank has at a hop."""
        return _moved(ring_rank, -self.sign, hop, self.ranks_per_node or size, size)

    def hop(self, origin: int, reader: int, size: int) -> int:
        """Return the hop at which `reader` has the shard of `origin`."""
        inner = self.ranks_per_node or size
        nodes, places = ((reader // inner - origin // inner), (reader - origin))
        # A rank's place in its node is its number modulo R.
        return nodes * self.sign % (size // inner) * inner + places * self.sign % inner

    def before(self, hop: int) -> int:
        """Return the hop whose rank passes the shard on to the rank of `hop` (at least 1)."""
        return hop - self.ranks_per_node if self.crosses(hop) else hop - 1

    def crosses(self, hop: int) -> bool:
        """Return whether the rank of a hop receives the shard from another node."""
        return self.ranks_per_node > 0 and hop > 0 and hop % self.ranks_per_node == 0

    def is_next(self, hop: int) -> bool:
        """Return whether the rank of hop - 1 passes the shard on to the rank of `hop`, inside a node."""
        return 0 < hop <= self.limit and not self.crosses(hop)

    def batches(self, hop: int) -> int:
        """Return the number of batches over which a hop's gradients return: R from another node, else 1."""
        return self.ranks_per_node if 0 < self.ranks_per_node <= hop else 1


def part_of(slots: SlotRanges, number: int, parts: int) -> SlotRanges:
    """Return part `number` of a set of slots that is cut into `parts` equal parts."""
    count = count_slots(slots)
    return take_slots(slots, count * number // parts, count * (number + 1) // parts)


def _moved(rank: int, sign: int, hop: int, inner: int, size: int) -> int:
    nodes, places = divmod(hop, inner)
    node, place = divmod(rank, inner)
    return (node + sign * nodes) % (size // inner) * inner + (place + sign * places) % inner


ALONE = Direction(1, 0)  # the direction of a ring of one rank


@dataclass(frozen=True)
class HopPlan:
    """One hop on one rank: the tokens of the shard of `origin` that this rank reads are here.

    Attributes:
        hop: s; at hop 0 the rank computes with its own shard, in place.
        origin: ring rank that owns these keys and values.
        came_from, goes_to: ranks before and after this one on the shard's way; `goes_to` in the same node.
        held: slots of the origin's shard that are here, packed in ascending order (hop 0: in place).
        relayed: the subset that `came_from` sends; `origin` itself sends the rest.
        forward: the subset that `goes_to` reads as well and receives from here.
        across, across_to: with two levels, the subset that is sent to the next node, and the rank there.
        sums_in: the subset for which `came_from` sends a sum of dK/dV.
        sums_on: the subset for which this rank sends a sum of dK/dV to `goes_to`; the dK/dV of the other
            slots return from here to `origin`.
        tiles: the tiles this rank computes; key slots index the packed payload. May be empty.
    """

    hop: int
    origin: int
    came_from: int
    goes_to: int
    held: SlotRanges
    relayed: SlotRanges
    forward: SlotRanges
    tiles: Tiles
    across: SlotRanges = field(default_factory=no_slots)
    across_to: int = 0
    sums_in: SlotRanges = field(default_factory=no_slots)
    sums_on: SlotRanges = field(default_factory=no_slots)

    @property
    def from_origin(self) -> SlotRanges:
        """Return the slots that the origin itself sends to this rank."""
        return subtract_slots(self.held, self.relayed)

    @property
    def ends_here(self) -> SlotRanges:
        """Return the slots of the origin's shard whose gradients return from here to the origin."""
        return subtract_slots(self.held, self.sums_on)

    def in_payload(self, part: SlotRanges) -> SlotRanges:
        """Return a part of `held` as ranges of the packed payload."""
        return locate_ranges(part, self.held)

    @property
    def pairs(self) -> int:
        """Return the number of attended pairs, as the tiles count them."""
        return int(self.tiles.pairs.sum())


@dataclass(frozen=True)
class DirectSend:
    """Own slots that this rank sends directly to a reader whose neighbour does not hold them.

    Attributes:
        hop: the hop at which they are read; the message is in the batch posted before it.
        receiver: ring rank that reads them.
        slots: slots of this rank's shard.
    """

    hop: int
    receiver: int
    slots: SlotRanges


@dataclass(frozen=True)
class GradientReturn:
    """Own slots whose dK/dV another rank returns directly, because it does not pass them on.

    Attributes:
        hop: the hop at which that rank computed them. The message is in the batch after it, or is split into
            parts from that batch on (`Direction.batches`).
        sender: ring rank that sends.
        slots: slots of this rank's shard.
    """

    hop: int
    sender: int
    slots: SlotRanges


@dataclass(frozen=True)
class DirectionPlan:
    """One direction of travel on one rank.

    Attributes:
        hops: by hop, without gaps; None for a hop at which nothing is held. Hop 0 is the own shard.
        direct_sends: by ascending hop, from hop 2 on.
        gradient_returns: by ascending hop.
        direction: the direction in which shards travel.
        rounded: gradients are rounded to bfloat16 when they return to their owner.
    """

    hops: tuple[HopPlan | None, ...]
    direct_sends: tuple[DirectSend, ...]
    gradient_returns: tuple[GradientReturn, ...]
    direction: Direction = ALONE
    rounded: bool = False

    def at(self, hop: int) -> HopPlan | None:
        """Return the plan of a hop; None if nothing happens."""
        return self.hops[hop] if 0 <= hop < len(self.hops) else None

    @property
    def forward_batches(self) -> int:
        """Return the number of batches of the forward pass in which this rank computes, receives or sends."""
        # The tokens read at hop s are sent in batch s - 1.
        last = self.direct_sends[-1].hop if self.direct_sends else 0
        crossing = (hop.hop for hop in self.hops if hop is not None and len(hop.across))
        return max(len(self.hops), last, *(hop + self.direction.ranks_per_node for hop in crossing))

    @property
    def tokens_sent(self) -> int:
        """Return the tokens that leave in a forward pass, per K/V head."""
        held = [hop_plan for hop_plan in self.hops if hop_plan is not None]
        handed_on = sum(count_slots(part) for one in held for part in (one.forward, one.across))
        return handed_on + sum(count_slots(direct_send.slots) for direct_send in self.direct_sends)

    @cached_property
    def backward_batches(self) -> int:
        """Return the number of batches of the backward pass, with the gradient returns after the last hop."""
        # the gradients of hop s are sent from batch s + 1 on
        received = [back.hop for back in self.gradient_returns]
        sent = [one.hop for one in self.hops[1:] if one is not None and len(one.ends_here)]
        last_return = max((hop + self.direction.batches(hop) for hop in received + sent), default=0)
        last_sum = len(self.hops) if len(self.hops) > 1 else 0
        return max(last_return, last_sum, self.forward_batches - 1) + 1


@dataclass(frozen=True)
class HeadClassPlan:
    """What one rank does for one class (K/V heads with equal patterns).

    Attributes:
        kv_heads: the K/V heads of the class, a slice of all K/V heads.
        directions: one or two; only the first computes the own shard (hop 0).
        limit: maximum number of hops of a direction after hop 0 over all ranks; the same on each of them.
        lowered: cached steps of the forward (False) and backward (True) pass, made by `lowering.py`.
    """

    kv_heads: slice
    directions: tuple[DirectionPlan, ...]
    limit: int
    lowered: dict[bool, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def ring_rank(self) -> int:
        """Return the rank that this plan is for."""
        own = self.directions[0].hops[0]
        assert own is not None, "hop 0 is the own shard"
        return own.origin

    @property
    def hops(self) -> list[HopPlan]:
        """Return every hop at which tokens are computed with, held or sent on, in order."""
        # Hop 0 is the same in both directions and counts once.
        own = [v for v in self.directions[0].hops[:1] if v is not None]
        return own + [v for direction in self.directions for v in direction.hops[1:] if v is not None]

    def pairs(self, group: int) -> int:
        """Return attended pairs per K/V head, summed over the `group` query heads that share it."""
        total = 0
        for hop_plan in self.hops:
            # A tile for all heads is computed for each query head of the group.
            heads = np.where(hop_plan.tiles.head_in_group < 0, group, 1)
            total += int((hop_plan.tiles.pairs * heads).sum())
        return total

    @property
    def tokens_received(self) -> int:
        """Return the tokens that arrive in a forward pass, per K/V head."""
        return sum(count_slots(v.held) for v in self.hops if v.hop)

    @property
    def tokens_sent(self) -> int:
        """Return the tokens that leave in a forward pass, per K/V head."""
        return sum(direction.tokens_sent for direction in self.directions)


@dataclass(frozen=True)
class RankPlan:
    """All that one ring rank does in a pass.

    Attributes:
        ring_rank: the rank.
        classes: the classes of heads; their passes run one after the other.
        group: number of query heads that share a K/V head.
        kv_heads: number of K/V heads G.
        schedules: schedules that `lowering.py` made, by pass and chunk size; cached across passes.
        compiled: calls for which nothing is left to compile; see `RingContext`.
    """

    ring_rank: int
    classes: tuple[HeadClassPlan, ...]
    group: int
    kv_heads: int
    schedules: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    compiled: set[Any] = field(default_factory=set, repr=False, compare=False)

    @property
    def pairs(self) -> int:
        """Return the attended (query, key) pairs of this rank, over all query heads."""
        return over_heads(self.classes, self.kv_heads, lambda one: one.pairs(self.group))

    @property
    def tokens_received(self) -> int:
        """Return the token-units (K and V of one token of one head) that arrive in a forward pass."""
        return over_heads(self.classes, self.kv_heads, lambda one: one.tokens_received)

    @property
    def tokens_sent(self) -> int:
        """Return the token-units that leave in a forward pass."""
        return over_heads(self.classes, self.kv_heads, lambda one: one.tokens_sent)


def over_heads(classes: Iterable[Any], kv_heads: int, amount: Callable[[Any], int]) -> int:
    """Return the sum over K/V heads of an amount that each class of heads has per head."""
    return sum(amount(one) * len(range(kv_heads)[one.kv_heads]) for one in classes)
