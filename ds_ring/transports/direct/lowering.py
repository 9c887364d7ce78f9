"""The steps of a direct exchange: [Note: direct exchange] in `exchange_table.py`.

Owns their order. A stage of this rank's node goes as in `Stages`. Of a stage of other nodes, number s:

    batch s - 2   the gateway receives the crossing keys from their owners
    batch s - 1   it sends each rank of the node its part, and receives those of other gateways
    batch s       this rank computes
    batch s + 1   gradients go to the gateways
    batch s + 2   the gateway has added them to its own, and returns the sums to the owners
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ds_ring.masks.slots import count_slots, locate_ranges
from ds_ring.schedule.rank_plan import DirectSend, HopPlan, StagePlan
from ds_ring.schedule.stages import Stages
from ds_ring.schedule.steps import Accumulate, Buffer, Free, Payload, Recv, Send

if TYPE_CHECKING:
    from ds_ring.transports.direct.plan import DirectPlan


class DirectWay(Stages):
    """Track the stages of a direct exchange."""

    plan: DirectPlan

    def __init__(self, plan: DirectPlan, buffers: list[Buffer], backward: bool) -> None:
        super().__init__(plan, buffers, backward)
        self.crossed: dict[int, int] = {}  # buffer of the keys that crossed, by stage
        self.sums: dict[int, int] = {}  # buffer of the gradients that this rank adds up, by stage
        self.parts: list[tuple[int, int, np.ndarray]] = []  # sum, received part of it, and its slots there
        self.relays: dict[int, list[DirectSend]] = {}  # by hop at which the keys cross to this rank
        for relay in plan.relays:
            self.relays.setdefault(relay.hop, []).append(relay)

    def _is_far(self, number: int) -> bool:
        """Return whether a stage has tokens of other nodes."""
        stage = self._get_stage(number)
        return stage is not None and number > 0 and stage.hops[0].hop >= self.plan.direction.ranks_per_node

    def _list_hops(self, stage: StagePlan, crossing: bool) -> list[tuple[HopPlan, int]]:
        """Return the hops of a stage whose keys cross to this rank, or the others, with their places."""
        direction = self.plan.direction
        return [
            (hop, at)
            for hop, at in zip(stage.hops, stage.first, strict=True)
            if direction.crosses(hop.hop) is crossing
        ]

    def _post_keys(self, number: int) -> list[Send | Recv]:
        """Return the messages of keys: those that cross, those that this rank relays, those that it reads."""
        steps: list[Send | Recv] = []
        far, at = self._get_stage(number + 2), 0
        if far is not None and self._is_far(number + 2) and (hops := self._list_hops(far, True)):
            total = sum(count_slots(hop.held) for hop, _ in hops)
            buffer = self.crossed[number + 2] = self.new(Payload.KEYS, total)
            for hop, _ in hops:
                steps.append(Recv(Payload.KEYS, buffer, hop.origin, hop.origin, hop.held, at))
                at += count_slots(hop.held)
        if not self._is_far(number + 1):
            return steps + super()._post_keys(number)
        coming = self._get_stage(number + 1)
        assert coming is not None, "a stage of other nodes"
        steps += self._relay(number + 1, coming)
        if relayed := self._list_hops(coming, False):
            self.coming = self.new(Payload.KEYS, coming.slots)
            for hop, at in relayed:
                steps.append(Recv(Payload.KEYS, self.coming, hop.recv_rank, hop.origin, hop.held, at))
        return steps

    def _relay(self, number: int, stage: StagePlan) -> list[Send]:
        """Return the sends of keys that crossed to this rank, to the ranks of its node that read them."""
        steps, first = [], 0
        for hop, _ in self._list_hops(stage, True):
            for relay in self.relays.get(hop.hop, ()):
                part = locate_ranges(relay.slots, hop.held) + first
                buffer, peer = self.crossed[number], relay.receiver
                steps.append(self.send(buffer, part, peer, hop.origin, relay.slots, number - 2))
            first += count_slots(hop.held)
        return steps

    def _take_keys(self, number: int) -> list[Accumulate | Free]:
        """Put the keys that crossed beside those that other gateways sent."""
        super()._take_keys(number)
        crossed = self.crossed.pop(number + 1, None)
        if crossed is None:
            return []
        if self.keys is None:  # all of them crossed
            self.keys, self.came = crossed, number - 1
            return []
        stage = self._get_stage(number + 1)
        assert stage is not None, "a stage of other nodes"
        part = np.array([[at, at + count_slots(hop.held)] for hop, at in self._list_hops(stage, True)])
        return [Accumulate(self.keys, crossed, part, number - 1), Free(crossed)]

    def _post_gradients(self, number: int) -> list[Send | Recv]:
        """Return the messages of gradients: to owners of this node, to and from gateways, to other owners."""
        steps: list[Send | Recv] = []
        if self._is_far(number - 1):
            steps += self._post_parts(number - 1)
            steps += self._receive_returns(number)
        else:
            steps += super()._post_gradients(number)
        if (buffer := self.sums.pop(number - 2, None)) is not None:
            stage = self._get_stage(number - 2)
            assert stage is not None, "a stage of other nodes"
            payload = self._get_return_payload(self.plan.direction.ranks_per_node)
            for hop, at in self._list_hops(stage, True):
                part = np.array([[at, at + count_slots(hop.held)]])
                came = number - 1 if self._has_parts(stage) else self._get_came(number - 2)
                steps.append(self.send(buffer, part, hop.origin, hop.origin, hop.held, came, payload))
            self.leaving.append(buffer)
        return steps

    def _post_parts(self, number: int) -> list[Send | Recv]:
        """Return the messages of a stage's gradients inside the node: to gateways, and to this one."""
        steps: list[Send | Recv] = []
        stage = self._get_stage(number)
        assert stage is not None and self.done is not None, "gradients of a stage that was computed"
        for hop, at in self._list_hops(stage, False):
            came = self._get_came(number)
            steps.append(self._send(self.done, came, hop.recv_rank, hop.origin, hop.held, at))
        crossing = self._list_hops(stage, True)
        for hop, at in crossing:
            for relay in self.relays.get(hop.hop, ()):
                buffer = self.new(Payload.GRADIENTS, count_slots(relay.slots))
                self.parts.append((self.done, buffer, locate_ranges(relay.slots, hop.held) + at))
                steps.append(Recv(Payload.GRADIENTS, buffer, relay.receiver, hop.origin, relay.slots))
        if crossing:
            self.sums[number] = self.done
        else:
            self.leaving.append(self.done)
        return steps

    def arrive(self, number: int) -> list[Accumulate | Free]:
        """Return the steps after a batch; a gateway adds the parts that it has received."""
        steps = super().arrive(number)
        for total, buffer, part in self.parts:
            steps += [Accumulate(total, buffer, part, number), Free(buffer)]
        self.parts = []
        return steps

    def _has_parts(self, stage: StagePlan) -> bool:
        """Return whether other ranks send this gateway gradients of a stage."""
        return any(hop.hop in self.relays for hop, _ in self._list_hops(stage, True))

    def _get_came(self, number: int) -> int:
        """Return the batch that brought the last keys of a stage of other nodes."""
        stage = self._get_stage(number)
        assert stage is not None, "a stage of other nodes"
        return number - 1 if self._list_hops(stage, False) else number - 2

    def _get_gradients_payload(self, number: int) -> Payload:
        """Return float32 for stages of other nodes: sums are added up."""
        return Payload.GRADIENTS if self._is_far(number) else super()._get_gradients_payload(number)

    def _get_return_payload(self, hop: int) -> Payload:
        """Return what gradients are that return to this rank: sums from other nodes."""
        if hop < self.plan.direction.ranks_per_node:
            return super()._get_return_payload(hop)
        return Payload.ROUNDED if self.plan.rounded else Payload.GRADIENTS
