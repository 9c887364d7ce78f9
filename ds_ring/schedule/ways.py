"""The steps of one direction of travel, hop by hop, and what all ways of travel have in common (`Way`).

[Note: one hop behind]
In the backward pass K and V travel as in the forward pass. A rank computes its part of a shard's dK and dV at
hop s, in batch s. In the same batch the sum of the earlier ranks arrives. In batch s + 1 the rank adds both
and sends the sum. So sums follow K and V one hop later. If a sum is not passed on, the rank sends the sum to
the origin ([Note: where gradients are added] in `head_class.py`). K and V of other ranks are never saved.
(Keys for the next node are kept for R batches: [Note: two levels] in `rank_plan.py`.)
"""

from __future__ import annotations

from ds_ring.masks.slots import SlotRanges, count_slots, locate_ranges, select_part
from ds_ring.schedule.rank_plan import DirectionPlan, DirectSend, GradientReturn, HopPlan
from ds_ring.schedule.steps import (
    RESULTS,
    SHARD,
    Accumulate,
    Buffer,
    Compute,
    Free,
    Payload,
    Recv,
    Send,
)


class Way:
    """Hold what hops and stages have in common: the buffers of a chunk, and the steps that take new ones."""

    def __init__(self, plan: DirectionPlan, buffers: list[Buffer], backward: bool) -> None:
        self.plan, self.buffers, self.backward = plan, buffers, backward
        own_shard = plan.at(0)
        assert own_shard is not None, "a rank always has its own shard"
        self.own_shard = own_shard
        # by the batch in which a message is posted: keys sent directly, and gradients that return here
        self.direct_sends: dict[int, list[DirectSend]] = {}
        for direct in plan.direct_sends:
            self.direct_sends.setdefault(plan.get_send_batch(direct.hop), []).append(direct)
        self.gradient_returns: dict[int, list[GradientReturn]] = {}
        for back in plan.gradient_returns:
            for batch in plan.get_return_batches(back.hop):
                self.gradient_returns.setdefault(batch, []).append(back)
        self.returns: list[tuple[int, SlotRanges]] = []  # gradients of the own shard that this rank receives
        self.leaving: list[int] = []  # buffers that are being sent: freed after the batch

    def new(self, payload: Payload, slots: int) -> int:
        """Add a buffer, and return its number."""
        self.buffers.append(Buffer(payload, slots))
        return len(self.buffers) - 1

    def send(
        self, buffer: int, part: SlotRanges, peer: int, origin: int, slots: SlotRanges, needs: int,
        payload: Payload | None = None,
    ) -> Send:  # fmt: skip
        """Return the step that sends a part of a buffer: `slots` of the shard of `origin`."""
        buffer_payload = self.buffers[buffer].payload
        payload = payload or buffer_payload
        packed = self.new(payload, count_slots(slots))  # used where the part is no range of a buffer
        self.leaving.append(packed)
        return Send(payload, buffer, part, peer, origin, slots, packed, needs, buffer_payload)


