"""The schedule of one rank as data: its sends, receives, computations, sums and frees, batch by batch.

`lowering.py` makes it from a plan; everything that runs, measures, prints or checks a pass reads it. Passes
without hops (`PassRow.no_hops`) and passes of replicated queries have no schedule.

[Note: batches]
A pass is a sequence of batches. In each batch a rank does four things in this order. (1) It accumulates the
messages of the previous batch, and frees buffers. (2) It posts all its sends and receives together. (3) It
computes while these messages are in flight. (4) It waits until these messages have completed. (On a GPU the
first batch computes before it posts: [Note: the header while the first hop computes] in `ring_pass.py`.) So a
tensor that is received in batch b may be read from batch b + 1 on. A tensor that is sent in batch b may be
written or freed from batch b + 1 on. Head chunks go around the ring one after the other. Each chunk has its
own buffers. The next chunk starts before the previous chunk has ended.
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
    """The content of a message or of a buffer: K and V, or dK and dV.

    PARTS travel in two messages, dK and dV. KEYS of a single K/V head may travel in two messages, K and V
    (`check_keys_apart` in `ring/pool.py`). In all other cases one message has both tensors, and the two rows
    of a token are adjacent in memory.
    """

    KEYS = "keys"  # K and V in the dtype of the inputs
    GRADIENTS = "gradients"  # dK and dV in the accumulators' dtype
    PARTS = "gradients of one rank"  # dK and dV of a stage; [Note: stages] in rank_plan.py
    ROUNDED = "rounded gradients"  # dK and dV in bfloat16

    @property
    def names(self) -> str:
        """Return the names of both tensors."""
        return "K/V" if self is Payload.KEYS else "dK/dV"


SHARD = 0  # number of the buffer with K and V of the rank's own shard: the caller's memory, never freed
# Number of the buffer for results. Forward: out and lse of the chunk's heads. Backward: dQ of these heads,
# and dK and dV of the own shard.
RESULTS = 1


def get_buffer_name(buffer: int) -> str:
    """Return the name of a buffer, as tables and messages print it."""
    return {SHARD: "shard", RESULTS: "results"}.get(buffer, f"b{buffer}")


class Buffer(NamedTuple):
    """Memory for K and V, or for dK and dV: one tensor [slots, B, K/V heads, D + E], or two tensors."""

    payload: Payload
    slots: int  # number of slots; padding is not counted in SHARD and RESULTS


@dataclass(frozen=True, slots=True, eq=False)
class Send:
    """Send a part of a buffer to one rank."""

    payload: Payload  # of the message
    buffer: int  # number of the buffer
    part: SlotRanges  # the slots of the buffer that are sent
    peer: int  # ring rank that receives the message
    origin: int  # ring rank that owns the tokens of the message
    slots: SlotRanges  # the slots of these tokens in the shard of `origin`
    packed: int  # number of another buffer, for a packed copy of the part
    needs: int  # this step needs the messages up to this batch (0 is the chunk's first); -1 for none
    buffer_payload: Payload  # of the buffer; if it differs from `payload`, packing converts the dtype
    ranges: tuple[tuple[int, int], ...] = field(init=False)  # `part` as Python ints
    count: int = field(init=False)  # number of slots
    # Whether the message is sent without a packed copy: the part is one range of a buffer other than SHARD
    # and RESULTS, and is not converted. (`RingBuffers` may also send one range of SHARD without a copy.)
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
    buffer: int  # number of the buffer; the first step that receives into a buffer allocates it
    peer: int  # ring rank that sends the message
    origin: int  # ring rank that owns the tokens of the message
    slots: SlotRanges  # the slots of these tokens in the shard of `origin`
    first: int = 0  # the buffer's slot for the first token; the other tokens are in the next slots
    count: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", count_slots(self.slots))

    def __str__(self) -> str:
        return f"receive {_format_tokens(self)} from {self.peer} in b{self.buffer}"


@dataclass(frozen=True, slots=True, eq=False)
class Compute:
    """Compute attention over the keys of a buffer, or its gradients; out, lse and dQ go to RESULTS."""

    hop: int  # number of the hop, or of the stage; 0 for the own shard
    buffer: int  # number of the buffer with K and V
    tiles: Tiles  # the key slots of the tiles are slots of `buffer`
    gradients: int | None  # number of the buffer for dK and dV of these keys; None in a forward pass
    origins: tuple[int, ...]  # ring ranks that own the keys; several only in a stage
    needs: int  # as in `Send`

    def __str__(self) -> str:
        into = "" if self.gradients is None else f", dK/dV in {get_buffer_name(self.gradients)}"
        owners = " ".join(map(str, self.origins))
        return f"hop {self.hop}: K/V of {owners} in {get_buffer_name(self.buffer)}{into}"


@dataclass(frozen=True, slots=True, eq=False)
class Accumulate:
    """Add received gradients to a buffer; or copy K and V, received or of SHARD, into a buffer."""

    buffer: int  # number of the target buffer; the first step that copies keys into it allocates it
    source: int  # number of the buffer with the received tensors; or SHARD
    part: SlotRanges  # the slots of the target, as many as the source has
    needs: int  # as in `Send`
    ranges: tuple[tuple[int, int], ...] = field(init=False)  # `part` as Python ints

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranges", _convert_to_ints(self.part))

    def __str__(self) -> str:
        return f"{get_buffer_name(self.source)} into {get_buffer_name(self.buffer)}"


@dataclass(frozen=True, slots=True, eq=False)
class Free:
    """Free a buffer. `Free(RESULTS)` writes the results to the caller's tensors: the chunk has ended."""

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
    """The steps of one head chunk in one batch, in the order of the fields; [Note: batches]."""

    arrived: tuple[Accumulate | Free, ...] = ()  # accumulate received tensors, free buffers
    posted: tuple[Send | Recv, ...] = ()  # sender and receiver match their messages by order alone
    computed: tuple[Compute, ...] = ()  # while the messages are in flight

    @property
    def steps(self) -> tuple[ScheduleStep, ...]:
        """Return all steps in order."""
        return (*self.arrived, *self.posted, *self.computed)


