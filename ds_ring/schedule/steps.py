"""The schedule of one rank as data: its sends, receives, computations, sums and frees, batch by batch.

`lowering.py` makes it from a plan; everything that runs, measures, prints or checks a pass reads it. Passes
without hops (`PassRow.no_hops`) and passes of replicated queries have no schedule.

[Note: batches]
A pass is a sequence of batches. In each batch a rank (1) accumulates what the messages of the previous batch
brought and frees the buffers that are no longer used, (2) posts all its sends and receives together, (3)
computes while they are in flight, (4) waits until all of them have completed. So from batch b + 1 on, a
tensor received in batch b may be read, and a tensor sent in batch b may be written or freed. Heads are
independent. They go around the ring in head chunks, each with its own buffers. The next chunk starts before
this one has ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from ds_ring.masks.slots import SlotRanges, count_slots
from ds_ring.masks.tiles import Tiles


class Payload(Enum):
    """The content of a message: K and V, or dK and dV.

    In memory, a token's K row and V row (or dK and dV) are adjacent, with two exceptions: PARTS, and KEYS if
    K and V are separate messages. They are separate if the chunk has one K/V head and `check_keys_apart`
    (`ring/pool.py`) agrees.
    """

    KEYS = "keys"  # in the dtype of the inputs
    GRADIENTS = "gradients"  # in the accumulators' dtype
    PARTS = "gradients of one rank"  # of a stage, not summed over ranks; [Note: stages] in rank_plan.py
    ROUNDED = "rounded gradients"  # in bfloat16 while in flight

    @property
    def names(self) -> str:
        """Return the names of both tensors, in the order in memory."""
        return "K/V" if self is Payload.KEYS else "dK/dV"


SHARD = 0  # buffer: K and V of the rank's own shard; the caller's memory, never freed
# buffer: out and lse of the chunk's heads; in a backward pass dQ, and dK and dV of the own shard. In both
# passes `Free(RESULTS)` finishes the chunk: it writes them to the caller's tensors.
RESULTS = 1


def get_buffer_name(buffer: int) -> str:
    """Return the name of a buffer, as tables and messages print it."""
    return {SHARD: "shard", RESULTS: "results"}.get(buffer, f"b{buffer}")


class Buffer(NamedTuple):
    """Memory for K and V, or dK and dV: [slots, batch, K/V heads, D + E], or each by itself."""

    payload: Payload  # which two tensors, and so their dtype
    slots: int  # number of slots; padding is not counted in SHARD and RESULTS


@dataclass(frozen=True, slots=True, eq=False)
class Send:
    """Send a part of a buffer to one rank."""

    payload: Payload  # of the message; packing converts from `buffer_payload`
    buffer: int  # must not be written or freed before the batch has ended
    part: SlotRanges  # the slots of the buffer that are sent
    peer: int  # ring rank that receives
    origin: int  # ring rank that owns the tokens
    slots: SlotRanges  # the same tokens as slots of the shard of `origin`
    packed: int  # buffer for a copy of the part; used unless `in_place`
    needs: int  # the last batch whose messages this step needs; batch 0 is the chunk's first; -1 for none
    buffer_payload: Payload  # payload of the buffer
    ranges: tuple[tuple[int, int], ...] = field(init=False)  # `part` as Python ints
    count: int = field(init=False)  # number of slots
    # whether the message is sent from the buffer itself: one range, not of SHARD or RESULTS, not converted.
    # (`RingBuffers` also sends one range of SHARD in place if K and V travel apart: see `Payload`.)
    in_place: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranges", _convert_to_ints(self.part))
        object.__setattr__(self, "count", count_slots(self.slots))
        is_one = self.buffer > RESULTS and len(self.ranges) == 1
        object.__setattr__(self, "in_place", is_one and self.buffer_payload is self.payload)

    def __str__(self) -> str:
        return f"send {_format_tokens(self)} to {self.peer}"


@dataclass(frozen=True, slots=True, eq=False)
class Recv:
    """Receive into a buffer from one rank."""

    payload: Payload
    buffer: int  # allocated by the first step that receives into it, and filled when the batch has ended
    peer: int  # ring rank that sends
    origin: int  # origin and slots as in `Send`
    slots: SlotRanges
    first: int = 0  # the buffer's slot for the first token; the other tokens follow it
    count: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", count_slots(self.slots))

    def __str__(self) -> str:
        return f"receive {_format_tokens(self)} from {self.peer} in b{self.buffer}"


@dataclass(frozen=True, slots=True, eq=False)
class Compute:
    """Attend to the keys of a buffer and merge the result into RESULTS."""

    hop: int  # number of the hop, or of the stage if there are stages; 0 for the own shard
    buffer: int  # of the keys and values
    tiles: Tiles  # their key slots are slots of the buffer
    gradients: int | None  # buffer for dK and dV of these keys (RESULTS at hop 0); None in a forward pass
    origins: tuple[int, ...]  # ring ranks that own the keys; several in a stage
    needs: int  # batch that brought the keys, as in `Send`; -1 for none

    def __str__(self) -> str:
        into = "" if self.gradients is None else f", dK/dV in {get_buffer_name(self.gradients)}"
        owners = " ".join(map(str, self.origins))
        return f"hop {self.hop}: K/V of {owners} in {get_buffer_name(self.buffer)}{into}"


@dataclass(frozen=True, slots=True, eq=False)
class Accumulate:
    """Add received gradients to a buffer, or copy keys into a buffer: received keys or those of SHARD."""

    buffer: int  # the target; a target for keys is allocated by the first step that fills a part of it
    source: int  # buffer of the received tensors, or SHARD
    part: SlotRanges  # the slots of the target, as many as the source has
    needs: int  # batch that brought the source, as in `Send`
    ranges: tuple[tuple[int, int], ...] = field(init=False)  # `part` as Python ints

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranges", _convert_to_ints(self.part))

    def __str__(self) -> str:
        return f"{get_buffer_name(self.source)} into {get_buffer_name(self.buffer)}"


@dataclass(frozen=True, slots=True, eq=False)
class Free:
    """Free a buffer. To free RESULTS means to write them to the caller's tensors: the chunk is done."""

    buffer: int

    def __str__(self) -> str:
        return f"free {get_buffer_name(self.buffer)}"