class HopByHop(Way):
    """Track one direction of travel: the buffers that hold its keys and gradients at the current hop."""

    def __init__(self, plan: DirectionPlan, buffers: list[Buffer], backward: bool) -> None:
        super().__init__(plan, buffers, backward)
        self.keys = SHARD  # buffer of the current keys
        self.came = {SHARD: -1, RESULTS: -1}  # by buffer: the last batch that its contents depend on
        self.gradients: dict[int, int] = {0: RESULTS}  # accumulators: buffer by hop
        self.parts: list[tuple[int, SlotRanges]] = []  # of the next keys: buffer, and its place among them
        self.partial: tuple[int, SlotRanges] | None = None  # other ranks' gradients of the current keys
        self.inter_node = SHARD  # buffer of the keys that go to the next node
        self.crossing: list[tuple[int, SlotRanges]] = []  # parts of keys in flight from another node
        self.returning: list[tuple[HopPlan, int]] = []  # hops whose gradients this rank sends to the owner

    def begin(self) -> list[Accumulate]:
        """Return the steps before the first messages: none."""
        return []

    @property
    def left(self) -> list[int]:
        """Return the buffers that are still in use after the last batch."""
        return [] if self.inter_node == SHARD else [self.inter_node]

    def post(self, hop: int) -> list[Send | Recv]:
        """Return the messages of the batch that is posted before a hop is computed.

        Both sides of every connection use this order: keys to the next rank, keys to the next node, direct
        sends, sums of gradients to the next rank, gradients to their owners.
        """
        here, coming = self.plan.at(hop), self.plan.at(hop + 1)
        steps: list[Send | Recv] = []
        if here is not None and len(here.forward):
            steps.append(self._send(self.keys, here, here.send_rank, here.forward))
        steps += self._post_across(hop)
        for direct in self.direct_sends.get(hop, ()):
            steps.append(self._send(SHARD, self.own_shard, direct.receiver, direct.slots))
        if coming is not None:
            # At hop 1 the neighbour is the origin, so everything counts as relayed.
            if len(coming.relayed) and not self.plan.direction.crosses(coming.hop):
                steps.append(self._receive(hop, coming, coming.recv_rank, coming.relayed, self.parts))
            if len(coming.from_origin):
                steps.append(self._receive(hop, coming, coming.origin, coming.from_origin, self.parts))
        return steps + self._post_gradients(hop) if self.backward else steps

    def _post_across(self, hop: int) -> list[Send | Recv]:
        """Return this batch's part of the keys sent to the next node and received from another one."""
        direction = self.plan.direction
        if not (inner := direction.ranks_per_node):
            return []
        first = hop - hop % inner
        leaving, coming = self.plan.at(first), self.plan.at(first + inner)
        steps: list[Send | Recv] = []
        if leaving is not None and len(part := select_part(leaving.inter_node, hop % inner, inner)):
            steps.append(self._send(self.inter_node, leaving, leaving.inter_node_to, part))
        if coming is not None and len(part := select_part(coming.relayed, hop % inner, inner)):
            steps.append(self._receive(hop, coming, coming.recv_rank, part, self.crossing))
        return steps

    def _receive(
        self, batch: int, coming: HopPlan, sender: int, slots: SlotRanges, parts: list[tuple[int, SlotRanges]]
    ) -> Recv:
        """Return the step that receives some keys of a hop in a batch; append its buffer to `parts`."""
        buffer = self.new(Payload.KEYS, count_slots(slots))
        self.came[buffer] = batch
        parts.append((buffer, locate_ranges(slots, coming.held)))
        return Recv(Payload.KEYS, buffer, sender, coming.origin, slots)

    def _post_gradients(self, hop: int) -> list[Send | Recv]:
        """Return the sends of gradients computed at the hop before, and the receive of sums for this hop."""
        done, here = self.plan.at(hop - 1), self.plan.at(hop)
        steps: list[Send | Recv] = []
        # The gradients of the own shard stay in RESULTS.
        leaving = done if done is not None and done.hop > 0 else None
        if leaving is not None and len(leaving.grad_send):
            gradients = self.gradients[leaving.hop]
            steps.append(self._send(gradients, leaving, leaving.send_rank, leaving.grad_send))
        if here is not None and len(here.grad_recv):
            buffer = self.new(Payload.GRADIENTS, count_slots(here.grad_recv))
            self.partial = buffer, locate_ranges(here.grad_recv, here.held)
            steps.append(Recv(Payload.GRADIENTS, buffer, here.recv_rank, here.origin, here.grad_recv))
        if leaving is not None:
            self.returning.append((leaving, self.gradients.pop(leaving.hop)))
        return steps + self._post_returns(hop, Payload.ROUNDED if self.plan.rounded else Payload.GRADIENTS)

    def _post_returns(self, hop: int, payload: Payload) -> list[Send | Recv]:
        """Return the messages of gradients that return to their owners, and to this rank."""
        steps: list[Send | Recv] = []
        returning, self.returning = self.returning, []
        for hop_plan, gradients in returning:
            number, parts = hop - 1 - hop_plan.hop, self.plan.direction.batches(hop_plan.hop)
            if len(part := select_part(hop_plan.ends_here, number, parts)):
                steps.append(self._send(gradients, hop_plan, hop_plan.origin, part, payload))
            if number + 1 < parts and len(hop_plan.ends_here):
                self.returning.append((hop_plan, gradients))
            else:
                self.leaving.append(gradients)
        for back in self.gradient_returns.get(hop, ()):
            number, parts = hop - 1 - back.hop, self.plan.direction.batches(back.hop)
            if len(part := select_part(back.slots, number, parts)):
                buffer = self.new(payload, count_slots(part))
                self.returns.append((buffer, part))
                steps.append(Recv(payload, buffer, back.sender, self.own_shard.origin, part))
        return steps

    def compute(self, hop: int) -> list[Compute]:
        """Return what a hop computes: no step, or one."""
        here = self.plan.at(hop)
        if here is None:
            return []
        gradients = None
        if self.backward:
            if hop:
                self.gradients[hop] = self.new(Payload.GRADIENTS, count_slots(here.held))
                # Until a neighbour's sum is added, the gradients depend on the keys alone.
                self.came[self.gradients[hop]] = self.came[self.keys]
            gradients = self.gradients[hop]
        return [Compute(hop, self.keys, here.tiles, gradients, (here.origin,), self.came[self.keys])]

    def arrive(self, hop: int) -> list[Accumulate | Free]:
        """Return the steps after a batch: its hop is computed, and its messages have arrived."""
        steps: list[Accumulate | Free] = []
        if self.plan.direction.crosses(hop + 1):
            # All parts were sent to the next node, and all parts of the next keys came from another node.
            self.parts, self.crossing = self.crossing + self.parts, []
            gone, self.inter_node = self.inter_node, SHARD
            steps += [] if gone in (SHARD, self.keys) else [Free(gone)]
        if self.parts:
            # In the batch that has ended, this rank computed with the current keys and sent them on.
            steps += [*self._drop_keys(), *self._join()]
            if self.plan.direction.crosses(hop + 1):
                self.inter_node = self.keys
        elif self.plan.at(hop + 1) is None:
            # No later hop reads these keys. Free them now and not with the gradients that still return,
            # because the next chunk's keys arrive before these do.
            steps += self._drop_keys()
            self.keys = SHARD
        if self.partial is not None:
            buffer, part = self.partial
            self.came[self.gradients[hop]] = hop
            steps += [Accumulate(self.gradients[hop], buffer, part, hop), Free(buffer)]
        for buffer, part in self.returns:
            steps += [Accumulate(RESULTS, buffer, part, hop), Free(buffer)]
        steps += [Free(buffer) for buffer in self.leaving]
        self.partial, self.returns, self.leaving = None, [], []
        return steps

    def _join(self) -> list[Accumulate | Free]:
        """Return the steps that combine the next keys from their parts: relayed ones and direct sends."""
        parts, self.parts = self.parts, []
        steps: list[Accumulate | Free] = []
        slots = sum(self.buffers[buffer].slots for buffer, _ in parts)
        # If one message brought all keys, its buffer is the payload, without a copy.
        self.keys = parts[0][0]
        if len(parts) > 1:
            self.keys = self.new(Payload.KEYS, slots)
            self.came[self.keys] = max(self.came[buffer] for buffer, _ in parts)
            for buffer, part in parts:
                steps += [Accumulate(self.keys, buffer, part, self.came[buffer]), Free(buffer)]
        return steps

    def _drop_keys(self) -> list[Free]:
        """Return the steps that free the current keys, unless they are the shard or still go to a node."""
        return [] if self.keys in (SHARD, self.inter_node) else [Free(self.keys)]

    def _send(
        self, buffer: int, hop_plan: HopPlan, peer: int, slots: SlotRanges, payload: Payload | None = None
    ) -> Send:
        """Return the step that sends some slots of a hop's shard; at hop 0 they are in place in the shard."""
        part = slots if hop_plan.hop == 0 else locate_ranges(slots, hop_plan.held)
        return self.send(buffer, part, peer, hop_plan.origin, slots, self.came[buffer], payload)
