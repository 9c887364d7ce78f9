"""One lane of a walk under way: what of the other ranks' shards is here, and the gradients that follow it.

Owns the buffers of a journey and the order of its messages. When it moves on is the ring pass's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ds_ring.masks.slot_ranges import SlotRanges, count_slots, expand_ranges
from ds_ring.masks.tiles import Tiles
from ds_ring.runtime.buffers import Buffers
from ds_ring.runtime.exchange import Cargo, Message
from ds_ring.schedule.rank_plan import LanePlan, Visit

FEW_RANGES = 16  # up to here slices are copied, beyond an index is used
KEYS, GRADIENTS = ("K", "V"), ("dK", "dV")


class Pair(NamedTuple):
    """Two tensors that travel together: K and V, or dK and dV; [B, G, slots, D] each."""

    first: Tensor
    second: Tensor


class Journey:
    """One lane under way.

    Attributes:
        plan: the lane on this rank.
        buffers: where the memory of messages comes from.
        own: K and V of this rank, which departures leave from.
        home: accumulators of the own shard (backward only).
        heads: the K/V heads that these are, a slice of all that the rank has.
        payload: K and V of the present hop.
        finished: accumulators of the present hop.
    """

    def __init__(
        self,
        plan: LanePlan,
        buffers: Buffers,
        own: Pair,
        home: Pair | None = None,
        heads: slice = slice(None),
    ) -> None:
        self.plan, self.buffers, self.own, self.home, self.heads = plan, buffers, own, home, heads
        self.payload = own
        self.finished: Pair | None = None
        self._arriving: list[tuple[SlotRanges, Pair]] = []
        self._partial: tuple[SlotRanges, Pair] | None = None
        self._homecomings: list[tuple[SlotRanges, Pair]] = []
        self._in_flight: list[Tensor] = []  # packed for sending, or sent as they were: free after the wait

    def tiles(self, hop: int) -> Tiles:
        """What is computed at a hop."""
        visit = self.plan.visit(hop)
        assert visit is not None
        return visit.tiles

    def start_gradients(self, hop: int) -> None:
        """Fresh accumulators for a hop; the own shard has its own."""
        visit = self.plan.visit(hop)
        assert self.home is not None
        self.finished = None
        if visit is not None and hop == 0:
            self.finished = self.home
        elif visit is not None:
            self.finished = self._take(self.home, visit.held)
            for tensor in self.finished:
                tensor.zero_()

    def messages(self, hop: int) -> tuple[list[Message], list[Message]]:
        """Sends and receives of the batch posted before hop - 1 is computed.

        The order (payload handed on, payload that departs, accumulators to the next rank, accumulators home)
        is the same on both sides of every connection; [Note: rules of the exchange].
        """
        sends: list[Message] = []
        receives: list[Message] = []
        here, coming = self.plan.visit(hop - 1), self.plan.visit(hop)
        if here is not None and len(here.forward):
            ranges, cargo = _in_payload(here, here.forward), self._cargo(here.origin, here.forward)
            sends += self._packed(here.goes_to, self.payload, ranges, KEYS, cargo)
        for departure in self.plan.departures:
            if departure.hop == hop:
                cargo = self._cargo(self._ring_rank, departure.slots)
                sends += self._packed(departure.receiver, self.own, departure.slots, KEYS, cargo)
        if coming is not None:
            for sender, slots in ((coming.came_from, coming.relayed), (coming.origin, coming.from_origin)):
                if len(slots):
                    arriving = self._take(self.own, slots)
                    self._arriving.append((coming.in_payload(slots), arriving))
                    receives += _messages(sender, arriving, KEYS, self.own, self._cargo(coming.origin, slots))
        if self.home is not None:
            self._add_accumulators(hop, sends, receives)
        return sends, receives

    def _add_accumulators(self, hop: int, sends: list[Message], receives: list[Message]) -> None:
        """Send what hop - 2 finished, receive what belongs to hop - 1, and the own shard's homecomings."""
        assert self.home is not None
        done, here = self.plan.visit(hop - 2), self.plan.visit(hop - 1)
        if done is not None and done.hop > 0:
            assert self.finished is not None
            if len(done.forward):
                ranges, cargo = done.in_payload(done.forward), self._cargo(done.origin, done.forward)
                sends += self._packed(done.goes_to, self.finished, ranges, GRADIENTS, cargo)
        if here is not None and here.hop > 1 and len(here.relayed):
            partial = self._take(self.home, here.relayed)
            self._partial = here.in_payload(here.relayed), partial
            cargo = self._cargo(here.origin, here.relayed)
            receives += _messages(here.came_from, partial, GRADIENTS, self.home, cargo)
        if done is not None and done.hop > 0:
            assert self.finished is not None
            if len(done.ends_here):
                ranges, cargo = done.in_payload(done.ends_here), self._cargo(done.origin, done.ends_here)
                sends += self._packed(done.origin, self.finished, ranges, GRADIENTS, cargo)
            self._in_flight += self.finished
        for coming in self.plan.homecomings:
            if coming.hop == hop - 2:
                arrived = self._take(self.home, coming.slots)
                self._homecomings.append((coming.slots, arrived))
                cargo = self._cargo(self._ring_rank, coming.slots)
                receives += _messages(coming.sender, arrived, GRADIENTS, self.home, cargo)

    def advance(self) -> None:
        """After the wait: take the next payload, add up the gradients that arrived, give back the rest."""
        if self._arriving:
            self.end()  # lets go of the last payload before parts are put together
            self.payload, self._arriving = self._together(self._arriving), []
        if self._partial is not None:
            assert self.finished is not None
            _put(self.finished, *self._partial, add=True)
            self._give(self._partial[1])
        for slots, arrived in self._homecomings:
            assert self.home is not None
            _put(self.home, slots, arrived, add=True)
            self._give(arrived)
        self._give(self._in_flight)
        self._partial, self._homecomings, self._in_flight = None, [], []

    def _together(self, parts: list[tuple[SlotRanges, Pair]]) -> Pair:
        """A payload of its parts: what the neighbour handed on and what came from the origin."""
        if len(parts) == 1:
            return parts[0][1]
        slots = sum(count_slots(ranges) for ranges, _ in parts)
        payload = Pair(*(self.buffers.take(x, slots, x.dtype) for x in self.own))
        for ranges, part in parts:
            _put(payload, ranges, part, add=False)
            self._give(part)
        return payload

    def end(self) -> None:
        """The payload is not needed any more."""
        if self.payload is not self.own:
            self._give(self.payload)
            self.payload = self.own

    @property
    def _ring_rank(self) -> int:
        """Of this rank: hop 0 is its own shard."""
        own = self.plan.visit(0)
        assert own is not None
        return own.origin

    def _cargo(self, origin: int, slots: SlotRanges) -> Cargo:
        return Cargo(origin, slots, self.heads)

    def _packed(
        self, peer: int, pair: Pair, ranges: SlotRanges, names: tuple[str, str], cargo: Cargo
    ) -> list[Message]:
        """What lies at `ranges` as messages; no copy where that is side by side already."""
        packed = Pair(*(self._pack(tensor, ranges) for tensor in pair))
        agreed = self.own if names is KEYS or self.home is None else self.home
        return _messages(peer, packed, names, agreed, cargo)

    def _pack(self, tensor: Tensor, ranges: SlotRanges) -> Tensor:
        if len(ranges) == 1:
            (start, end) = ranges[0].tolist()
            if (part := tensor[:, :, start:end]).is_contiguous():
                return part
        packed = self.buffers.take(tensor, count_slots(ranges), tensor.dtype)
        self._in_flight.append(packed)
        if len(ranges) > FEW_RANGES:
            index = torch.from_numpy(expand_ranges(ranges)).to(tensor.device)
            return torch.index_select(tensor, 2, index, out=packed)
        offset = 0
        for start, end in ranges.tolist():
            packed[:, :, offset : offset + end - start].copy_(tensor[:, :, start:end])
            offset += end - start
        return packed

    def _take(self, like: Pair, slots: SlotRanges) -> Pair:
        return Pair(*(self.buffers.take(x, count_slots(slots), x.dtype) for x in like))

    def _give(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self.buffers.give(tensor)


def _messages(peer: int, pair: Pair, names: tuple[str, str], agreed: Pair, cargo: Cargo) -> list[Message]:
    """A pair as messages, with what the plan and the agreement say of them."""
    parts, count = zip(pair, names, agreed, strict=True), count_slots(cargo.slots)
    return [Message(tensor, peer, name, count, like.dtype, cargo) for tensor, name, like in parts]


def _in_payload(visit: Visit, slots: SlotRanges) -> SlotRanges:
    """Where slots lie in what is here; at hop 0 the shard itself is here, in place."""
    return slots if visit.hop == 0 else visit.in_payload(slots)


def _put(pair: Pair, ranges: SlotRanges, packed: Pair, *, add: bool) -> None:
    """Packed slots where they belong: added to what is there, or in its place."""
    for tensor, part in zip(pair, packed, strict=True):
        if len(ranges) > FEW_RANGES:
            index = torch.from_numpy(expand_ranges(ranges)).to(tensor.device)
            (tensor.index_add_ if add else tensor.index_copy_)(2, index, part)
            continue
        offset = 0
        for start, end in ranges.tolist():
            there, piece = tensor[:, :, start:end], part[:, :, offset : offset + end - start]
            (there.add_ if add else there.copy_)(piece)
            offset += end - start