def _convert_to_ints(ranges: SlotRanges) -> tuple[tuple[int, int], ...]:
    """Return ranges as Python ints: every hop reads them, and each numpy integer would cost a microsecond."""
    return tuple((start, end) for start, end in ranges.tolist())


def _format_tokens(step: Send | Recv) -> str:
    """Return payload, number of tokens and owner of a message, as text."""
    return f"{step.payload.names} of {step.origin} ({step.count})"


ScheduleStep: TypeAlias = Send | Recv | Compute | Accumulate | Free


class Round(NamedTuple):
    """What one head chunk does in one batch, in this order; [Note: batches]."""

    arrived: tuple[Accumulate | Free, ...] = ()  # add what the last batch brought, free what is used no more
    posted: tuple[Send | Recv, ...] = ()  # two ranks match the messages between them by order alone
    computed: tuple[Compute, ...] = ()  # while the messages are in flight

    @property
    def steps(self) -> tuple[ScheduleStep, ...]:
        """Return all steps in order."""
        return (*self.arrived, *self.posted, *self.computed)


class ChunkSteps(NamedTuple):
    """The steps of any head chunk of one class (K/V heads with equal patterns)."""

    buffers: tuple[Buffer, ...]  # indexed by the buffer numbers of the steps
    rounds: tuple[Round, ...]  # by batch from the chunk's start; the last one posts and computes nothing


class HeadChunk(NamedTuple):
    """Heads that go around the ring together."""

    kv_heads: slice  # of the K/V heads on this rank
    query_heads: slice  # the query heads that share these K/V heads
    steps: ChunkSteps
    next_after: int  # number of batches from the start of this chunk to the start of the next one


class ExchangeBatch(NamedTuple):
    """One batch of a pass; [Note: batches]."""

    number: int
    # the hop (or stage) whose keys the youngest chunk receives in this batch, one more than the hop that it
    # computes. After the last hop this is a mere number: no keys arrive ([Note: a part for the end])
    hop: int
    rounds: list[tuple[int, Round]]  # the index of every active chunk, and its steps


@dataclass(frozen=True, eq=False)  # compared by identity: passes use it as a key of their caches
class Schedule:
    """All that one rank does in a forward or in a backward pass."""

    ring_rank: int
    backward: bool
    chunks: tuple[HeadChunk, ...]  # in the order in which they start

    @property
    def starts(self) -> list[int]:
        """Return the batch in which each chunk starts."""
        return [0, *accumulate(chunk.next_after for chunk in self.chunks[:-1])]

    @cached_property
    def batches(self) -> tuple[ExchangeBatch, ...]:
        """Return the batches of the pass, in order; cached."""
        starts, batches = self.starts, []
        ends = [at + len(chunk.steps.rounds) for at, chunk in zip(starts, self.chunks, strict=True)]
        for number in range(max(ends)):
            rounds = [
                (index, self.chunks[index].steps.rounds[number - at])
                for index, (at, end) in enumerate(zip(starts, ends, strict=True))
                if at <= number < end
            ]
            # In its batch b, a chunk receives the keys of hop b + 1, if there is such a hop.
            youngest = max(at for at in starts if at <= number)
            batches.append(ExchangeBatch(number, number - youngest + 1, rounds))
        return tuple(batches)
