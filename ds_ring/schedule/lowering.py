"""Turn a plan into the steps of a rank, and decide their order.

Only this file does, but for the stages of a direct exchange (`transports/direct/lowering.py`).

It decides everything about time and memory: overlap, head chunks, double buffers, and when direct sends and
gradient returns leave.

[Note: one hop behind]
In the backward pass keys and values travel as in the forward pass, and float32 accumulators of dK and dV
follow them one hop later. This rank's contribution to a shard's gradients at hop s is known only after hop s
is computed, so it is sent in the batch posted before hop s + 1. The sum of the ranks before it arrives while
hop s is computed. Where a token's keys travel no further, its accumulator returns to its owner directly. No
hop's K/V is ever saved. (Keys for the next node are kept for R batches, see `rank_plan.py`; `head_class.py`
explains which sums are passed on.)

[Note: head chunks]
A backward pass in one direction, on one level, needs up to twelve shard-sized tensors besides copies for
sends: K/V in use and arriving, accumulators of dK/dV arriving, in use and leaving, and gradients of the own
shard that return. So heads, which are independent, go around the ring in chunks, one after the other, and the
buffers shrink by the number of chunks. A chunk must be large enough that its messages use the network well;
`chunk_bytes_on` returns the least size.

[Note: one chunk after another]
A chunk receives no keys during its last hop, and its last gradients return after that hop. With two ranks,
all gradients return then, and they would overlap with no computation. So the next chunk starts early: its
first keys and values travel during the last hop of this chunk, and the gradients of this chunk return while
the next chunk computes. During that time the buffers of both chunks exist. If there are fewer chunks than
`MANY_CHUNKS`, the buffers are large, so each chunk of a backward pass starts one batch later: then its first
keys and values travel while the gradients of the chunk before return.

If every rank computes at every hop, only the last gradients of the last chunk are left;
[Note: a part for the end]. A rank that reads nothing at some hops (with a narrow window, for example) has
nothing to compute in their batches. It may send and receive gradients there, in each chunk. The next chunk
does not start earlier for it, because the distance between the starts of two chunks is the same on all ranks.
So all ranks start a chunk in the same batch, and the messages between two ranks have the same order on both.

[Note: a part for the end]
After the last hop of a backward pass its gradients still return to their owners, in one batch or, from other
nodes, in several. So in these batches a chunk computes the queries of the first half of the own shard, one
triangle if it is causal, and only the others in the first batch. TransformerEngine computes its diagonal last
for the same reason. All chunks have this order, so that their number changes no bit. Each part has all keys
of its queries, so that a kernel may read it as the rule on a rectangle.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from ds_ring.masks.joins import cut_queries, find_middle_slot
from ds_ring.masks.slots import SlotRanges, count_slots, locate_ranges, select_part
from ds_ring.schedule.rank_plan import (
    DirectionPlan,
    DirectSend,
    GradientReturn,
    HeadClassPlan,
    HopPlan,
    RankPlan,
    StagePlan,
)
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

MANY_CHUNKS = 16  # from this number on, one chunk is small compared with the shard
CHUNK_BYTES_CPU = 1 << 20  # in rings of at most two ranks
LEAST_BYTES_CPU = 128 << 10
CHUNK_BYTES_GPU = 64 << 20  # fewer heads would not fill the device
STAGE_BYTES_GPU = 128 << 20  # K and V of four shards of 8 Ki tokens, 8 heads and D 128: longer ones gain less
LEAST_KEPT = 2048  # queries of a part for the end: a smaller one takes less time than its call
LONG_SHARD = 131_072  # tokens; from here on copies to the host and back take less time than the pass


def chunk_bytes_on(device_type: str, ring_size: int) -> int:
    """Return the least bytes of K, or of V, for which a head chunk of its own pays.

    On the CPU this is 1 MiB for two ranks. For more ranks it shrinks in proportion to the ring size, down to
    128 KiB, so that for one sequence the message buffers shrink with the ring as the shards do.
    """
    if device_type != "cpu":
        return CHUNK_BYTES_GPU
    return max(2 * CHUNK_BYTES_CPU // max(ring_size, 2), LEAST_BYTES_CPU)


def heads_on_host(setting: bool | Literal["auto"], device_type: str, local_tokens: int) -> bool:
    """Return whether the tensors of attention are kept in host memory between forward and backward pass.

    "auto" does for shards of at least `LONG_SHARD` tokens, except on the CPU.
    """
    return device_type != "cpu" and local_tokens >= LONG_SHARD if setting == "auto" else setting


def stage_shards(
    setting: int | Literal["auto"], device_type: str, ring_size: int, ranks_per_node: int | None,
    shard_bytes: int,
) -> int | None:  # fmt: skip
    """Return how many shards a stage may have; None for a pass hop by hop. See [Note: stages].

    Args:
        setting: most bytes of K and V of a stage, 0 for none; "auto" takes `STAGE_BYTES_GPU` on a GPU if all
            ranks of the ring share a node, else 0.
        device_type: "cpu" or "cuda".
        ring_size: number of ranks.
        ranks_per_node: neighbours on the ring that share a node; None if that is not known.
        shard_bytes: bytes of K and V of a shard.
    """
    if setting == "auto":
        setting = STAGE_BYTES_GPU if device_type != "cpu" and ranks_per_node == ring_size else 0
    most = min(setting // max(shard_bytes, 1), ring_size - 1)
    # Stages of one shard save nothing, but for the only one of a ring of two.
    return most if most >= min(2, ring_size - 1) > 0 else None


def head_bytes(k: Any, v: Any) -> int:
    """Return the bytes of one head of local K or V, [B, G, S, ...] tensors, whichever is smaller."""
    return min(k.nbytes, v.nbytes) // int(k.shape[1])


def split_heads(kv_heads: slice, head_bytes: int, chunk_bytes: int) -> list[slice]:
    """Split K/V heads with equal patterns into equal chunks; see `lower_pass`."""
    step = kv_heads.step or 1
    heads = range(kv_heads.start, kv_heads.stop, step)
    # Only divisors, so that all chunks have one size.
    sizes = [n for n in range(1, len(heads) + 1) if len(heads) % n == 0]
    size = next((n for n in sizes if n * head_bytes >= chunk_bytes), len(heads))  # all: nothing to send
    chunks = (heads[first : first + size] for first in range(0, len(heads), size))
    return [slice(chunk[0], chunk[-1] + 1, step) for chunk in chunks]


def get_query_heads(kv_heads: slice, group: int) -> slice:
    """Return the query heads that share the K/V heads of a slice, `group` query heads for each."""
    # only here may a slice have a step: see `find_head_classes` in `plan.py`
    if group == 1:
        return kv_heads
    return slice(kv_heads.start * group, kv_heads.stop * group)


def count_heads(heads: slice) -> int:
    """Return the number of heads of a slice."""
    return len(range(*heads.indices(heads.stop)))


def lower_pass(
    classes: Iterable[HeadClassPlan], group: int, *, backward: bool, head_bytes: int = 0, chunk_bytes: int = 1
) -> Schedule:
    """Return the schedule of one rank.

    Args:
        classes: the rank's part of the plan, one entry for each class of K/V heads with equal patterns.
        group: number of query heads that share a K/V head.
        backward: whether this is the backward pass.
        head_bytes: bytes of the local K (or V) of one head; 0 puts all heads of a class into one chunk.
        chunk_bytes: minimum bytes of K (or V) of a chunk; see `chunk_bytes_on`.
    """
    cut = [
        (head_class, kv)
        for head_class in classes
        for kv in split_heads(head_class.kv_heads, head_bytes, chunk_bytes)
    ]
    # Few chunks have large buffers, so they start one batch later: [Note: one chunk after another].
    later = int(backward and len(cut) < MANY_CHUNKS)
    chunks = (
        HeadChunk(
            kv,
            get_query_heads(kv, group),
            lower_class(head_class, backward),
            max(head_class.limit + later, 1),
        )
        for head_class, kv in cut
    )
    return Schedule(cut[0][0].ring_rank, backward, tuple(chunks))


def lower_rank(plan: RankPlan, *, backward: bool, head_bytes: int = 0, chunk_bytes: int = 1) -> Schedule:
    """Return the schedule of one rank, cached by pass and chunk size; see `lower_pass`."""
    key = (backward, head_bytes, chunk_bytes)
    if key not in plan.schedules:
        sizes = {"head_bytes": head_bytes, "chunk_bytes": chunk_bytes}
        plan.schedules[key] = lower_pass(plan.classes, plan.group, backward=backward, **sizes)
    schedule: Schedule = plan.schedules[key]
    return schedule


def lower_class(plan: HeadClassPlan, backward: bool) -> ChunkSteps:
    """Return the steps of any head chunk of a class, cached with the plan for each pass."""
    if backward in plan.lowered:
        chunk_steps: ChunkSteps = plan.lowered[backward]
        return chunk_steps
    own_shard = plan.directions[0].at(0)
    assert own_shard is not None, "a rank always has its own shard"
    valid = count_slots(own_shard.held)
    # buffers number 0 and 1 are SHARD and RESULTS
    buffers = [Buffer(Payload.KEYS, valid), Buffer(Payload.GRADIENTS, valid)]
    directions = [
        (direction.lowering or (Stages if direction.direction.stages else _Direction))(
            direction, buffers, backward
        )
        for direction in plan.directions
    ]
    rounds: list[Round] = []
    arrived: list[Accumulate | Free] = [step for direction in directions for step in direction.begin()]
    lengths = (
        direction.backward_batches if backward else direction.forward_batches for direction in plan.directions
    )
    for hop in range(max(lengths)):
        posted = [step for direction in directions for step in direction.post(hop)]
        # The own shard is computed once, although it may travel in two directions.
        computing = directions if hop else directions[:1]
        computed = [step for direction in computing for step in direction.compute(hop)]
        rounds.append(Round(tuple(arrived), tuple(posted), tuple(computed)))
        arrived = [step for direction in directions for step in direction.arrive(hop)]
    for direction in directions:  # the keys that are left at the end of the pass
        arrived += [Free(keys) for keys in direction.left]
    if backward:
        _keep_for_the_end(rounds)
    rounds.append(Round((*arrived, Free(RESULTS))))
    plan.lowered[backward] = steps = ChunkSteps(tuple(buffers), tuple(rounds))
    return steps


def get_kernel_calls(plan: HeadClassPlan, backward: bool) -> list[Compute]:
    """Return the computations of a pass, in order; those of each head chunk of the class."""
    return [step for step_round in lower_class(plan, backward).rounds for step in step_round.computed]


def _keep_for_the_end(rounds: list[Round]) -> None:
    """Move a part of the own shard's tiles to the last batches; [Note: a part for the end]."""
    (own_step,) = rounds[0].computed
    computing = max(number for number, step_round in enumerate(rounds) if step_round.computed)
    middle = find_middle_slot(own_step.tiles)
    count = min(len(rounds) - 1 - computing, middle // LEAST_KEPT)
    if count:
        slots = [middle * part // count for part in range(1, count + 1)]
        *deferred, first = cut_queries(own_step.tiles, slots)
        for number, tiles in zip(range(-count, 1), (*deferred, first), strict=True):
            rounds[number] = rounds[number]._replace(computed=(replace(own_step, tiles=tiles),))


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


class _Direction(Way):
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
        """Return the sends of gradients computed at the last hop, and the receive of sums for this hop."""
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


class Stages(Way):
    """Track the stages of a pass; see [Note: stages] in `rank_plan.py`."""

    def __init__(self, plan: DirectionPlan, buffers: list[Buffer], backward: bool) -> None:
        super().__init__(plan, buffers, backward)
        self.shard = SHARD  # the own keys as they are sent
        self.sent_until = max(self.direct_sends, default=-1)
        self.keys: int | None = SHARD  # buffer of the keys of the present stage; None for no keys
        self.came = -1  # batch that brought them
        self.coming: int | None = None  # of the next stage
        self.done: int | None = None  # gradients of the stage before
        self.here: int | None = None  # gradients of the present stage

    def begin(self) -> list[Accumulate]:
        """Return one packed copy of the own K/V, if that is smaller than a copy for every message."""
        valid = count_slots(self.own_shard.held)
        if sum(count_slots(direct.slots) for direct in self.plan.direct_sends) <= valid:
            return []
        self.shard = self.new(Payload.KEYS, valid)
        return [Accumulate(self.shard, SHARD, self.own_shard.held, -1)]

    @property
    def left(self) -> list[int]:
        """Return the buffers that are still in use after the last batch."""
        return []

    def post(self, number: int) -> list[Send | Recv]:
        """Return the messages of the batch in which a stage is computed.

        They are keys for the next stage and then gradients of the last one, on both sides of a connection.
        """
        steps: list[Send | Recv] = []
        for direct in self.direct_sends.get(number, ()):
            steps.append(self._send(self.shard, -1, direct.receiver, self.own_shard.origin, direct.slots))
        steps += self._post_keys(number)
        return steps + self._post_gradients(number) if self.backward else steps

    def _post_keys(self, number: int) -> list[Send | Recv]:
        """Return the receives of keys for the next stage."""
        coming = self._get_stage(number + 1)
        if coming is None:
            return []
        self.coming = self.new(Payload.KEYS, coming.slots)
        return [
            Recv(Payload.KEYS, self.coming, hop.origin, hop.origin, hop.held, at)
            for hop, at in zip(coming.hops, coming.first, strict=True)
        ]

    def _post_gradients(self, number: int) -> list[Send | Recv]:
        """Return the messages of the gradients of the last stage, to their owners and to this rank."""
        steps: list[Send | Recv] = []
        done = self._get_stage(number - 1) if number > 1 else None
        if done is not None:
            assert self.done is not None, "gradients of a stage that was computed"
            for hop, at in zip(done.hops, done.first, strict=True):
                # they depend on the keys, which arrived two batches ago
                steps.append(self._send(self.done, number - 2, hop.origin, hop.origin, hop.held, at))
            self.leaving.append(self.done)
        return steps + self._receive_returns(number)

    def _receive_returns(self, number: int) -> list[Send | Recv]:
        """Return the receives of gradients of the own shard in a batch."""
        steps: list[Send | Recv] = []
        for back in self.gradient_returns.get(number, ()):
            payload = self._get_return_payload(back.hop)
            buffer = self.new(payload, count_slots(back.slots))
            self.returns.append((buffer, back.slots))
            steps.append(Recv(payload, buffer, back.sender, self.own_shard.origin, back.slots))
        return steps

    def compute(self, number: int) -> list[Compute]:
        """Return what a stage computes: no step, or one."""
        here = self._get_stage(number)
        if here is None:
            return []
        assert self.keys is not None, "keys of a stage that arrived"
        gradients = None
        if self.backward:
            gradients = RESULTS if number == 0 else self.new(self._get_gradients_payload(number), here.slots)
            self.here = gradients
        origins = tuple(hop.origin for hop in here.hops)
        return [Compute(number, self.keys, here.tiles, gradients, origins, self.came)]

    def arrive(self, number: int) -> list[Accumulate | Free]:
        """Return the steps after a batch: its stage is computed, and its messages have arrived."""
        steps: list[Accumulate | Free] = []
        if self.keys not in (None, SHARD):
            steps.append(Free(self.keys))
        steps += self._take_keys(number)
        steps += [Accumulate(RESULTS, buffer, part, number) for buffer, part in self.returns]
        steps += [Free(buffer) for buffer in [*(buffer for buffer, _ in self.returns), *self.leaving]]
        if number == self.sent_until and self.shard != SHARD:
            steps.append(Free(self.shard))
        self.returns, self.leaving = [], []
        self.done, self.here = self.here, None
        return steps

    def _take_keys(self, number: int) -> list[Accumulate | Free]:
        """Make the keys that arrived in a batch those of the next stage; return the steps that this takes."""
        self.keys, self.coming, self.came = self.coming, None, number
        return []

    def _get_gradients_payload(self, number: int) -> Payload:
        """Return what the gradients that a stage computes are."""
        return Payload.ROUNDED if self.plan.rounded else Payload.PARTS

    def _get_return_payload(self, hop: int) -> Payload:
        """Return what gradients are that return to this rank, from the reader at a hop."""
        return Payload.ROUNDED if self.plan.rounded else Payload.PARTS

    def _get_stage(self, number: int) -> StagePlan | None:
        return self.plan.stages[number] if 0 <= number < len(self.plan.stages) else None

    def _send(
        self, buffer: int, needs: int, peer: int, origin: int, slots: SlotRanges, at: int | None = None
    ) -> Send:
        """Return the step that sends slots: in place in the shard, or one after the other from `at` on."""
        part = slots if at is None else np.array([[at, at + count_slots(slots)]])
        return self.send(buffer, part, peer, origin, slots, needs)
