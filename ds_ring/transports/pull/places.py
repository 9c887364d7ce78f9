"""The addresses of a pass's buffers in the memory of a rank, which other ranks copy from. Pure arithmetic.

[Note: places known beforehand]
A rank that pulls a message copies it out of another rank's memory, so it must know the message's address
there. A rank's schedule fixes the order in which its pass allocates and frees buffers, and every rank can
compute the schedules of all ranks. So `place_buffers` computes the addresses, and no message carries them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ds_ring.masks.slots import SlotRanges
from ds_ring.schedule.steps import RESULTS, SHARD, Free, HeadChunk, Payload, Schedule, Send

NEVER = 1 << 60
GRAINS = 32  # of the largest buffer, in whose multiples all of them are placed


class MessageKey(NamedTuple):
    """A key that is unique among the messages of a pass."""

    sender: int  # ring ranks
    receiver: int
    what: str  # its name
    origin: int  # owner of the tokens
    slots: bytes  # of the owner's shard
    first_head: int

    @classmethod
    def for_tokens(
        cls, sender: int, receiver: int, what: str, origin: int, slots: SlotRanges, heads: slice
    ) -> MessageKey:
        """Return the key of a message with these tokens and K/V heads."""
        return cls(sender, receiver, what, origin, slots.tobytes(), heads.start)


class BufferOffsets(NamedTuple):
    """The addresses of the buffers of one rank's pass.

    Attributes:
        offsets: bytes from the start of the memory, by index of the head chunk and number of the buffer.
        messages: the same for each message that the rank sends.
        nbytes: size of the memory.
    """

    offsets: dict[tuple[int, int], int]
    messages: dict[MessageKey, int]
    nbytes: int


def place_buffers(schedule: Schedule, kind_at: Callable[[HeadChunk, Payload, int], Any]) -> BufferOffsets:
    """Return the addresses of a pass's buffers, which its schedule allocates and frees.

    Args:
        schedule: of one rank.
        kind_at: returns an object with `nbytes`, the size of a buffer of a chunk, with a payload and a number
            of slots, and `bytes_before`, the bytes before a slot of each of its messages.

    A buffer is taken by the step that first writes to it and freed by its `Free`, in the batch after the one
    that it was sent in ([Note: batches] in `schedule/steps.py`). SHARD and RESULTS are the caller's.
    """
    spans: dict[tuple[int, int], tuple[int, int]] = {}  # of each buffer: when it is taken and freed
    for time, (index, number, is_freed) in enumerate(_uses(schedule)):
        taken, freed = spans.get((index, number), (time, NEVER))
        if not is_freed or taken < time:  # else a copy that no send needed
            spans[index, number] = taken, time if is_freed else freed
    kinds = {(i, n): kind_at(schedule.chunks[i], *schedule.chunks[i].steps.buffers[n]) for i, n in spans}
    # Large ones first, each at the lowest place that is free for as long as it is needed: greedy by size
    # (Pisarchyk and Lee 2020, arXiv 2001.03288). Sizes that differ by a few tokens count as equal, or their
    # places would overlap by these tokens and none could follow another.
    grain = -(-max((item.nbytes for item in kinds.values()), default=0) // (64 * GRAINS)) * 64
    sizes = {key: -(-kind.nbytes // grain) * grain for key, kind in kinds.items()}
    offsets: dict[tuple[int, int], int] = {}
    placed: list[tuple[int, int, int, int]] = []
    for key in sorted(spans, key=lambda item: (-sizes[item], spans[item])):
        (taken, freed), nbytes, at = spans[key], sizes[key], 0
        for start, end in sorted(item[:2] for item in placed if item[2] < freed and taken < item[3]):
            if start - at >= nbytes:
                break
            at = max(at, end)
        offsets[key] = at
        placed.append((at, at + nbytes, taken, freed))
    messages: dict[MessageKey, int] = {}
    for index, chunk in enumerate(schedule.chunks):
        for step in (step for item in chunk.steps.rounds for step in item.posted if isinstance(step, Send)):
            key = index, step.buffer if step.in_place else step.packed
            before = kinds[key].bytes_before(step.ranges[0][0] if step.in_place else 0)
            for what, skipped in zip(step.payload.messages, before, strict=True):
                where = schedule.ring_rank, step.peer, what, step.origin, step.slots
                message = MessageKey.for_tokens(*where, chunk.kv_heads)
                assert message not in messages, f"two messages of a pass look alike: {step}"
                messages[message] = offsets[key] + skipped
    return BufferOffsets(offsets, messages, max((end for _, end, _, _ in placed), default=0))


def _uses(schedule: Schedule) -> Iterator[tuple[int, int, bool]]:
    """Yield the chunk and number of the buffers that a pass uses, and whether it frees them, in order."""
    for batch in schedule.batches:
        uses: list[tuple[int, int, bool]] = []
        for index, steps in batch.rounds:
            uses += [(index, step.buffer, isinstance(step, Free)) for step in steps.arrived]
            for step in steps.posted:
                if isinstance(step, Send) and not step.in_place:
                    uses.append((index, step.packed, False))
                else:
                    uses.append((index, step.buffer, False))
        for index, steps in batch.rounds:
            uses += [(index, step.gradients, False) for step in steps.computed if step.gradients is not None]
        yield from (use for use in uses if use[1] not in (SHARD, RESULTS))
