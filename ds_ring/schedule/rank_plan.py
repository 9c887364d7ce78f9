"""One rank's part of a plan: the tokens that it holds, computes with, sends and receives at each hop.

Pure data. `head_class.py` computes it and explains its terms; `lowering.py` turns it into steps.

[Note: two levels]
Each node has R ranks. Take the shard of rank l of node n, and write a hop as s = t * R + i with i < R. At hop
s, rank l + i (modulo R) of node n + t (modulo the number of nodes) computes with this shard; the other
direction subtracts i and t. So the shard goes around one node, over its fast links, before it goes on to the
next node. In each node, rank l is the first to receive the shard. It also sends the shard to rank l of the
next node: one R-th in each of R batches. So every rank's network adapter sends 1 / R of a shard in every
batch. In one ring of all ranks, one adapter of a node sends a whole shard and the others nothing. Sums of
gradients follow the keys inside a node. From there they go directly to the owner of the keys. To an owner in
another node they go in R parts, as the keys do. Published as DoubleRing (Gu et al. 2024, LoongTrain, arXiv
2406.18485, section 4.2) and as BurstAttention's two rings (Sun et al. 2024, arXiv 2403.09347, section 3);
TASP (Wang et al. 2025, arXiv 2509.26541) uses all links by Hamiltonian cycles. The split into parts is ours.

If the ranks of a node are known (LOCAL_WORLD_SIZE, or `ranks_per_node` of `RingMesh.from_world`),
`build_plan` takes one ring or two levels, whichever sends less through the busiest network adapter.

[Note: stages]
In a ring every hop has a partial result to merge, and sums of dK and dV are read and written at every hop. A
stage is several consecutive hops that one kernel call computes: with stages of 1, 4 and 3 shards, each rank
of a ring of 8 computes with its own shard, then with the keys of four ranks, then with those of three. Every
owner sends its keys directly to each reader, and every reader returns dK and dV directly to the owner. While
a rank computes one stage, the keys of the next stage arrive as token ranges of a buffer. The tiles of a stage
are one table over its buffer, so a stage is one kernel call a head chunk. (In a backward pass the own shard
may take several: [Note: a part for the end] in `lowering.py`.) The number of tokens sent is that of a ring,
but most messages go to ranks that are not neighbours. So stages are for ranks that are all linked to each
other, as inside a node. Each returned gradient is of one rank. With `gradient_payload` "bfloat16" it is
bfloat16. With "float32" it has the accumulators' dtype, except with kernel "flash" or "flex" and 16-bit
inputs: then it has the inputs' dtype. Memory grows with the largest two stages; `choose_stage_sizes` bounds
them. Overlap stages of MagiAttention (SandAI 2025) are similar; sizes and merge are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ds_ring.masks.slots import SlotRanges, count_slots, no_slots, subtract_slots
from ds_ring.masks.tiles import Tiles


class Direction(NamedTuple):
    """The order in which shards reach the ranks of a ring; [Note: two levels]."""

    sign: int  # +1: shards travel from rank o to rank o + 1; -1: from rank o to rank o - 1
    limit: int  # number of the last hop
    ranks_per_node: int = 0  # with two levels the number R of ranks of a node; 0 for one level
    stages: tuple[int, ...] = ()  # hops of each stage after hop 0 ([Note: stages]); () for no stages

    def reader(self, origin: Any, hop: Any, size: int) -> Any:
        """Return the rank that computes with the shard of `origin` at a hop, in a ring of `size` ranks.

        On one level this is (origin + sign * hop) % size. `origin` and `hop` may be integer arrays.
        """
        inner = self.ranks_per_node or size
        nodes, places = divmod(hop, inner)
        node, place = divmod(origin, inner)
        return (node + self.sign * nodes) % (size // inner) * inner + (place + self.sign * places) % inner

    def origin(self, ring_rank: int, hop: int, size: int) -> int:
        """Return the rank whose shard `ring_rank` computes with at a hop."""
        origin: int = self._replace(sign=-self.sign).reader(ring_rank, hop, size)
        return origin

    def hop(self, origin: Any, reader: Any, size: int) -> Any:
        """Return the hop at which `reader` computes with the shard of `origin`."""
        inner = self.ranks_per_node or size
        nodes = reader // inner - origin // inner
        # A rank's place in its node is its number modulo R.
        return nodes * self.sign % (size // inner) * inner + (reader - origin) * self.sign % inner

    @property
    def steps(self) -> int:
        """Return the number of the last stage, or without stages of the last hop."""
        # Later batches of a backward pass may compute the own shard: [Note: a part for the end].
        return len(self.stages) or self.limit

    def stage(self, hop: int) -> int:
        """Return the batch in which a hop is computed: the hop itself, or its stage."""
        if not self.stages:
            return hop
        return int(np.searchsorted(np.cumsum((0, *self.stages)), hop))

    def before(self, hop: int) -> int:
        """Return the earlier hop whose reader sends the shard to the reader at `hop`; `hop` is at least 1."""
        return hop - self.ranks_per_node if self.crosses(hop) else hop - 1

    def crosses(self, hop: int) -> bool:
        """Return whether the reader at a hop receives the shard from another node."""
        return self.ranks_per_node > 0 and hop > 0 and hop % self.ranks_per_node == 0

    def is_next(self, hop: int) -> bool:
        """Return whether the reader at `hop` receives the shard from the one at hop - 1, in the same node."""
        return 0 < hop <= self.limit and not self.crosses(hop)

    def batches(self, hop: int) -> int:
        """Return in how many batches a hop's gradients return to their owner: R to another node, else 1."""
        return self.ranks_per_node if 0 < self.ranks_per_node <= hop else 1


