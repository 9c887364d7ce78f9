"""Describe the messages of a hop, check them against the plan, and count them.

Owns what ranks and virtual ranks have in common; `exchange.py` sends, `simulation/exchange.py` looks up.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from ds_ring.errors import RingMismatchError
from ds_ring.masks.slot_ranges import SlotRanges
from ds_ring.runtime.streams import Streams


class TokenRange(NamedTuple):
    """Say which tokens a message of a pass is about. Nothing here reads it; it is what virtual ranks go by.

    Attributes:
        origin: ring rank in whose shard they lie.
        slots: their slots there, in the order in which the message has them.
        heads: the K/V heads, a slice of all that a rank has.
    """

    origin: int
    slots: SlotRanges
    heads: slice


class Label(NamedTuple):
    """Say of a message the ring rank it goes to or comes from, and what the plan says of it.

    Attributes:
        peer: ring rank.
        what: "K" is followed by "V", "dK" by "dV"; "" for anything else.
        slots: as planned; None outside a pass.
        dtype: as agreed; None outside a pass.
        tokens: of which tokens; None outside a pass.
    """

    peer: int
    what: str = ""
    slots: int | None = None
    dtype: torch.dtype | None = None
    tokens: TokenRange | None = None


class Message(NamedTuple):
    """Hold a contiguous tensor and its label.

    Attributes:
        tensor: [batch, K/V heads, slots, head_dim] in a pass; any other shape elsewhere.
        peer, what, slots, dtype, tokens: see `Label`.
    """

    tensor: Tensor
    peer: int
    what: str = ""
    slots: int | None = None
    dtype: torch.dtype | None = None
    tokens: TokenRange | None = None


SECOND_OF = {"K": "V", "dK": "dV"}


def check_messages(messages: Sequence[Message]) -> None:
    """Refuse what bare point-to-point would send, and the receiver would not notice (or abort).

    Raises:
        RingMismatchError: another size, dtype or order than planned, or a tensor with gaps.
    """
    due = None  # what must follow now, and to whom
    for tensor, peer, what, slots, dtype, _ in messages:
        # NCCL would send memory from the first element on, gaps included.
        if not tensor.is_contiguous():
            _refuse(what, peer, "a contiguous tensor", f"strides {tensor.stride()}")
        # A smaller message fills part of the receiver's buffer, silently; a larger one aborts its process.
        if slots is not None and tensor.shape[2] != slots:
            _refuse(what, peer, f"{slots} tokens", f"{tensor.shape[2]}")
        # Another dtype with as many bytes arrives as other numbers, silently.
        if dtype is not None and tensor.dtype != dtype:
            _refuse(what, peer, f"{dtype}", f"{tensor.dtype}")
        # Two messages of one size that come in the other order are swapped, silently.
        if due != ((what, peer) if what in SECOND_OF.values() else None):
            _refuse(what, peer, "K before V and dK before dV to each peer", f"{what or 'tensor'} instead")
        due = (SECOND_OF[what], peer) if what in SECOND_OF else None
    if due is not None:
        _refuse(*due, "it as the last message", "none")


def _refuse(what: str, peer: int, expected: str, got: str) -> NoReturn:
    raise RingMismatchError(
        f"message {what or 'tensor'} to or from ring rank {peer}: expected {expected}, got {got}; nothing of"
        " this hop was sent. This is a fault of ds_ring, or of code that changes it: please report it"
    )


@dataclass
class Counters:
    """Count what left this rank through an exchange, payloads only."""

    bytes_sent: int = 0
    messages_sent: int = 0
    batches: int = 0

    def count(self, batch: BatchSizes) -> None:
        """Add a batch."""
        self.batches += batch.is_one
        self.messages_sent += batch.sends
        self.bytes_sent += batch.sent_bytes


class BatchSizes(NamedTuple):
    """Say what a batch adds to the counters: one batch unless it is empty, messages and bytes that leave."""

    is_one: bool
    sends: int
    sent_bytes: int


def sizes_of(sends: Sequence[Message], receives: Sequence[Message]) -> BatchSizes:
    """Return what a batch adds to the counters."""
    return BatchSizes(bool(sends or receives), len(sends), sum(one.tensor.nbytes for one in sends))


class InFlight(Protocol):
    """Wait for a batch under way."""

    def wait(self) -> None:
        """Return when every message of the batch has arrived."""
        ...


# [Note: routes]
# What a batch is, but for its tensors, is the same at every pass of a shape: peers, sizes and order. So it is
# checked and looked up at the first one and kept as a route. Later passes hand over tensors alone: buffers of
# the same kinds, and slices of them or of the own shard that were found to be contiguous there and then.
class Transport(Protocol):
    """Do what a ring pass needs of an exchange: between ranks, or between virtual ones in one process."""

    counters: Counters

    def route(self, sends: Sequence[Message], receives: Sequence[Message]) -> Any:
        """Return what `start` needs to know of all batches like this one; see [Note: routes].

        Raises:
            RingMismatchError: a message is not what the plan says (this rank's own fault; nothing was sent).
        """
        ...

    def start(
        self, route: Any, sent: Sequence[Tensor], received: Sequence[Tensor], hop: int | None = None
    ) -> InFlight:
        """Start all messages of a hop at once; returns at once."""
        ...

    def streams(self, tensor: Tensor) -> Streams:
        """Return how the streams of a tensor's device are ordered."""
        ...

    def guarded(self) -> AbstractContextManager[None]:
        """Surround a pass."""
        ...
