"""Prove that the schedules of all ranks fit together, before anything runs them.

Owns what concerns more than one rank: messages that match on both ends, and ranks that never wait in a
circle. The life of one rank's buffers is `symbolic.py`'s; that every pair of the mask is computed once, and
its gradients return once, `coverage.py`'s. A schedule that passes cannot hang, mix up messages, read a buffer
that is not filled, or lose or double a gradient.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple, NoReturn

from ds_ring.errors import RingScheduleError
from ds_ring.masks.slots import count_slots
from ds_ring.schedule.lowering import get_query_heads, lower_pass
from ds_ring.schedule.plan import Plan
from ds_ring.schedule.steps import (
    Accumulate,
    Buffer,
    ExchangeBatch,
    HeadChunk,
    Payload,
    Recv,
    Schedule,
    Send,
    get_buffer_name,
)
from tests.schedule_proof.coverage import Coverage, heads_of
from tests.schedule_proof.symbolic import Content, SymbolicRank


class _End(NamedTuple):
    """Hold one end of a message: the batch it is posted in, and the step of a head chunk that posts it."""

    rank: int
    batch: int
    chunk_number: int
    chunk: HeadChunk
    step: Send | Recv

    def refuse(self, expected: str, got: str) -> RingScheduleError:
        return RingScheduleError(self.rank, self.batch, str(self.step), expected, got)


def validate_plan(plan: Plan, *, head_bytes: int = 0, chunk_bytes: int = 1) -> None:
    """Prove the forward and the backward pass of a plan.

    Args:
        plan: of all ranks.
        head_bytes, chunk_bytes: by which heads go round in chunks, see `lower_pass`; by default all heads of
            a class go together.

    Raises:
        RingScheduleError: names the rank, the batch and the step, what was expected and what was found.
    """
    ranks = [plan.rank(rank) for rank in range(plan.ring_size)]
    for backward in (False, True):
        sizes = {"head_bytes": head_bytes, "chunk_bytes": chunk_bytes}
        schedules = [lower_pass(rank.classes, plan.group, backward=backward, **sizes) for rank in ranks]
        validate_schedules(schedules, plan)


def validate_schedules(schedules: Sequence[Schedule], plan: Plan) -> None:
    """Prove the schedules of one pass, one for each ring rank, against the plan's pattern and layout.

    Raises:
        RingScheduleError: see `validate_plan`.
    """
    first = [chunk.kv_heads for chunk in schedules[0].chunks]
    for schedule in schedules:
        if (heads := [chunk.kv_heads for chunk in schedule.chunks]) != first:
            raise RingScheduleError(schedule.ring_rank, None, "", f"head chunks {first}", f"{heads}")
        _check_chunks(schedule, plan)
    _match_messages(schedules)
    coverage = Coverage(plan, schedules)
    coverage.check(_Ring(schedules, coverage).run())


def _check_chunks(schedule: Schedule, plan: Plan) -> None:
    """Refuse heads that are left out or go twice, and memory of the caller that is described wrongly."""

    def refuse(expected: str, got: str) -> NoReturn:
        raise RingScheduleError(schedule.ring_rank, None, "", expected, got)

    due = sorted(head for one in plan.classes for head in heads_of(one.kv_heads))
    if (found := sorted(head for chunk in schedule.chunks for head in heads_of(chunk.kv_heads))) != due:
        refuse(f"head chunks with the K/V heads {due}, each once", f"{found}")
    valid = plan.layout.valid_tokens(schedule.ring_rank)
    own = Buffer(Payload.KEYS, valid), Buffer(Payload.GRADIENTS, valid)  # SHARD and RESULTS
    for index, chunk in enumerate(schedule.chunks):
        if chunk.query_heads != (queries := get_query_heads(chunk.kv_heads, plan.group)):
            refuse(f"query heads {queries} in head chunk {index}", f"{chunk.query_heads}")
        for buffer, (expected, got) in enumerate(zip(own, chunk.steps.buffers, strict=False)):
            if expected != got:
                told = (f"{one.slots} tokens of {one.payload.value}" for one in (expected, got))
                refuse(f"{get_buffer_name(buffer)} of head chunk {index} to have {next(told)}", next(told))


# --- messages ---------------------------------------------------------------------------------------


def _ends(schedule: Schedule, batch: ExchangeBatch) -> Iterator[_End]:
    for index, steps in batch.rounds:
        for step in steps.posted:
            yield _End(schedule.ring_rank, batch.number, index, schedule.chunks[index], step)


def _match_messages(schedules: Sequence[Schedule]) -> None:
    """Compare both ends of every message: ranks match them by order alone."""
    sends: dict[tuple[int, int], list[_End]] = defaultdict(list)
    receives: dict[tuple[int, int], list[_End]] = defaultdict(list)
    for schedule in schedules:
        for end in (end for batch in schedule.batches for end in _ends(schedule, batch)):
            peer = end.step.peer
            if not 0 <= peer < len(schedules) or peer == end.rank:
                raise end.refuse("another rank of the ring", f"ring rank {peer}")
            if isinstance(end.step, Send):
                sends[end.rank, peer].append(end)
            else:
                receives[peer, end.rank].append(end)
    for channel in sorted(sends.keys() | receives.keys()):
        for send, receive in zip_longest(sends[channel], receives[channel]):
            _match(send, receive)


def _match(send: _End | None, receive: _End | None) -> None:
    if receive is None:
        assert send is not None
        raise send.refuse(f"ring rank {send.step.peer} to receive it", "no receive left there")
    if send is None:
        raise receive.refuse(f"ring rank {receive.step.peer} to send it", "no send left there")
    sent, taken = send.step, receive.step
    if sent.payload is not taken.payload:
        dtypes = [f"{step.payload.names} ({step.payload.value})" for step in (taken, sent)]
        raise receive.refuse(f"{dtypes[0]} as its sender's next message", f"{dtypes[1]}: {sent}")
    if send.chunk.kv_heads != receive.chunk.kv_heads:
        raise receive.refuse(f"K/V heads {receive.chunk.kv_heads}", f"{send.chunk.kv_heads}: {sent}")
    if (count := count_slots(sent.slots)) != count_slots(taken.slots):
        raise receive.refuse(f"{count_slots(taken.slots)} tokens", f"{count}: {sent}")


# --- the run ----------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Flying:
    """Hold a message of which one end is posted, or both."""

    send: _End | None = None
    content: Content | None = None
    receive: _End | None = None

    @property
    def is_complete(self) -> bool:
        return self.send is not None and self.receive is not None


class _Ring:
    """Run all ranks: each continues as soon as all messages of its batch have both ends posted."""

    def __init__(self, schedules: Sequence[Schedule], coverage: Coverage) -> None:
        words = -(-len(schedules) // 64)
        self.ranks = [SymbolicRank(schedule, words, coverage.computed) for schedule in schedules]
        self.posted: list[list[_Flying]] = [[] for _ in schedules]  # of each rank's batch
        self.queues: dict[tuple[int, int], deque[_Flying]] = defaultdict(
            deque
        )  # sender, receiver: incomplete

    def run(self) -> list[SymbolicRank]:
        """Return the ranks when all are through."""
        batches = [iter(rank.schedule.batches) for rank in self.ranks]
        ready, through = deque(range(len(self.ranks))), 0
        while ready:
            rank = self.ranks[ready.popleft()]
            self._end_wait(rank)
            batch = next(batches[rank.rank], None)
            if batch is None:
                rank.over()
                through += 1
                continue
            concerned = self._advance(rank, batch)
            ready.extend(peer for peer in sorted(concerned) if self._may_go_on(peer))
        if through < len(self.ranks):
            # ranks that are through have nothing posted and may go on
            self._refuse_circle(next(r for r in range(len(self.ranks)) if not self._may_go_on(r)))
        return self.ranks

    def _may_go_on(self, rank: int) -> bool:
        return all(message.is_complete for message in self.posted[rank])

    def _advance(self, rank: SymbolicRank, batch: ExchangeBatch) -> set[int]:
        """Do a batch up to its wait; return the ranks that waited for one of its messages, and itself."""
        rank.batch = batch.number
        concerned = {rank.rank}
        for index, steps in batch.rounds:
            for step in steps.arrived:
                if isinstance(step, Accumulate):
                    rank.accumulate(index, step)
                else:
                    rank.free(index, step)
            for post in steps.posted:
                end = _End(rank.rank, batch.number, index, rank.schedule.chunks[index], post)
                if self._post(rank, end):
                    concerned.add(post.peer)
        # after the posts of all chunks: [Note: batches]
        for index, steps in batch.rounds:
            for compute in steps.computed:
                rank.compute(index, compute)
        return concerned

    def _post(self, rank: SymbolicRank, end: _End) -> bool:
        """Post one end of a message; return whether the other one was there."""
        step = end.step
        queue = self.queues[(end.rank, step.peer) if isinstance(step, Send) else (step.peer, end.rank)]
        # a queue holds sends without a receive, or receives without a send, never both
        if queue and (queue[0].send is None) == isinstance(step, Send):
            message = queue.popleft()
        else:
            queue.append(message := _Flying())
        if isinstance(step, Send):
            message.send, message.content = end, rank.send(end.chunk_number, step)
        else:
            message.receive = end
            rank.receive(end.chunk_number, step)
        self.posted[end.rank].append(message)
        return message.is_complete

    def _end_wait(self, rank: SymbolicRank) -> None:
        """Fill what was received in a batch that is over."""
        for message in self.posted[rank.rank]:
            end = message.receive
            if end is not None and end.rank == rank.rank:
                assert isinstance(end.step, Recv) and message.content is not None
                rank.arrived(end.chunk_number, end.step, message.content)
        self.posted[rank.rank] = []

    def _refuse_circle(self, rank: int) -> NoReturn:
        """Raise for ranks that wait for one another."""
        path: list[int] = []
        # from each rank to the other end of its first open message
        while rank not in path:
            path.append(rank)
            message = next(message for message in self.posted[rank] if not message.is_complete)
            end = message.send or message.receive
            assert end is not None
            rank = end.step.peer
        circle = [*path[path.index(rank) :], rank]
        told = " -> ".join(f"{one} (batch {self.ranks[one].batch})" for one in circle)
        batch = self.ranks[rank].batch
        raise RingScheduleError(rank, batch, "", "ranks that can go on", f"a wait in a circle: {told}")
