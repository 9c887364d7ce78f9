"""Estimate the peak memory of a ring pass on one rank: its steps with bytes for buffers. Pure arithmetic.

Owns the count of message buffers, accumulators and kernel workspace; what stays at home (q, k, v, out and
their gradients) is `model_memory.py`'s. The steps are those that real ranks run, so the live tensors are
not a formula but the schedule's. `tools/check_plan.py` compares the result with real ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from ds_ring.kernels.workspace import FLOAT, HopShape, get_workspace_bytes
from ds_ring.plugin import KERNELS, load
from ds_ring.schedule.lowering import count_heads, lower_pass
from ds_ring.schedule.rank_plan import HeadClassPlan
from ds_ring.schedule.steps import (
    RESULTS,
    SHARD,
    Compute,
    Free,
    HeadChunk,
    Payload,
    Schedule,
    ScheduleStep,
    Send,
)

CHUNKS_LOOKED_AT = 4  # of heads that are read alike: later chunks meet what these meet


@dataclass(frozen=True)
class PassShape:
    """Describe the tensors of a pass on one rank."""

    batch: int  # B
    group: int  # query heads that share a K/V head
    local_tokens: int  # slots S of a shard
    head_dim: int  # D
    element_bytes: int  # of q, k and v
    chunk_bytes: int  # see `lowering.py`
    kernel: str  # the fast one of a device
    v_head_dim: int | None = None  # E of values and outputs; None is D

    @property
    def value_dim(self) -> int:
        """Return E, the head_dim of values and outputs."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def pair_dim(self) -> int:
        """Return D + E: the elements of a token's K and V of one head, which travel together."""
        return self.head_dim + self.value_dim

    def slot_bytes(self, payload: Payload) -> int:
        """Return the bytes of a slot of one head in a buffer: of K and V, or of dK and dV, together."""
        element = 2 if payload is Payload.ROUNDED else FLOAT
        if payload is Payload.KEYS:
            element = self.element_bytes
        if payload is Payload.PARTS and self.parts_wait:
            element = self.element_bytes
        return self.pair_dim * element

    @property
    def parts_wait(self) -> bool:
        """Return whether parts wait without float32: [Note: parts that wait] in ring/accumulator.py."""
        return self.element_bytes < FLOAT and getattr(load(KERNELS[self.kernel].home), "few_parts", False)

    @property
    def head_bytes(self) -> int:
        """Return the bytes of one head in the smaller one of local K and V."""
        narrower = min(self.head_dim, self.value_dim)
        return self.batch * self.local_tokens * narrower * self.element_bytes

    def schedule(self, classes: Iterable[HeadClassPlan], backward: bool) -> Schedule:
        """Return a rank's schedule, its heads in chunks as tensors of this shape are sent."""
        classes = tuple(classes)
        # A ring of one sends nothing: see `RingPass`.
        chunked = classes[0].limit or self.element_bytes < FLOAT
        head_bytes = self.head_bytes if chunked else 0
        sizes = {"head_bytes": head_bytes, "chunk_bytes": self.chunk_bytes}
        return lower_pass(classes, self.group, backward=backward, **sizes)


class PassMemory(NamedTuple):
    """Hold the bytes of a pass without its inputs and results."""

    buffers: int  # of messages; kept from pass to pass
    accumulators: int  # float32 results of low-precision inputs
    workspace: int  # of the kernel and the merge

    @property
    def total(self) -> int:
        """Return the sum as if all were highest at once, which they are within a few percent."""
        return sum(self)


def pass_memory(
    classes: tuple[HeadClassPlan, ...], shape: PassShape, *, backward: bool = True, first: bool = False
) -> PassMemory:
    """Return the most bytes of a forward pass and, by default, of the backward pass.

    Args:
        classes: of one rank, one for each class of heads (or some of many equal ones).
        shape: of the tensors.
        backward: False for inference.
        first: no pass before has left its buffers; else all of them are there from the start, as in training.
    """
    meter = _Meter(shape)
    for direction in (False, True)[: 1 + backward]:
        meter.run(_shortened(shape.schedule(classes, direction)))
    return meter.first if first else PassMemory(meter.most_used, *meter.extra)


def _shortened(schedule: Schedule) -> Schedule:
    """Return a schedule with the first few chunks of those that have the same steps."""
    seen: Counter[int] = Counter()
    chunks = []
    for chunk in schedule.chunks:
        seen[id(chunk.steps)] += 1
        if seen[id(chunk.steps)] <= CHUNKS_LOOKED_AT:
            chunks.append(chunk)
    return replace(schedule, chunks=tuple(chunks))