def make_one_way(size: int, sign: int = 1) -> tuple[Direction, ...]:
    """Return one direction in which all shards travel."""
    return (Direction(sign, size - 1),)


def make_two_levels(size: int, ranks_per_node: int, sign: int = 1) -> tuple[Direction, ...]:
    """Return a direction inside nodes and from node to node; [Note: two levels]."""
    return (Direction(sign, size - 1, ranks_per_node),)


ONE_RANK = Direction(1, 0)  # the direction of a ring of one rank


@dataclass(frozen=True)
class HopPlan:
    """One hop on one rank, called "this rank". All slots are slots of the shard of `origin`."""

    hop: int  # s; at hop 0 this rank computes with its own shard
    origin: int  # ring rank that owns the keys and values of this hop
    recv_rank: int  # the rank before this rank on the shard's way
    send_rank: int  # the rank after this rank on the shard's way; with two levels, used only inside a node
    held: SlotRanges  # slots that this rank reads, ascending; at hop 0 all slots
    relayed: SlotRanges  # held slots that `recv_rank` sends to this rank; `origin` sends the other held slots
    forward: SlotRanges  # held slots that this rank sends to `send_rank`
    tiles: Tiles  # of this hop; their key slots are indices into `held`
    # with two levels, held slots that this rank sends to `inter_node_to`, a rank of the next node
    inter_node: SlotRanges = field(default_factory=no_slots)
    inter_node_to: int = 0
    # held slots for which `recv_rank` sends this rank a sum of dK and dV
    grad_recv: SlotRanges = field(default_factory=no_slots)
    # held slots whose dK and dV this rank sends to `send_rank`
    grad_send: SlotRanges = field(default_factory=no_slots)

    @cached_property
    def from_origin(self) -> SlotRanges:
        """Return the held slots that `origin` sends to this rank."""
        return subtract_slots(self.held, self.relayed)

    @cached_property
    def ends_here(self) -> SlotRanges:
        """Return the held slots whose dK and dV this rank sends to `origin`, for a hop after hop 0."""
        return subtract_slots(self.held, self.grad_send)

    @property
    def pairs(self) -> int:
        """Return the number of attended pairs; a tile of several query heads counts once."""
        return int(self.tiles.pairs.sum())


