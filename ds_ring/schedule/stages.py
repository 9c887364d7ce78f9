"""The steps of a direction in stages: [Note: stages] in `rank_plan.py`."""

from __future__ import annotations

import numpy as np

from ds_ring.masks.slots import SlotRanges, count_slots
from ds_ring.schedule.rank_plan import DirectionPlan, StagePlan
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
from ds_ring.schedule.ways import Way


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