class _Meter:
    """Count bytes alive by what they are for, and the most there were.

    Args:
        shape: of the tensors.

    Attributes:
        most_used: of message buffers.
        extra: accumulators and workspace, where their sum is highest.
        first: all of it, where the sum is highest while message buffers are made as they are needed.
    """

    def __init__(self, shape: PassShape) -> None:
        self.shape = shape
        self.used = self.most_used = self.accumulators = 0
        self.extra = (0, 0)
        self.first = PassMemory(0, 0, 0)
        self.sizes: dict[tuple[int, int], int] = {}  # by chunk and buffer, of those that are alive

    def run(self, schedule: Schedule) -> None:
        """Take, use and free what the steps of a schedule do."""
        for batch in schedule.batches:
            for index, steps in batch.rounds:
                chunk = schedule.chunks[index]
                # As in `RingPass`: results are made in the batch in which the chunk sets out.
                if (index, RESULTS) not in self.sizes:
                    self.sizes[index, RESULTS] = size = self._results_bytes(chunk, schedule.backward)
                    self.accumulators += size
                for step in (*steps.arrived, *steps.posted):
                    self._do(index, chunk, step)
            # After the messages of all chunks: these are in flight while any of them computes.
            for index, steps in batch.rounds:
                for compute in steps.computed:
                    self._do(index, schedule.chunks[index], compute)

    def _do(self, index: int, chunk: HeadChunk, step: ScheduleStep) -> None:
        if isinstance(step, Free):
            size = self.sizes.pop((index, step.buffer), 0)  # 0: a copy that was not needed
            if step.buffer == RESULTS:
                self.accumulators -= size
            else:
                self.used -= size
        elif isinstance(step, Send):
            # as `check_keys_apart` of ring/pool.py
            apart = self.shape.kernel == "cpu" and self._rows(chunk.kv_heads) == 1
            of_shard = step.buffer == SHARD and step.payload is Payload.KEYS and len(step.ranges) == 1
            if not (step.in_place or (apart and of_shard)):
                self._take(index, chunk, step.packed)
        elif isinstance(step, Compute):
            if step.gradients is not None:
                self._take(index, chunk, step.gradients)
            workspace = self._workspace(chunk, step)
            self._note(workspace)
            self.extra = max(self.extra, (self.accumulators, workspace), key=sum)
        else:  # keys and gradients that arrive, or are put together
            self._take(index, chunk, step.buffer)

    def _take(self, index: int, chunk: HeadChunk, buffer: int) -> None:
        if (index, buffer) not in self.sizes:
            payload, slots = chunk.steps.buffers[buffer]
            size = slots * self._rows(chunk.kv_heads) * self.shape.slot_bytes(payload)
            self.sizes[index, buffer] = size
            self.used += size
            self.most_used = max(self.most_used, self.used)
            self._note(0)

    def _note(self, workspace: int) -> None:
        # Buffers that were in use stay with the pool.
        now = PassMemory(self.most_used, self.accumulators, workspace)
        self.first = max(self.first, now, key=sum)

    def _results_bytes(self, chunk: HeadChunk, backward: bool) -> int:
        """Return the bytes of float32 results in addition to those of the inputs' dtype.

        One part, as a ring of one has, is rounded as it is; two that wait are as large as a float32 sum.
        """
        tiles = [step.tiles for steps in chunk.steps.rounds for step in steps.computed]
        is_one_part = len(tiles) == len(tiles[0]) == 1 and (tiles[0].q.slot_step == 1).all()
        if self.shape.element_bytes >= FLOAT or (self.shape.parts_wait and is_one_part):
            return 0
        rows, shape = self._rows(chunk.query_heads), self.shape
        elements = rows * shape.value_dim  # out, or dQ with the own shard's dK and dV
        if backward:
            elements = rows * shape.head_dim + self._rows(chunk.kv_heads) * shape.pair_dim
        return elements * shape.local_tokens * FLOAT

    def _workspace(self, chunk: HeadChunk, step: Compute) -> int:
        shape = self.shape
        keys = shape.local_tokens if step.buffer == SHARD else chunk.steps.buffers[step.buffer].slots
        rows, kv_rows = self._rows(chunk.query_heads), self._rows(chunk.kv_heads)
        widths = (shape.head_dim, shape.element_bytes, shape.value_dim)
        hop = HopShape(rows, kv_rows, shape.local_tokens, keys, *widths)
        return get_workspace_bytes(shape.kernel, step.tiles, hop, step.gradients is not None)

    def _rows(self, heads: slice) -> int:
        return self.shape.batch * count_heads(heads)