class StagePlan(NamedTuple):
    """The hops that one kernel call computes; [Note: stages]. Without stages, a single hop."""

    hops: tuple[HopPlan, ...]  # by ascending origin, so that tiles of neighbouring shards are adjacent
    first: tuple[int, ...]  # where the keys of each hop begin in the buffer of the stage
    slots: int  # number of slots of that buffer
    tiles: Tiles  # the tiles of all hops; key slots index the buffer

    @classmethod
    def from_hops(cls, hops: Iterable[HopPlan]) -> StagePlan:
        """Return the stage of some hops, at least one."""
        ordered = tuple(sorted(hops, key=lambda hop: hop.origin))
        counts = [count_slots(hop.held) for hop in ordered]
        first = tuple(np.cumsum([0, *counts[:-1]]).tolist())
        tiles = ordered[0].tiles
        if len(ordered) > 1:
            moved = zip(first, (hop.tiles for hop in ordered), strict=True)
            tiles = Tiles.concat([replace(x, k=replace(x.k, slot=x.k.slot + at)) for at, x in moved])
        return cls(ordered, first, sum(counts), tiles)


class DirectSend(NamedTuple):
    """Slots of this rank's shard that this rank sends directly to a reader."""

    hop: int  # at which `receiver` reads them; `DirectionPlan.get_send_batch` returns the message's batch
    receiver: int
    slots: SlotRanges


class GradientReturn(NamedTuple):
    """Slots of this rank's shard whose dK and dV a reader sends to this rank."""

    hop: int  # at which `sender` reads them; `DirectionPlan.get_return_batches` returns the batches
    sender: int
    slots: SlotRanges


@dataclass(frozen=True)
class DirectionPlan:
    """One direction of travel on one rank."""

    hops: tuple[HopPlan | None, ...]  # by hop, None where nothing is held; hop 0 is the own shard
    direct_sends: tuple[DirectSend, ...]  # by ascending hop, from hop 2 on (in stages from hop 1 on)
    gradient_returns: tuple[GradientReturn, ...]  # by ascending hop
    direction: Direction = ONE_RANK
    rounded: bool = False  # gradients are rounded to bfloat16 when they return to their owner
    # class that lowers it, a `Way` of `ways.py`; None: hop by hop, or `stages.py`
    lowering: ClassVar[Callable[..., Any] | None] = None

    def get_send_batch(self, hop: int) -> int:
        """Return the batch in which the owner sends what is read at a hop."""
        return self.direction.stage(hop) - 1

    def get_return_batches(self, hop: int) -> range:
        """Return the batches in which gradients of a hop return to the owner."""
        first = self.direction.stage(hop) + 1
        return range(first, first + self.direction.batches(hop))

    def at(self, hop: int) -> HopPlan | None:
        """Return the plan of a hop; None if this rank holds nothing at that hop."""
        return self.hops[hop] if 0 <= hop < len(self.hops) else None

    @property
    def forward_batches(self) -> int:
        """Return the number of batches of the forward pass in which this rank computes, receives or sends."""
        # The tokens read at hop s are sent in batch s - 1.
        last = self.direction.stage(self.direct_sends[-1].hop) if self.direct_sends else 0
        crossing = (hop.hop for hop in self.hops if hop is not None and len(hop.inter_node))
        return max(len(self.stages), last, *(hop + self.direction.ranks_per_node for hop in crossing))

    @cached_property
    def stages(self) -> tuple[StagePlan | None, ...]:
        """Return the stages, the own shard first; None where nothing is held. Without stages, the hops."""
        by_stage: dict[int, list[HopPlan]] = {}
        for hop in self.hops:
            if hop is not None:
                by_stage.setdefault(self.direction.stage(hop.hop), []).append(hop)
        return tuple(
            StagePlan.from_hops(by_stage[number]) if number in by_stage else None
            for number in range(max(by_stage) + 1)
        )

    @property
    def tokens_sent(self) -> int:
        """Return the tokens that leave in a forward pass, per K/V head."""
        held = [hop_plan for hop_plan in self.hops if hop_plan is not None]
        handed_on = sum(count_slots(part) for hop in held for part in (hop.forward, hop.inter_node))
        return handed_on + sum(count_slots(direct_send.slots) for direct_send in self.direct_sends)

    @cached_property
    def backward_batches(self) -> int:
        """Return the number of batches of the backward pass.

        The batches after the last hop, in which gradients return, count as well.
        """
        # the gradients of hop s are sent from batch s + 1 on
        received = [back.hop for back in self.gradient_returns]
        sent = [hop.hop for hop in self.hops[1:] if hop is not None and len(hop.ends_here)]
        way = self.direction
        last_return = max((way.stage(hop) + way.batches(hop) for hop in received + sent), default=0)
        last_sum = len(self.stages) if len(self.stages) > 1 else 0
        return max(last_return, last_sum, self.forward_batches - 1) + 1


