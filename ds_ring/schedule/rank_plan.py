"""One rank's part of a plan: what it holds, computes, hands on, sends and gets back, hop by hop. Pure data.

Owns the vocabulary that a ring pass walks; `walk.py` fills it in, [Note: relays and departures] there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ds_ring.masks.slot_ranges import SlotRanges, count_slots, locate_ranges, subtract_slots
from ds_ring.masks.tiles import Tiles


class Lane(NamedTuple):
    """One direction of travel: shards go from rank o to o + direction, for at most `limit` hops."""

    direction: int
    limit: int


@dataclass(frozen=True)
class Visit:
    """One hop of a lane on one rank: what this rank reads of the shard of `origin` is here.

    Attributes:
        hop: s; at hop 0 the rank works on its own shard, in place.
        origin: ring rank whose keys and values these are.
        came_from, goes_to: ring neighbours on the shard's way.
        held: slots of the origin's shard that are here, packed in ascending order (hop 0: in place).
        relayed: the subset that `came_from` hands on; the rest comes from `origin` itself.
        forward: the subset that `goes_to` reads as well and gets from here; of what remains the dK/dV go home
            from here.
        tiles: what this rank computes with it; key slots index the packed payload. May be empty.
    """

    hop: int
    origin: int
    came_from: int
    goes_to: int
    held: SlotRanges
    relayed: SlotRanges
    forward: SlotRanges
    tiles: Tiles

    @property
    def from_origin(self) -> SlotRanges:
        """Slots that the origin sends here itself, past the ranks between, which do not read them."""
        return subtract_slots(self.held, self.relayed)

    @property
    def ends_here(self) -> SlotRanges:
        """Slots of the origin's shard that are not handed on."""
        return subtract_slots(self.held, self.forward)

    def in_payload(self, part: SlotRanges) -> SlotRanges:
        """A part of `held` as ranges of the packed payload."""
        return locate_ranges(part, self.held)

    @property
    def pairs(self) -> int:
        """Rows of the attention matrix times keys, as the tiles have them (members counted apart)."""
        return int(self.tiles.pairs.sum())


@dataclass(frozen=True)
class Departure:
    """Own slots that this rank sends straight to a reader, because the reader's neighbour does not hold them.

    Attributes:
        hop: the hop at which they are read; the message is in the batch posted before it.
        receiver: ring rank that reads them.
        slots: own slots concerned.
    """

    hop: int
    receiver: int
    slots: SlotRanges


@dataclass(frozen=True)
class Homecoming:
    """dK/dV of some of this rank's own slots, sent home by a rank that does not hand them on.

    Attributes:
        hop: the hop at which they were computed; the message is in the batch after it.
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
        departures: by ascending hop, from hop 2 on.
        homecomings: by ascending hop.
    """

    visits: tuple[Visit | None, ...]
    departures: tuple[Departure, ...]
    homecomings: tuple[Homecoming, ...]

    def visit(self, hop: int) -> Visit | None:
        """The visit of a hop, None where there is none."""
        return self.visits[hop] if 0 <= hop < len(self.visits) else None

    @property
    def hops(self) -> int:
        """Hops at which this rank computes, receives or sends."""
        return max(len(self.visits), self.departures[-1].hop if self.departures else 0)

    @property
    def tokens_sent(self) -> int:
        """Tokens that leave in a forward pass, per K/V head."""
        handed_on = sum(count_slots(visit.forward) for visit in self.visits if visit is not None)
        return handed_on + sum(count_slots(departure.slots) for departure in self.departures)

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
        limit: hops after the first that a lane has at most on any rank; the same on all.
        lowered: its steps forward (False) and backward (True), once `lowering.py` has made them.
    """

    kv_heads: slice
    lanes: tuple[LanePlan, ...]
    limit: int
    lowered: dict[bool, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def ring_rank(self) -> int:
        """Return whose part this is."""
        own = self.lanes[0].visits[0]
        assert own is not None, "hop 0 is the own shard"
        return own.origin

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
        return sum(lane.tokens_sent for lane in self.lanes)


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
