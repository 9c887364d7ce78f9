"""The schedule of one rank as data: what it sends, receives, computes, adds up and frees, batch by batch.

Owns the five kinds of step and their order in time; `lowering.py` makes them from a plan, and everything that
runs, measures, prints or checks a pass reads them. Holds no tensor, device or process group.

[Note: batches]
A pass is a row of batches. In each batch a rank (1) adds up and frees what the messages of the batch before
brought, (2) posts all sends and receives of this batch at once, (3) computes while they travel, (4) waits
until all of them have arrived. So whatever is received in batch b may be read from batch b + 1 on, and
whatever is sent in batch b may be written or freed from batch b + 1 on. Heads are independent: they go round
the ring in head chunks, each with its own buffers, and a chunk sets out before the one before it is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from ds_ring.masks.slot_ranges import SlotRanges, count_slots
from ds_ring.masks.tiles import Tiles


class Payload(Enum):
    """Name the two tensors that travel together; the first one is sent first."""

    KEYS = "keys"  # in the dtype of the inputs
    GRADIENTS = "gradients"  # in the accumulators' dtype
    ROUNDED = "rounded gradients"  # in bfloat16, while they travel

    @property
    def names(self) -> tuple[str, str]:
        """Return the names of both tensors."""
        return ("K", "V") if self is Payload.KEYS else ("dK", "dV")


SHARD = 0  # buffer: K and V of the rank's own shard; the caller's memory, never freed
RESULTS = (
    1  # buffer: what the chunk finds for its own tokens: out and lse, or dQ and the own shard's dK and dV
)


def name_of(buffer: int) -> str:
    """Return a buffer's name in texts."""
    return {SHARD: "shard", RESULTS: "results"}.get(buffer, f"b{buffer}")


class Buffer(NamedTuple):
    """Describe memory for a pair of tensors, [batch, heads of the chunk, slots, head_dim] each.

    Attributes:
        payload: what they are, and with it their dtype.
        slots: tokens; of SHARD and RESULTS those that are no padding.
    """

    payload: Payload
    slots: int


@dataclass(frozen=True, slots=True, eq=False)
class Send:
    """Send a part of a buffer: two messages to one rank.

    Attributes:
        payload: which two tensors; ROUNDED of a buffer of GRADIENTS rounds what is packed.
        buffer: where it lies; must not be written or freed before the batch is over.
        part: slots of the buffer.
        peer: ring rank that receives.
        origin: ring rank in whose shard the tokens lie.
        slots: their slots in that shard, as many as `part` has.
        packed: buffer for a copy of the part, used where its slots do not lie side by side in memory, or
            where it is rounded.
        needs: batch of the chunk whose messages must have arrived; -1 for none.
        ranges, count: `part` as numbers, and how many slots it has.
    """

    payload: Payload
    buffer: int
    part: SlotRanges
    peer: int
    origin: int
    slots: SlotRanges
    packed: int
    needs: int
    ranges: tuple[tuple[int, int], ...] = field(init=False)
    count: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranges", _numbers(self.part))
        object.__setattr__(self, "count", count_slots(self.slots))

    def __str__(self) -> str:
        return f"send {_tokens(self)} to {self.peer}"


# Its fields stand in `Send` as well: each kind of step is read by itself, and inherits from none.
@dataclass(frozen=True, slots=True, eq=False)
class Recv:
    """Receive into a fresh buffer: two messages from one rank.

    Attributes:
        payload: which two tensors.
        buffer: is taken here, and filled when the batch is over.
        peer: ring rank that sends.
        origin, slots, count: which tokens; see `Send`.
    """

    payload: Payload
    buffer: int
    peer: int
    origin: int
    slots: SlotRanges
    count: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", count_slots(self.slots))

    def __str__(self) -> str:
        return f"receive {_tokens(self)} from {self.peer} in b{self.buffer}"


@dataclass(frozen=True, slots=True, eq=False)
class Compute:
    """Attend to the keys of a buffer, and add to RESULTS what is found.

    Attributes:
        hop: how many ranks the keys have come; 0 for the own shard.
        buffer: the keys and values.
        tiles: what is computed; key slots are those of the buffer.
        gradients: buffer that takes dK and dV of these keys, assigned here (RESULTS at hop 0);
            None in a forward pass.
        origin: ring rank whose keys these are.
        needs: batch of the chunk that brought the keys; -1 for none.
    """

    hop: int
    buffer: int
    tiles: Tiles
    gradients: int | None
    origin: int
    needs: int

    def __str__(self) -> str:
        into = "" if self.gradients is None else f", dK/dV in {name_of(self.gradients)}"
        return f"hop {self.hop}: K/V of {self.origin} in {name_of(self.buffer)}{into}"