@dataclass(frozen=True)
class HeadClassPlan:
    """What one rank does for one head class (K/V heads with equal patterns)."""

    kv_heads: slice
    directions: tuple[DirectionPlan, ...]  # one or two; only the first computes the own shard (hop 0)
    limit: int  # greatest `Direction.steps` of both directions; the same on all ranks
    # steps of the forward (False) and backward (True) pass, cached by `lowering.py`
    lowered: dict[bool, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def ring_rank(self) -> int:
        """Return the rank that this plan is for."""
        own_hop = self.directions[0].hops[0]
        assert own_hop is not None, "hop 0 is the own shard"
        return own_hop.origin

    @property
    def hops(self) -> list[HopPlan]:
        """Return every hop at which tokens are computed with, held or sent on, in order."""
        # Hop 0 is the same in both directions and counts once.
        own_hops = [v for v in self.directions[0].hops[:1] if v is not None]
        return own_hops + [v for direction in self.directions for v in direction.hops[1:] if v is not None]

    def pairs(self, group: int) -> int:
        """Return attended pairs per K/V head, summed over the `group` query heads that share it."""
        # A tile with head_in_group -1 is for all `group` query heads, and counts once for each.
        # Python's integers: the product may exceed int64.
        each = ((hop.tiles.pairs, hop.tiles.head_in_group < 0) for hop in self.hops)
        return sum(group * int(pairs[of_all].sum()) + int(pairs[~of_all].sum()) for pairs, of_all in each)

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
    """All that one ring rank does in a pass."""

    ring_rank: int
    # all classes form one pass: the head chunks of a class follow those of the class before it
    classes: tuple[HeadClassPlan, ...]
    group: int  # query heads that share a K/V head
    kv_heads: int
    # by pass and chunk size, cached by `lowering.py`
    schedules: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    # calls for which the kernel has nothing left to compile; `cuda/patience.py` adds them
    compiled: set[Any] = field(default_factory=set, repr=False, compare=False)

    @property
    def pairs(self) -> int:
        """Return the attended (query, key) pairs of this rank, over all query heads."""
        return sum_over_heads(self.classes, self.kv_heads, lambda head_class: head_class.pairs(self.group))

    @property
    def tokens_received(self) -> int:
        """Return the token-units (K and V of one token of one head) that arrive in a forward pass."""
        return sum_over_heads(self.classes, self.kv_heads, lambda head_class: head_class.tokens_received)

    @property
    def tokens_sent(self) -> int:
        """Return the token-units that leave in a forward pass."""
        return sum_over_heads(self.classes, self.kv_heads, lambda head_class: head_class.tokens_sent)


def sum_over_heads(classes: Iterable[Any], kv_heads: int, amount: Callable[[Any], int]) -> int:
    """Return the sum over all K/V heads; `amount` returns the value of one head of a class."""
    return sum(amount(head_class) * len(range(kv_heads)[head_class.kv_heads]) for head_class in classes)
