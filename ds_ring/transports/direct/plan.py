"""The plan of a direct exchange: [Note: direct exchange] in `exchange_table.py`, as hops of two levels.

Owns which tokens a rank holds, sends as an owner and relays as a gateway, and the stage of each. Pure data;
`lowering.py` of this folder turns it into steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

from ds_ring.errors import RingConfigError
from ds_ring.masks.slots import SlotRanges, count_slots, no_slots
from ds_ring.schedule.head_class import HeadClass
from ds_ring.schedule.lowering import STAGE_BYTES_GPU
from ds_ring.schedule.plan import Plan
from ds_ring.schedule.rank_plan import (
    Direction,
    DirectionPlan,
    DirectSend,
    GradientReturn,
    HeadClassPlan,
    HopPlan,
    StagePlan,
)
from ds_ring.transports.direct.exchange_table import ExchangeTable, make_exchange_table
from ds_ring.transports.direct.lowering import DirectWay


@dataclass(frozen=True)
class DirectPlan(DirectionPlan):
    """What one rank does for one class of heads in a direct exchange."""

    numbers: Mapping[int, int] = field(default_factory=dict)  # stage of this rank by hop of `hops`
    sent_numbers: Mapping[int, int] = field(default_factory=dict)  # of the readers, by hop of `direct_sends`
    relays: tuple[DirectSend, ...] = ()  # of keys that crossed to this rank at the hop, in the order of hops

    lowering: ClassVar[type[DirectWay]] = DirectWay

    def get_send_batch(self, hop: int) -> int:
        """Return the batch in which the owner sends: two before the stage if another node reads, else one."""
        return self.sent_numbers[hop] - 1 - self.direction.crosses(hop)

    def get_return_batches(self, hop: int) -> range:
        """Return the batch in which gradients return to the owner."""
        batch = self.sent_numbers[hop] + 1 + self.direction.crosses(hop)
        return range(batch, batch + 1)

    @cached_property
    def stages(self) -> tuple[StagePlan | None, ...]:
        """Return the stages, the own shard first; None where nothing is held."""
        by_stage: dict[int, list[HopPlan]] = {}
        for hop in filter(None, self.hops):
            by_stage.setdefault(self.numbers[hop.hop], []).append(hop)
        return tuple(
            StagePlan.from_hops(by_stage[number]) if number in by_stage else None
            for number in range(max(by_stage) + 1)
        )

    @property
    def forward_batches(self) -> int:
        """Return the number of batches of the forward pass in which this rank computes, receives or sends."""
        sends = (self.get_send_batch(direct.hop) + 1 for direct in self.direct_sends)
        return max(len(self.stages), *sends, *(self.numbers[relay.hop] for relay in self.relays), 0)

    @cached_property
    def backward_batches(self) -> int:
        """Return the number of batches of the backward pass, with those in which gradients return."""
        returns = (self.get_return_batches(back.hop).stop for back in self.gradient_returns)
        sums = (
            self.numbers[hop.hop] + 2 + self.direction.crosses(hop.hop)
            for hop in self.hops[1:]
            if hop is not None
        )
        return max(self.forward_batches, *returns, *sums, 0)

    @property
    def tokens_sent(self) -> int:
        """Return the tokens that leave in a forward pass, per K/V head."""
        return sum(count_slots(direct.slots) for direct in (*self.direct_sends, *self.relays))


@dataclass(frozen=True)
class DirectClass(HeadClass):
    """How all shards travel for one class of K/V heads: [Note: direct exchange]."""

    stage_tokens: int = 1

    @property
    def ways(self) -> str:
        """Return how shards travel, as text."""
        return f"straight to their readers, in at most {self._table.last} stages"

    @property
    def _direction(self) -> Direction:
        return self.directions[0]

    @cached_property
    def _table(self) -> ExchangeTable:
        size = self._size
        if self.prune:
            slots = self.reads.find_all()
        else:
            pairs = ((origin, reader) for origin in range(size) for reader in range(size) if origin != reader)
            slots = {pair: self.unpruned(pair[0]) for pair in pairs if len(self.unpruned(pair[0]))}
        return make_exchange_table(slots, self._direction, size, self.stage_tokens)

    def held(self, origin: int, direction: Direction, hop: int) -> SlotRanges:
        """Return the slots of a shard that its reader at `hop` holds; a gateway holds what its node reads."""
        if direction.crosses(hop):
            node = direction.reader(origin, hop, self._size) // direction.ranks_per_node
            return self._table.crossing.get((origin, node), no_slots())
        return super().held(origin, direction, hop)

    def _find_held(self, origin: int, direction: Direction) -> dict[int, SlotRanges]:
        """Return what is held of a shard at hop 0 and at each hop at which a rank holds tokens of it."""
        held = super()._find_held(origin, direction)
        crossing = range(direction.ranks_per_node, self._size, direction.ranks_per_node)
        held |= {hop: self.held(origin, direction, hop) for hop in crossing}
        return {hop: held[hop] for hop in sorted(held) if hop == 0 or len(held[hop])}

    def _find_hops(self, reader: int, direction: Direction) -> list[int]:
        """Return the hops at which a rank holds tokens, those of which it is the gateway among them."""
        crossing = range(direction.ranks_per_node, self._size, direction.ranks_per_node)
        through = (
            hop
            for hop in crossing
            if len(self.held(direction.origin(reader, hop, self._size), direction, hop))
        )
        return sorted({*super()._find_hops(reader, direction), *through})

    def rank(self, ring_rank: int) -> HeadClassPlan:
        """Return the plan of one rank."""
        return HeadClassPlan(self.kv_heads, (self._make_plan(ring_rank),), max(self._table.last, 1))

    def _make_plan(self, ring_rank: int) -> DirectPlan:
        direction, size, table = self._direction, self._size, self._table
        inner = direction.ranks_per_node
        hops = self._find_hops(ring_rank, direction)
        keys = [(direction.origin(ring_rank, hop, size), hop) for hop in hops]
        held = [self.held(origin, direction, hop) for origin, hop in keys]
        tables = self._make_tables(ring_rank, keys, held)
        plans: list[HopPlan | None] = [None] * (hops[-1] + 1)
        numbers, relays = {0: 0}, []
        for (origin, hop), slots, tiles in zip(keys, held, tables, strict=True):
            gateway = ring_rank // inner * inner + origin % inner  # in a node, this rank at hop 0
            relayed = hop >= inner and gateway != ring_rank
            plans[hop] = HopPlan(
                hop, origin, gateway if relayed else origin, ring_rank, held=slots,
                relayed=slots if relayed else no_slots(), forward=no_slots(), tiles=tiles,
            )  # fmt: skip
            if hop:
                numbers[hop] = table.get_stage(origin, ring_rank, hop, inner)
            if direction.crosses(hop):
                relays += self._find_relays(origin, hop)
        sends, returns, sent_numbers = [], [], {}
        for hop, slots in self._find_held(ring_rank, direction).items():
            if hop and (hop < inner or direction.crosses(hop)):
                reader = direction.reader(ring_rank, hop, size)
                sends.append(DirectSend(hop, reader, slots))
                returns.append(GradientReturn(hop, reader, slots))
                sent_numbers[hop] = table.get_stage(ring_rank, reader, hop, inner)
        return DirectPlan(
            tuple(plans), tuple(sends), tuple(returns), direction, self.rounded, numbers,
            sent_numbers, tuple(relays),
        )  # fmt: skip

    def _find_relays(self, origin: int, hop: int) -> list[DirectSend]:
        """Return what the gateway at a hop sends to the other ranks of its node."""
        direction = self._direction
        later = range(hop + 1, hop + direction.ranks_per_node)
        relays = (
            DirectSend(
                hop, direction.reader(origin, number, self._size), self.held(origin, direction, number)
            )
            for number in later
        )
        return [relay for relay in relays if len(relay.slots)]

    def tokens_sent(self, origins: Sequence[int]) -> int:
        """Return the tokens of some shards that are sent in a forward pass, per K/V head."""
        return sum(
            count_slots(slots)
            for origin in origins
            for hop, slots in self._find_held(origin, self._direction).items()
            if hop
        )


def make_direct_plan(plan: Plan, ranks_per_node: int | None, stage_tokens: int) -> Plan:
    """Return the plan of a direct exchange for what a ring's plan is for; cached with it."""
    size = plan.ring_size
    if size == 1:
        return plan
    inner = ranks_per_node if ranks_per_node is not None and 1 < ranks_per_node < size else size
    key = DirectPlan, inner, stage_tokens
    if key not in plan.derived:
        direction = Direction(1, size - 1, inner)
        classes = tuple(
            DirectClass(x.reads, x.kv_heads, (direction,), x.prune, x.rounded, stage_tokens)
            for x in plan.classes
        )
        plan.derived[key] = replace(plan, classes=classes, derived={}, _ranks={})
    return plan.derived[key]


def plan_for_bytes(plan: Plan, ranks_per_node: int | None, stage_bytes: int | str, token_bytes: int) -> Plan:
    """Return the plan of a direct exchange, its stages bounded in bytes.

    Args:
        plan: of a ring.
        ranks_per_node: neighbours on the ring that share a node; None if unknown, as if all did.
        stage_bytes: most bytes of K and V that a rank holds, or relays, in a stage; "auto" is
            `STAGE_BYTES_GPU`.
        token_bytes: of K and V of a token, of all heads of the rank and all sequences.

    Raises:
        RingConfigError: no bytes.
    """
    if stage_bytes == 0:
        raise RingConfigError.wrong(
            "stage_bytes",
            'bytes of a stage or "auto" with transport "direct"',
            0,
            'leave it out, or take "ring"',
        )
    most = STAGE_BYTES_GPU if isinstance(stage_bytes, str) else stage_bytes
    return make_direct_plan(plan, ranks_per_node, max(most // max(token_bytes, 1), 1))
