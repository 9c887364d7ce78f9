"""From a plan to the steps of a rank: the only place that knows in which order a pass does things.

A plan says who reads what and who computes what. Here it becomes `steps.py`'s lists, once for the forward and
once for the backward pass: overlap, head chunks, double buffers, direct sends and gradient returns are
decided here and nowhere else.

[Note: one hop behind]
In the backward pass keys and values travel as in the forward one, and float32 accumulators of dK and dV
follow one hop behind them: what this rank adds to a shard at hop s can only be sent on once it is computed,
in the batch posted before hop s + 1; the sum over the ranks before it arrives while hop s is computed. Where
a token is handed on no further its accumulator returns to its owner directly. No hop's K/V is ever kept.
(Keys for the next node are kept for R batches, `directions.py`; which sums are handed on: `head_class.py`.)

[Note: head chunks]
A chunk needs buffers of ten shard-sized tensors at most (backward: K/V here and coming, accumulators coming,
here and leaving). Heads are independent, so they go round in chunks one after the other and the buffers
shrink by the number of chunks, as long as a chunk's messages stay large enough to be worth sending.

[Note: one chunk after another]
The last hop of a chunk has nothing to receive, and gradients return after it: with two ranks half of all
that is sent would be waited for. So a chunk sets out while the one before it is at its last hop: its first
keys and values travel then, and the gradients of the one before return while it computes. Only the first hop
of the first chunk and the last gradients of the last one are exposed, 1 / chunks of it all. In the backward
pass that takes up to 14 buffers. Where chunks are fewer than `MANY_CHUNKS`, and so their buffers large, a
chunk sets out one batch later, while the gradients of the one before return. All ranks count the hops of a
plan's directions, not their own: so the order of all messages is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable

from ds_ring.masks.slot_ranges import SlotRanges, count_slots
from ds_ring.schedule.directions import part_of
from ds_ring.schedule.head_chunks import MANY_CHUNKS, head_chunks, query_heads_of
from ds_ring.schedule.rank_plan import DirectionPlan, HeadClassPlan, HopPlan, RankPlan
from ds_ring.schedule.steps import (
    RESULTS,
    SHARD,
    Accumulate,
    Buffer,
    ChunkSteps,
    Compute,
    Free,
    HeadChunk,
    Payload,
    Recv,
    Round,
    Schedule,
    Send,
)


def lower_pass(
    classes: Iterable[HeadClassPlan], group: int, *, backward: bool, head_bytes: int = 0, chunk_bytes: int = 1
) -> Schedule:
    """Return the schedule of one rank.

    Args:
        classes: the rank's part of the plan, one entry for each class of K/V heads that are read alike.
        group: query heads that share a K/V head.
        backward: of the backward pass.
        head_bytes: local K (or V) of one head, bytes; 0 for all heads of a class together.
        chunk_bytes: what K (or V) of a chunk should have at the least; see `head_chunks.py`.
    """
    chunks = [
        (one, kv_heads) for one in classes for kv_heads in head_chunks(one.kv_heads, head_bytes, chunk_bytes)
    ]
    # few chunks have large buffers: see [Note: one chunk after another]
    later = int(backward and len(chunks) < MANY_CHUNKS)
    return Schedule(
        chunks[0][0].ring_rank,
        backward,
        tuple(
            HeadChunk(kv, query_heads_of(kv, group), lower_class(one, backward), max(one.limit + later, 1))
            for one, kv in chunks
        ),
    )


def lower_rank(plan: RankPlan, *, backward: bool, head_bytes: int = 0, chunk_bytes: int = 1) -> Schedule:
    """Return the schedule of one rank, made once for each pass and size of chunk; see `lower_pass`."""
    key = (backward, head_bytes, chunk_bytes)
    if key not in plan.schedules:
        sizes = {"head_bytes": head_bytes, "chunk_bytes": chunk_bytes}
        plan.schedules[key] = lower_pass(plan.classes, plan.group, backward=backward, **sizes)
    found: Schedule = plan.schedules[key]
    return found


def lower_class(plan: HeadClassPlan, backward: bool) -> ChunkSteps:
    """Return the steps of any head chunk of a class; made once for each pass and kept with the plan."""
    if backward not in plan.lowered:
        plan.lowered[backward] = _lowered(plan, backward)
    return plan.lowered[backward]


def _lowered(plan: HeadClassPlan, backward: bool) -> ChunkSteps:
    own = plan.directions[0].at(0)
    assert own is not None, "a rank always has its own shard"
    valid = count_slots(own.held)
    # numbers 0 and 1: SHARD and RESULTS
    buffers = [Buffer(Payload.KEYS, valid), Buffer(Payload.GRADIENTS, valid)]
    directions = [_Direction(direction, buffers, backward) for direction in plan.directions]
    rounds: list[Round] = []
    arrived: list[Accumulate | Free] = []
    for hop in range(
        max(
            direction.backward_batches if backward else direction.forward_batches
            for direction in plan.directions
        )
    ):
        posted = [step for direction in directions for step in direction.post(hop)]
        # the own shard is computed once, whichever way it leaves
        computing = directions if hop else directions[:1]
        computed = [step for direction in computing for step in direction.compute(hop)]
        rounds.append(Round(tuple(arrived), tuple(posted), tuple(computed)))
        arrived = [step for direction in directions for step in direction.arrive(hop)]
    arrived += [step for direction in directions for step in direction.let_go()]
    rounds.append(Round((*arrived, Free(RESULTS))))
    return ChunkSteps(tuple(buffers), tuple(rounds))


class _Direction:
    """Follow one direction of travel: which buffers hold its keys and gradients at the present hop.

    Args:
        plan: the direction on this rank.
        buffers: of the chunk; grows here.
        backward: gradients follow the keys.
    """

    def __init__(self, plan: DirectionPlan, buffers: list[Buffer], backward: bool) -> None:
        self.plan, self.buffers, self.backward = plan, buffers, backward
        self.keys = SHARD  # the buffer of the present keys
        self.came = {SHARD: -1, RESULTS: -1}  # by buffer: the last batch that what is in it depends on
        self.gradients: dict[int, int] = {0: RESULTS}  # buffers of accumulators, by hop
        self.parts: list[tuple[int, SlotRanges]] = []  # of the next keys: buffer, slots there
        self.returns: list[tuple[int, SlotRanges]] = []  # gradients of own slots that are on their way
        self.partial: tuple[int, SlotRanges] | None = None  # gradients of the present keys, likewise
        self.across = SHARD  # the buffer of the keys that go to the next node
        self.crossing: list[tuple[int, SlotRanges]] = []  # parts of keys on their way from another node
        self.returning: list[tuple[HopPlan, int]] = []  # hops whose gradients return, and buffers of these
        self.leaving: list[int] = []  # buffers that are being sent: free once the batch is over

    def post(self, hop: int) -> list[Send | Recv]:
        """Return the messages of the batch that is posted before a hop is computed.

        The order (keys handed on, to the next node, sent directly, gradients to the next rank, gradients
        returned) is the same on both sides of every connection.
        """
        here, coming = self.plan.at(hop), self.plan.at(hop + 1)
        steps: list[Send | Recv] = []
        if here is not None and len(here.forward):
            steps.append(self._send(self.keys, here, here.goes_to, here.forward))
        steps += self._post_across(hop)
        own = self.plan.at(0)
        for direct in self.plan.direct_sends:
            # in the batch before the hop at which it is read
            if direct.hop == hop + 1 and own is not None:
                steps.append(self._send(SHARD, own, direct.receiver, direct.slots))
        if coming is not None:
            # at hop 1 the neighbour is the origin, and everything is relayed
            if len(coming.relayed) and not self.plan.direction.crosses(coming.hop):
                steps.append(self._receive(hop, coming, coming.came_from, coming.relayed, self.parts))
            if len(coming.from_origin):
                steps.append(self._receive(hop, coming, coming.origin, coming.from_origin, self.parts))
        return steps + self._post_gradients(hop) if self.backward else steps

    def _post_across(self, hop: int) -> list[Send | Recv]:
        """Return a batch's part of the keys that go to the next node, and of those that come from one."""
        direction = self.plan.direction
        if not (inner := direction.ranks_per_node):
            return []
        first = hop - hop % inner
        leaving, coming = self.plan.at(first), self.plan.at(first + inner)
        steps: list[Send | Recv] = []
        if leaving is not None and len(part := part_of(leaving.across, hop % inner, inner)):
            steps.append(self._send(self.across, leaving, leaving.across_to, part))
        if coming is not None and len(part := part_of(coming.relayed, hop % inner, inner)):
            steps.append(self._receive(hop, coming, coming.came_from, part, self.crossing))
        return steps

    def _receive(
        self, batch: int, coming: HopPlan, sender: int, slots: SlotRanges, parts: list[tuple[int, SlotRanges]]
    ) -> Recv:
        """Return the step that receives some keys of a hop in a batch; its buffer is added to `parts`."""
        buffer = self._new(Payload.KEYS, slots)
        self.came[buffer] = batch
        parts.append((buffer, coming.in_payload(slots)))
        return Recv(Payload.KEYS, buffer, sender, coming.origin, slots)

    def _post_gradients(self, hop: int) -> list[Send | Recv]:
        """Return the messages of what the hop before found, and of what belongs to this hop's keys."""
        done, here = self.plan.at(hop - 1), self.plan.at(hop)
        steps: list[Send | Recv] = []
        # the own shard's gradients stay in RESULTS
        leaving = done if done is not None and done.hop > 0 else None
        if leaving is not None and len(leaving.sums_on):
            found = self.gradients[leaving.hop]
            steps.append(self._send(found, leaving, leaving.goes_to, leaving.sums_on))
        if here is not None and len(here.sums_in):
            buffer = self._new(Payload.GRADIENTS, here.sums_in)
            self.partial = buffer, here.in_payload(here.sums_in)
            steps.append(Recv(Payload.GRADIENTS, buffer, here.came_from, here.origin, here.sums_in))
        if leaving is not None:
            self.returning.append((leaving, self.gradients.pop(leaving.hop)))
        return steps + self._post_returns(hop, Payload.ROUNDED if self.plan.rounded else Payload.GRADIENTS)

    def _post_returns(self, hop: int, payload: Payload) -> list[Send | Recv]:
        """Return the messages of gradients that return to their owners, and to this rank."""
        steps: list[Send | Recv] = []
        returning, self.returning = self.returning, []
        for one, found in returning:
            number, parts = hop - 1 - one.hop, self.plan.direction.batches(one.hop)
            if len(part := part_of(one.ends_here, number, parts)):
                steps.append(self._send(found, one, one.origin, part, payload))
            if number + 1 < parts and len(one.ends_here):
                self.returning.append((one, found))
            else:
                self.leaving.append(found)
        for back in self.plan.gradient_returns:
            number, parts = hop - 1 - back.hop, self.plan.direction.batches(back.hop)
            if 0 <= number < parts and len(part := part_of(back.slots, number, parts)):
                buffer = self._new(payload, part)
                self.returns.append((buffer, part))
                steps.append(Recv(payload, buffer, back.sender, self._ring_rank, part))
        return steps

    def compute(self, hop: int) -> list[Compute]:
        """Return what is computed at a hop: nothing, or one step."""
        here = self.plan.at(hop)
        if here is None:
            return []
        gradients = None
        if self.backward:
            if hop:
                self.gradients[hop] = self._new(Payload.GRADIENTS, here.held)
                # until a neighbour's sum is added the gradients depend on the keys alone
                self.came[self.gradients[hop]] = self.came[self.keys]
            gradients = self.gradients[hop]
        return [Compute(hop, self.keys, here.tiles, gradients, here.origin, self.came[self.keys])]

    def arrive(self, hop: int) -> list[Accumulate | Free]:
        """Return what is done once the batch posted before a hop is over."""
        steps: list[Accumulate | Free] = []
        if self.plan.direction.crosses(hop + 1):
            # the last part went to the next node, and the last one of the next keys came from another
            steps += self._leave_node()
        if self.parts:
            # the present keys were computed and sent in the batch that is over
            steps += [*self._drop_keys(), *self._join()]
            if self.plan.direction.crosses(hop + 1):
                self.across = self.keys
        elif self.plan.at(hop + 1) is None:
            # No hop reads these keys any more. They must not wait for gradients that still return: the next
            # chunk's keys arrive meanwhile.
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

    def _leave_node(self) -> list[Free]:
        """Return what frees the keys that went to the next node; those that came are the next keys' parts."""
        self.parts, self.crossing = self.crossing + self.parts, []
        gone, self.across = self.across, SHARD
        return [] if gone in (SHARD, self.keys) else [Free(gone)]

    def _join(self) -> list[Accumulate | Free]:
        """Make the next keys of their parts: what was handed on and what the origin sent."""
        parts, self.parts = self.parts, []
        # one message brought everything: its buffer is the payload, nothing is copied
        if len(parts) == 1:
            self.keys = parts[0][0]
            return []
        self.keys = len(self.buffers)
        self.buffers.append(Buffer(Payload.KEYS, sum(self.buffers[buffer].slots for buffer, _ in parts)))
        self.came[self.keys] = max(self.came[buffer] for buffer, _ in parts)
        joined = ((Accumulate(self.keys, one, part, self.came[one]), Free(one)) for one, part in parts)
        return [step for pair in joined for step in pair]

    def _drop_keys(self) -> list[Free]:
        """Return what frees the present keys; not the own shard, nor what still goes to the next node."""
        return [] if self.keys in (SHARD, self.across) else [Free(self.keys)]

    def let_go(self) -> list[Free]:
        """Return what frees the keys that are still here when the pass is over."""
        return [Free(keys) for keys in sorted({self.keys, self.across} - {SHARD})]

    def _send(
        self, buffer: int, hop_plan: HopPlan, peer: int, slots: SlotRanges, payload: Payload | None = None
    ) -> Send:
        """Return the step that sends some slots of a hop's shard; at hop 0 they lie in place."""
        part = slots if hop_plan.hop == 0 else hop_plan.in_payload(slots)
        payload = payload or self.buffers[buffer].payload
        packed = self._new(payload, slots)  # used where the slots do not lie side by side in memory
        self.leaving.append(packed)
        return Send(payload, buffer, part, peer, hop_plan.origin, slots, packed, self.came[buffer])

    def _new(self, payload: Payload, slots: SlotRanges) -> int:
        self.buffers.append(Buffer(payload, count_slots(slots)))
        return len(self.buffers) - 1

    @property
    def _ring_rank(self) -> int:
        own = self.plan.at(0)
        assert own is not None
        return own.origin
