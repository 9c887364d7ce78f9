"""One rank's schedule run on symbols: which tokens each buffer holds, and whose gradients were added.

Owns the rules that a buffer's life follows. The validator lets the ranks advance and carries the messages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np

from ds_ring.errors import RingScheduleError
from ds_ring.masks.slots import IntArray, SlotRanges, count_slots, expand_ranges
from ds_ring.schedule.steps import (
    RESULTS,
    SHARD,
    Accumulate,
    Compute,
    Free,
    HeadChunk,
    Payload,
    Recv,
    Schedule,
    ScheduleStep,
    Send,
    get_buffer_name,
)

NOTHING = -1  # in a slot that was not filled yet
COMING = -2  # in a slot that a message on its way will fill
ORIGIN_BITS = 40  # a token's number: its owner, then so many bits for its slot


def tokens_of(origin: int, slots: SlotRanges) -> IntArray:
    """Return the numbers of some slots of a shard; int64 [n]."""
    return (origin << ORIGIN_BITS) + _each(slots)


def _each(slots: SlotRanges) -> IntArray:
    """Return every slot, ascending; quickly where they are one range, as in most messages."""
    return np.arange(slots[0, 0], slots[0, 1]) if len(slots) == 1 else expand_ranges(slots)


@dataclass
class Content:
    """Hold the contents of a buffer."""

    tokens: IntArray  # number of the token in each slot, NOTHING where it was not filled; int64 [n]
    # of gradients, one bit for each rank whose part is in the sum; uint64 [n, words]
    added: np.ndarray | None = None
    came: int = -1  # the chunk's last batch that the content depends on
    arriving: int | None = None  # number of the batch that fills it; None once it is filled
    leaving: int | None = None  # number of the last batch that sends it; None if none did


@dataclass
class SymbolicRank:
    """Track buffers of one rank's head chunks."""

    schedule: Schedule  # of the rank
    words: int  # 64-bit words that have a bit for each rank
    # called with this, the index of the chunk, the step and its keys' numbers; may refuse
    computed: Callable[[SymbolicRank, int, Compute, IntArray], None]
    batch: int = 0  # number of the present one
    starts: list[int] = field(default_factory=list)  # batch in which each chunk sets out
    # by chunk and buffer; freed ones are gone
    contents: dict[tuple[int, int], Content] = field(default_factory=dict)
    # by chunk: the own tokens' gradients when they were handed over
    homes: dict[int, Content] = field(default_factory=dict)
    freed: set[tuple[int, int]] = field(default_factory=set)
    step: ScheduleStep | None = None  # the one under way, for messages

    def __post_init__(self) -> None:
        self.starts = self.schedule.starts
        for index, chunk in enumerate(self.schedule.chunks):
            own = np.array([[0, chunk.steps.buffers[SHARD].slots]])
            tokens = tokens_of(self.rank, own)
            self.contents[index, SHARD] = Content(tokens)
            self.contents[index, RESULTS] = Content(tokens.copy(), self._nobody(len(tokens)))

    @property
    def rank(self) -> int:
        """Return whose schedule this is."""
        return self.schedule.ring_rank

    def refuse(self, expected: str, got: str) -> NoReturn:
        """Raise for the step under way."""
        raise RingScheduleError(self.rank, self.batch, str(self.step or ""), expected, got)

    def send(self, index: int, step: Send) -> Content:
        """Return a copy of the sent tokens; their buffer is in use until the batch is over."""
        self.step = step
        source = self._read(index, step.buffer, step.needs)
        part = self._part(source, step.part)
        if not np.array_equal(part.tokens, tokens_of(step.origin, step.slots)):
            self.refuse("the tokens it names", f"others in {get_buffer_name(step.buffer)}")
        kinds = [self._chunk(index).steps.buffers[one].payload for one in (step.buffer, step.packed)]
        # sums are rounded in the copy alone; the part of one rank may be rounded from the start
        rounds = step.payload is Payload.ROUNDED and kinds[0] is Payload.GRADIENTS
        same = step.payload is kinds[0] or rounds
        if step.payload is not kinds[1] or not same:
            self.refuse(
                f"{step.payload.value}", f"a buffer of the other kind, {get_buffer_name(step.buffer)}"
            )
        # reads are allowed until the batch is over, changes are not: see `_live`
        source.leaving = self.batch
        packed = self._fresh(index, step.packed, step.payload, len(part.tokens))
        packed.tokens, packed.leaving = part.tokens, self.batch
        return part

    def receive(self, index: int, step: Recv) -> Content:
        """Return the buffer that will be filled."""
        self.step = step
        known = self.contents.get((index, step.buffer))
        if known is None or known.arriving != self.batch:
            target = self._fresh(index, step.buffer, step.payload)
        else:  # another message of this batch arrives there as well
            target = known
            self._of_kind(index, step.buffer, step.payload)
        first, end = step.first, step.first + count_slots(step.slots)
        if end > (slots := len(target.tokens)):
            self.refuse(f"{get_buffer_name(step.buffer)} to be a buffer of {end} tokens", f"one of {slots}")
        if (target.tokens[first:end] != NOTHING).any():
            self.refuse(f"empty slots of {get_buffer_name(step.buffer)}", "slots of another message")
        target.tokens[first:end] = COMING
        target.arriving = self.batch
        return target

    def arrived(self, index: int, step: Recv, sent: Content) -> None:
        """Fill the buffer of a receive when its batch is over."""
        self.step = step
        if not np.array_equal(sent.tokens, tokens_of(step.origin, step.slots)):
            owner = int(sent.tokens[0] >> ORIGIN_BITS)
            self.refuse("the tokens it names", f"as many others of ring rank {owner}: messages are swapped")
        target = self.contents[index, step.buffer]
        where = slice(step.first, step.first + len(sent.tokens))
        target.tokens[where] = sent.tokens
        if sent.added is not None:
            if target.added is None:
                target.added = self._nobody(len(target.tokens))
            target.added[where] = sent.added
        target.came, target.arriving = self.batch - self.starts[index], None

    def compute(self, index: int, step: Compute) -> None:
        """Mark the rank's own part as added to the gradients of the keys."""
        self.step = step
        keys = self._read(index, step.buffer, step.needs)
        self._of_kind(index, step.buffer, Payload.KEYS)
        if not np.isin(keys.tokens >> ORIGIN_BITS, step.origins).all():
            owners = " ".join(map(str, step.origins))
            self.refuse(f"keys of ring rank {owners}", f"other keys in {get_buffer_name(step.buffer)}")
        self._live(index, RESULTS)
        self.computed(self, index, step, keys.tokens)
        if step.gradients is None:
            return
        if step.gradients == RESULTS:
            target = self._live(index, RESULTS)
        else:
            # a sum begins here; sums of other ranks are added by Accumulate
            kind = self._chunk(index).steps.buffers[step.gradients].payload
            if kind is Payload.KEYS:
                self.refuse(
                    f"{get_buffer_name(step.gradients)} to be of gradients", f"a buffer of {kind.value}"
                )
            target = self._fresh(index, step.gradients, kind, len(keys.tokens))
            target.tokens, target.came = keys.tokens, keys.came
            target.added = self._nobody(len(keys.tokens))
        if not np.array_equal(target.tokens, keys.tokens):
            self.refuse(
                "gradients of the keys it reads", f"those of others in {get_buffer_name(step.gradients)}"
            )
        mine = self._nobody(1)
        mine[0, self.rank // 64] = np.uint64(1) << np.uint64(self.rank % 64)
        if step.gradients == RESULTS:
            # In parts: see [Note: a part for the end]. The coverage refuses pairs that are computed twice.
            assert target.added is not None
            target.added |= mine
        else:
            self._add(target, slice(None), np.broadcast_to(mine, (len(keys.tokens), self.words)))

    def accumulate(self, index: int, step: Accumulate) -> None:
        """Put what arrived where it belongs."""
        self.step = step
        source = self._read(index, step.source, step.needs)
        given = self._chunk(index).steps.buffers[step.source].payload
        # rounded is what travels alone: sums are never rounded
        payload = Payload.KEYS if given is Payload.KEYS else Payload.GRADIENTS
        # keys of several parts: the first part takes the buffer
        known = (index, step.buffer) in self.contents
        target = self._live(index, step.buffer) if known else self._fresh(index, step.buffer, payload)
        self._of_kind(index, step.buffer, payload)
        where = _each(step.part)
        if len(where) != len(source.tokens) or (len(where) and where[-1] >= len(target.tokens)):
            self.refuse(
                f"{len(source.tokens)} slots of {get_buffer_name(step.buffer)}", f"{len(where)} or others"
            )
        target.came = max(target.came, source.came)
        if payload is Payload.KEYS:
            if (target.tokens[where] != NOTHING).any():
                self.refuse(f"empty slots of {get_buffer_name(step.buffer)}", "filled ones: written twice")
            target.tokens[where] = source.tokens
            return
        if source.added is None or not np.array_equal(target.tokens[where], source.tokens):
            self.refuse(f"gradients of the tokens of {get_buffer_name(step.buffer)}", "those of other tokens")
        self._add(target, where, source.added)

    def free(self, index: int, step: Free) -> None:
        """Forget a buffer; of RESULTS keep what was found."""
        self.step = step
        content = self._live(index, step.buffer)
        if step.buffer == SHARD:
            self.refuse("a buffer of the pass", "the caller's own shard")
        if step.buffer == RESULTS:
            self.homes[index] = content
        del self.contents[index, step.buffer]
        self.freed.add((index, step.buffer))

    def over(self) -> None:
        """Refuse buffers that were not freed."""
        self.step = None
        for index, buffer in self.contents:
            if buffer != SHARD:
                self.refuse(
                    f"{get_buffer_name(buffer)} of head chunk {index} to be freed", "the end of the schedule"
                )

    def _add(self, target: Content, where: IntArray | slice, added: np.ndarray) -> None:
        assert target.added is not None
        if (twice := target.added[where] & added).any():
            word, bits = next((w, int(x)) for row in twice for w, x in enumerate(row) if x)
            # the lowest bit that is set in both
            rank = 64 * word + (bits & -bits).bit_length() - 1
            self.refuse("each rank's gradients once", f"those of ring rank {rank} twice")
        target.added[where] |= added

    def _chunk(self, index: int) -> HeadChunk:
        return self.schedule.chunks[index]

    def _nobody(self, count: int) -> np.ndarray:
        return np.zeros((count, self.words), dtype=np.uint64)

    def _of_kind(self, index: int, buffer: int, payload: Payload) -> None:
        """Refuse a buffer of other tensors or of another dtype."""
        if (found := self._chunk(index).steps.buffers[buffer].payload) is not payload:
            self.refuse(f"{get_buffer_name(buffer)} to be of {payload.value}", f"a buffer of {found.value}")

    def _fresh(self, index: int, buffer: int, payload: Payload, tokens: int | None = None) -> Content:
        """Return a buffer that is taken now, for so many tokens (None: of several parts)."""
        if (index, buffer) in self.contents:
            self.refuse("a buffer that is free", f"{get_buffer_name(buffer)}, which is in use: overwritten")
        self._of_kind(index, buffer, payload)
        slots = self._chunk(index).steps.buffers[buffer].slots
        if tokens not in (None, slots):
            self.refuse(f"{get_buffer_name(buffer)} to be a buffer of {tokens} tokens", f"one of {slots}")
        content = self.contents[index, buffer] = Content(np.full(slots, NOTHING))
        self.freed.discard((index, buffer))
        return content

    def _live(self, index: int, buffer: int) -> Content:
        """Return a buffer that may be written to or freed now."""
        content = self._present(index, buffer)
        if content.arriving is not None:
            self.refuse(f"{get_buffer_name(buffer)} to have arrived", "a message that is still on its way")
        if content.leaving == self.batch:
            self.refuse(f"{get_buffer_name(buffer)} to be left alone", "a change while it is being sent")
        return content

    def _read(self, index: int, buffer: int, needs: int) -> Content:
        """Return a buffer that is filled."""
        content = self._present(index, buffer)
        if content.arriving is not None or (content.tokens == NOTHING).any():
            self.refuse(f"{get_buffer_name(buffer)} to be filled", "a read before that")
        if content.came != needs:
            self.refuse(f"to need batch {content.came} of its chunk", f"batch {needs}")
        return content

    def _present(self, index: int, buffer: int) -> Content:
        content = self.contents.get((index, buffer))
        if content is None:
            state = "was freed before" if (index, buffer) in self.freed else "was never filled"
            self.refuse("a buffer that is in use", f"{get_buffer_name(buffer)}, which {state}")
        return content

    def _part(self, content: Content, part: SlotRanges) -> Content:
        where = _each(part)
        if len(where) and where[-1] >= len(content.tokens):
            self.refuse(f"at most {len(content.tokens)} slots", f"slot {int(where[-1])}")
        added = None if content.added is None else content.added[where]
        return Content(content.tokens[where], added, content.came)
