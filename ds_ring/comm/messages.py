"""Describe the messages of a hop, check them against the plan, count them, and show them to an observer.

Owns what real and virtual ranks have in common. `exchange.py` sends; `simulation/rank.py` looks up. A ring
pass calls `Observer.on_batch` if its mesh has an observer; `ds_ring.measure.Trace` is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from ds_ring.errors import RingMismatchError
from ds_ring.masks.slots import SlotRanges


class TokenRange(NamedTuple):
    """The tokens of a message, by which virtual ranks find its data; real ranks do not read this.

    They are slots of the shard of ring rank `origin`, in the order of the message, of K/V heads of that rank.
    """

    origin: int
    slots: SlotRanges
    heads: slice


class Label(NamedTuple):
    """The ring rank at the other end of a message, and the plan's data about the message.

    Attributes:
        peer: ring rank that receives or sends it.
        what: "K/V" or "dK/dV" for both tensors; else "K" is followed by "V", "dK" by "dV"; or "".
        slots, dtype, tokens: planned number of slots, the dtype that ranks agreed on, and which tokens; None
            outside a pass.
    """

    peer: int
    what: str = ""
    slots: int | None = None
    dtype: torch.dtype | None = None
    tokens: TokenRange | None = None


class Message(NamedTuple):
    """A contiguous tensor and its label.

    In a pass the tensor is [slots, batch, K/V heads, D + E]; [..., D] or [..., E] if the two travel apart.
    """

    tensor: Tensor
    peer: int
    what: str = ""
    slots: int | None = None
    dtype: torch.dtype | None = None
    tokens: TokenRange | None = None


SECOND_OF = {"K": "V", "dK": "dV"}


def check_messages(messages: Sequence[Message]) -> None:
    """Refuse messages that bare point-to-point would send and the receiver would not notice (or abort on).

    Raises:
        RingMismatchError: size, dtype or order differ from the plan, or a tensor is not contiguous.
    """
    due = None  # the message that must come next, and its peer
    for tensor, peer, what, slots, dtype, _ in messages:
        # NCCL ignores strides: it sends contiguous memory from the first element on.
        if not tensor.is_contiguous():
            _refuse(what, peer, "a contiguous tensor", f"strides {tensor.stride()}")
        # A smaller message silently fills a part of the receiver's buffer; a larger one aborts its process.
        if slots is not None and tensor.shape[0] != slots:
            _refuse(what, peer, f"{slots} tokens", f"{tensor.shape[0]}")
        # A message of another dtype with the same number of bytes silently arrives as other numbers.
        if dtype is not None and tensor.dtype != dtype:
            _refuse(what, peer, f"{dtype}", f"{tensor.dtype}")
        # Two messages of one size in the wrong order are silently swapped.
        if due != ((what, peer) if what in SECOND_OF.values() else None):
            _refuse(what, peer, "K before V and dK before dV to each peer", f"{what or 'tensor'} instead")
        due = (SECOND_OF[what], peer) if what in SECOND_OF else None
    if due is not None:
        _refuse(*due, "it as the last message", "none")


def _refuse(what: str, peer: int, expected: str, got: str) -> NoReturn:
    advice = "nothing of this hop was sent; report this fault of ds_ring, or of code that changes it"
    name = f"message {what or 'tensor'} to or from ring rank {peer}"
    raise RingMismatchError.wrong(name, expected, got, advice)


@dataclass
class Counters:
    """Count what this rank sends through an exchange, payloads only."""

    bytes_sent: int = 0
    messages_sent: int = 0
    batches: int = 0

    def count(self, batch: BatchSizes) -> None:
        """Add a batch."""
        self.batches += batch.is_one
        self.messages_sent += batch.sends
        self.bytes_sent += batch.sent_bytes


class BatchSizes(NamedTuple):
    """The increments of the counters for one batch: 1 unless it is empty, messages sent, bytes sent."""

    is_one: bool
    sends: int
    sent_bytes: int


def compute_batch_sizes(sends: Sequence[Message], receives: Sequence[Message]) -> BatchSizes:
    """Return the increments of the counters for a batch."""
    return BatchSizes(bool(sends or receives), len(sends), sum(message.tensor.nbytes for message in sends))


class MessageSize(NamedTuple):
    """The ring rank at the other end of a message, and its payload in bytes."""

    peer: int
    payload_bytes: int


class PostedBatch(NamedTuple):
    """Describe what a step posts, in that order: messages of two ranks are matched by order alone."""

    sends: tuple[MessageSize, ...] = ()
    receives: tuple[MessageSize, ...] = ()

    @property
    def bytes_sent(self) -> int:
        """Return the payload that leaves."""
        return sum(message.payload_bytes for message in self.sends)


NOTHING_SENT = PostedBatch()


class BatchEvent(NamedTuple):
    """Describe a moment of a ring pass: a stage of a batch begins, and the one before it ends.

    Attributes:
        stage: "begin" (of the pass), "send" (take what arrived, pack and post the next batch), "compute"
            (attend in every head chunk), "wait" (for the batch), or "end" (of the pass).
        phase: "forward" or "backward".
        hop: counts the batches of the head chunk that set out last. "compute" has the hop (or stage) that
            the chunk computes, "send" and "wait" the next one, whose keys travel. After the last hop this is
            the number of the batch only: [Note: a part for the end] in `schedule/lowering.py`.
        buffers_bytes: memory of messages now: in flight, held, or kept for the next ones.
        accumulators_bytes: float32 accumulators of low-precision results now.
        posted: the messages of the batch, from "compute" on.
    """

    stage: str
    phase: str
    hop: int
    buffers_bytes: int
    accumulators_bytes: int
    posted: PostedBatch


class Observer(Protocol):
    """Observe ring passes."""

    def on_batch(self, event: BatchEvent) -> None:
        """Take note of an event; the pass waits for the return."""


class Observers(list[Observer]):
    """Hold the observers of a mesh, innermost last; a pass calls the last one, in autograd's thread, too."""