@dataclass(frozen=True, slots=True, eq=False)
class Accumulate:
    """Put what arrived where it belongs: gradients are added, keys are written.

    Attributes:
        buffer: the target; for keys a fresh buffer is taken by the first of its parts.
        source: what arrived.
        part: slots of the target, as many as the source has.
        needs: batch of the chunk that brought the source.
        ranges: `part` as numbers.
    """

    buffer: int
    source: int
    part: SlotRanges
    needs: int
    ranges: tuple[tuple[int, int], ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranges", _numbers(self.part))

    def __str__(self) -> str:
        return f"{name_of(self.source)} into {name_of(self.buffer)}"


@dataclass(frozen=True, slots=True, eq=False)
class Free:
    """Give a buffer back. Freeing RESULTS rounds them into the tensors of the caller: the chunk is done."""

    buffer: int

    def __str__(self) -> str:
        return f"free {name_of(self.buffer)}"


def _numbers(ranges: SlotRanges) -> tuple[tuple[int, int], ...]:
    """Return ranges as numbers of Python, which every hop reads: numpy's cost a microsecond each."""
    return tuple((start, end) for start, end in ranges.tolist())


def _tokens(step: Send | Recv) -> str:
    """Return payload, number of tokens and owner of what a message carries."""
    return f"{'/'.join(step.payload.names)} of {step.origin} ({step.count})"


Step: TypeAlias = Send | Recv | Compute | Accumulate | Free


class Round(NamedTuple):
    """Hold what one head chunk does in one batch, in this order; [Note: batches].

    Attributes:
        arrived: what is done with the messages of the chunk's batch before.
        posted: the messages of this batch. Two ranks match the messages between them by order alone.
        computed: what is computed while they travel.
    """

    arrived: tuple[Accumulate | Free, ...] = ()
    posted: tuple[Send | Recv, ...] = ()
    computed: tuple[Compute, ...] = ()

    @property
    def steps(self) -> tuple[Step, ...]:
        """Return all of them."""
        return (*self.arrived, *self.posted, *self.computed)


class ChunkSteps(NamedTuple):
    """Hold the steps of any chunk of heads that are read alike.

    Attributes:
        buffers: by their number in the steps.
        rounds: by the chunk's batch; the last one posts and computes nothing.
    """

    buffers: tuple[Buffer, ...]
    rounds: tuple[Round, ...]


class HeadChunk(NamedTuple):
    """Describe heads that go round the ring together.

    Attributes:
        kv_heads: K/V heads, a slice of all that the rank has.
        query_heads: the query heads that share them.
        steps: what is done.
        next_after: batches from this chunk's first to the next chunk's first one.
    """

    kv_heads: slice
    query_heads: slice
    steps: ChunkSteps
    next_after: int


class Batch(NamedTuple):
    """Hold one batch of a pass; [Note: batches].

    Attributes:
        number: from 0.
        hop: that the messages of the chunk that set out last are for.
        rounds: index of the chunk and what it does, for every chunk that is under way.
    """

    number: int
    hop: int
    rounds: list[tuple[int, Round]]


@dataclass(frozen=True, eq=False)  # passes keep by it what they find out
class Schedule:
    """Hold all that one rank does in a forward or in a backward pass.

    Attributes:
        ring_rank: whose schedule this is.
        backward: of the backward pass.
        chunks: in the order in which they set out.
    """

    ring_rank: int
    backward: bool
    chunks: tuple[HeadChunk, ...]

    @property
    def starts(self) -> list[int]:
        """Return the batch in which each chunk sets out."""
        return [0, *accumulate(chunk.next_after for chunk in self.chunks[:-1])]

    @cached_property
    def batches(self) -> tuple[Batch, ...]:
        """Return the batches of the pass, in order; made once."""
        return tuple(self._batches())

    def _batches(self) -> Iterator[Batch]:
        starts = self.starts
        ends = [at + len(chunk.steps.rounds) for at, chunk in zip(starts, self.chunks, strict=True)]
        begun, under_way = 0, []
        for number in range(max(ends)):
            while begun < len(starts) and starts[begun] == number:
                under_way.append(begun)
                begun += 1
            under_way = [index for index in under_way if ends[index] > number]
            rounds = [(index, self.chunks[index].steps.rounds[number - starts[index]]) for index in under_way]
            # batch b of a chunk brings the keys of its hop b + 1
            yield Batch(number, number - starts[begun - 1] + 1, rounds)