class ChunkSteps(NamedTuple):
    """The steps of a head chunk; all chunks of a head class have the same steps."""

    buffers: tuple[Buffer, ...]  # indexed by the buffer numbers of the steps
    rounds: tuple[Round, ...]  # one for each batch of the chunk; the last round posts and computes nothing


class HeadChunk(NamedTuple):
    """Heads that go around the ring together."""

    kv_heads: slice  # numbers of the K/V heads, among the K/V heads on this rank
    query_heads: slice  # the query heads that share these K/V heads
    steps: ChunkSteps
    next_after: int  # number of batches from the start of this chunk to the start of the next chunk


class ExchangeBatch(NamedTuple):
    """One batch of a pass; [Note: batches]."""

    number: int
    # The chunk that started last receives keys of this hop (or stage) in this batch, and computes hop - 1.
    # After the last hop no keys arrive: [Note: a part for the end] in `lowering.py`.
    hop: int
    rounds: list[tuple[int, Round]]  # for every chunk that is under way: its index and its steps


@dataclass(frozen=True, eq=False)  # compared by identity: passes use it as a key of their caches
class Schedule:
    """The steps of one rank in a forward or in a backward pass."""

    ring_rank: int
    backward: bool
    chunks: tuple[HeadChunk, ...]  # in the order in which they start

    @property
    def starts(self) -> list[int]:
        """Return the number of the batch in which each chunk starts."""
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
            # A chunk receives keys of hop b + 1 (if there is one) b batches after the chunk's first batch.
            youngest = max(at for at in starts if at <= number)
            batches.append(ExchangeBatch(number, number - youngest + 1, rounds))
        return tuple(batches)
