"""Peak memory of a ring pass on one rank: its walk once more, with bytes for tensors. Pure arithmetic.

Owns the count of message buffers, accumulators and kernel workspace; what stays at home (q, k, v, out and
their gradients) is `model_memory.py`'s. The walk is the one of `ring_pass.py` and `ring_buffers.py`, batch
by batch over the same plan, so what a batch holds is not a formula but what the plan says it holds.
`tools/check_plan.py` compares the result with real ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ds_ring.masks.slot_ranges import SlotRanges, count_slots
from ds_ring.schedule.head_chunks import MANY_CHUNKS, head_chunks, query_heads_of
from ds_ring.schedule.rank_plan import LanePlan, Visit, WalkPlan
from ds_ring.schedule.workspace import FLOAT, HopShape, workspace_bytes

GROUPS_LOOKED_AT = 4  # of equal ones: later groups meet what these meet


@dataclass(frozen=True)
class PassShape:
    """The tensors of a pass on one rank.

    Attributes:
        batch: B.
        group: query heads that share a K/V head.
        local_tokens: slots S of a shard.
        head_dim: D.
        element_bytes: of q, k and v.
        chunk_bytes: see `head_chunks.py`.
        kernel: "cpu" or "flex".
        contiguous: False where k and v are views of [B, S, G, D], as transformers makes them: each
        hand-over of
            the own shard is then a copy.
    """

    batch: int
    group: int
    local_tokens: int
    head_dim: int
    element_bytes: int
    chunk_bytes: int
    kernel: str
    contiguous: bool = True

    @property
    def head_bytes(self) -> int:
        """Local K of one head."""
        return self.batch * self.local_tokens * self.head_dim * self.element_bytes


class PassMemory(NamedTuple):
    """Bytes beside what stays at home.

    Attributes:
        buffers: of messages; kept from pass to pass.
        accumulators: float32 results of low-precision inputs.
        workspace: of the kernel and the merge.
    """

    buffers: int
    accumulators: int
    workspace: int

    @property
    def total(self) -> int:
        """As if all were highest at once, which they are within a few percent."""
        return sum(self)


@dataclass
class _Meter:
    """Bytes alive by what they are for, and the most there were."""

    shape: PassShape
    used: int = 0
    most_used: int = 0
    accumulators: int = 0
    extra: tuple[int, int] = (0, 0)  # accumulators and workspace, where their sum is highest

    def take(self, size: int) -> int:
        self.used += size
        self.most_used = max(self.most_used, self.used)
        return size

    def compute(self, workspace: int) -> None:
        self.extra = max(self.extra, (self.accumulators, workspace), key=sum)


@dataclass
class _Lane:
    """A journey of `ring_buffers.py`, with sizes for tensors.

    Attributes:
        plan: the lane on this rank.
        meter: where bytes are counted.
        heads: batch x K/V heads of the group.
        whole: the group's part of a shard is one contiguous piece.
        backward: accumulators follow.
    """

    plan: LanePlan
    meter: _Meter
    heads: int
    whole: bool
    backward: bool
    payload: int = 0
    finished: int = 0
    arriving: list[int] = field(default_factory=list)
    passing: int = 0  # given back after the wait

    def _bytes(self, slots: SlotRanges, gradients: bool = False) -> int:
        element = FLOAT if gradients else self.meter.shape.element_bytes
        return 2 * count_slots(slots) * self.heads * self.meter.shape.head_dim * element

    def _pack(self, slots: SlotRanges, held: int, gradients: bool = False, own: bool = False) -> None:
        """A copy, but where the slots lie side by side already."""
        whole = count_slots(slots) == held and (self.whole or not own)
        in_place = whole or (self.heads == 1 and (self.meter.shape.contiguous or not own))
        if len(slots) > 1 or not in_place:
            self.passing += self.meter.take(self._bytes(slots, gradients))

    def messages(self, hop: int) -> None:
        here, coming = self.plan.visit(hop - 1), self.plan.visit(hop)
        local = self.meter.shape.local_tokens
        if here is not None and len(here.forward):
            slots = here.forward if here.hop == 0 else here.in_payload(here.forward)
            self._pack(slots, count_slots(here.held) if here.hop else local, own=here.hop == 0)
        for departure in self.plan.departures:
            if departure.hop == hop:
                self._pack(departure.slots, local, own=True)
        if coming is not None:
            parts = [part for part in (coming.relayed, coming.from_origin) if len(part)]
            self.arriving = [self.meter.take(self._bytes(part)) for part in parts]
        if self.backward:
            self._accumulators(hop)

    def _accumulators(self, hop: int) -> None:
        done, here = self.plan.visit(hop - 2), self.plan.visit(hop - 1)
        leaving = done if done is not None and done.hop > 0 else None
        if leaving is not None and len(leaving.forward):
            self._pack(leaving.in_payload(leaving.forward), count_slots(leaving.held), gradients=True)
        if here is not None and here.hop > 1 and len(here.relayed):
            self.passing += self.meter.take(self._bytes(here.relayed, gradients=True))
        if leaving is not None:
            if len(leaving.ends_here):
                self._pack(leaving.in_payload(leaving.ends_here), count_slots(leaving.held), gradients=True)
            self.passing += self.finished
        for coming in self.plan.homecomings:
            if coming.hop == hop - 2:
                self.passing += self.meter.take(self._bytes(coming.slots, gradients=True))

    def start_gradients(self, hop: int) -> None:
        visit = self.plan.visit(hop)
        if hop and visit is not None:
            self.finished = self.meter.take(self._bytes(visit.held, gradients=True))

    def advance(self) -> None:
        if self.arriving:
            self.end()
            self.payload = sum(self.arriving)
            if len(self.arriving) > 1:  # put together in a buffer of their own
                self.meter.take(self.payload)
                self.meter.used -= self.payload
            self.arriving = []
        self.meter.used -= self.passing
        self.passing = 0

    def end(self) -> None:
        self.meter.used -= self.payload
        self.payload = 0


def pass_memory(walks: tuple[WalkPlan, ...], shape: PassShape, *, backward: bool = True) -> PassMemory:
    """What a forward pass and, unless told otherwise, the backward pass need at most, bytes.

    Args:
        walks: of one rank, one for each class of heads (or some of many equal ones).
        shape: of the tensors.
        backward: False for inference.
    """
    meter = _Meter(shape)
    for direction in (False, True)[: 1 + backward]:
        _go(list(_groups(walks, shape, meter, direction)))
    return PassMemory(meter.most_used, *meter.extra)


Walk = tuple[int, Iterator[bool]]


def _groups(walks: tuple[WalkPlan, ...], shape: PassShape, meter: _Meter, backward: bool) -> Iterator[Walk]:
    head_bytes = shape.head_bytes if walks[0].limit else 0  # a ring of one sends nothing
    chunks = [
        (walk, group) for walk in walks for group in head_chunks(walk.kv_heads, head_bytes, shape.chunk_bytes)
    ]
    later = int(backward and len(chunks) < MANY_CHUNKS)
    seen: dict[int, int] = {}
    for walk, group in chunks:
        seen[id(walk)] = seen.get(id(walk), 0) + 1
        if seen[id(walk)] <= GROUPS_LOOKED_AT:
            heads = query_heads_of(group, shape.group)
            sizes = len(range(*heads.indices(heads.stop))), len(range(*group.indices(group.stop)))
            whole = shape.contiguous and shape.batch == 1 and ((group.step or 1) == 1 or sizes[1] == 1)
            yield walk.limit + later, _walk(walk, sizes, whole, meter, backward)


def _walk(
    plan: WalkPlan, heads: tuple[int, int], whole: bool, meter: _Meter, backward: bool
) -> Iterator[bool]:
    """`_forward_walk` or `_backward_walk` of the ring pass: True for messages, False for a computed hop."""
    shape = meter.shape
    rows, kv_rows = shape.batch * heads[0], shape.batch * heads[1]
    results = rows + (2 * kv_rows if backward else 0)
    low = shape.element_bytes < FLOAT
    accumulators = results * shape.local_tokens * shape.head_dim * FLOAT if low else 0
    meter.accumulators += accumulators
    lanes = [_Lane(lane, meter, kv_rows, whole, backward) for lane in plan.lanes]
    for hop in range(max(lane.backward_batches if backward else lane.hops for lane in plan.lanes)):
        for lane in lanes:
            lane.messages(hop + 1)
        yield True
        for lane in lanes:
            if backward:
                lane.start_gradients(hop)
        for lane in lanes if hop else lanes[:1]:
            visit = lane.plan.visit(hop)
            if visit is not None:
                meter.compute(_workspace(visit, shape, rows, kv_rows, backward))
        yield False
        for lane in lanes:
            lane.advance()
    for lane in lanes:
        lane.end()
    meter.accumulators -= accumulators


def _workspace(visit: Visit, shape: PassShape, rows: int, kv_rows: int, backward: bool) -> int:
    keys = count_slots(visit.held) if visit.hop else shape.local_tokens
    hop = HopShape(rows, kv_rows, shape.local_tokens, keys, shape.head_dim, shape.element_bytes)
    return workspace_bytes(shape.kernel, visit.tiles, hop, backward)


def _go(walks: list[Walk]) -> None:
    """`RingPass._go` without messages: a walk sets out while the one before it is at its last hop."""
    under_way: list[Iterator[bool]] = []
    left = 0
    while walks or under_way:
        if walks and left == 0:
            hops, newest = walks.pop(0)
            under_way.append(newest)
            left = max(hops, 1)
        under_way = [walk for walk in under_way if next(walk, None) is not None]
        left = max(left - 1, 0)
        for walk in under_way:
            next(walk)
