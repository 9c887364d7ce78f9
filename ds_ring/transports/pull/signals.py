"""Pull the messages of a ring pass out of memory that the ranks of a node share: `transport="pull"`.

Owns when a rank signals, copies and waits. What else ranks send (headers, Ulysses, other operators) travels
as messages.

[Note: one-sided pulls]
The buffers of a pass are in memory that the other ranks of the ring can read, at addresses that all know
([Note: places known beforehand] in `places.py`). In each batch a rank (1) signals READY to every rank
that it sends to, once its buffers are written, (2) waits for READY of every rank that it receives from,
copies the messages into its own buffers, and signals TAKEN, (3) waits for TAKEN of those that it sends to.
After that its buffers may be written again. So a batch is over exactly where it is over with messages, and
all rules of [Note: rules of the exchange] hold. At most one signal of a kind is in flight from one rank to
another, so signals are matched by order, and no rank waits to send one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ds_ring.comm.exchange import Exchange, Route
from ds_ring.comm.in_flight import Pending
from ds_ring.comm.messages import Message
from ds_ring.comm.streams import is_fake
from ds_ring.errors import RingMismatchError
from ds_ring.kernels.interface import Kernel, Operands
from ds_ring.ops.context import RingContext
from ds_ring.ops.passes import Pass
from ds_ring.ops.prepare import Prepared
from ds_ring.ops.ring_op import make_pass as make_ring_pass
from ds_ring.ring.accumulator import check_parts_wait
from ds_ring.ring.buffers import select_some_heads
from ds_ring.ring.merge import get_accumulator_dtype
from ds_ring.ring.pair import BufferKind, Pair, get_payload_dtypes, make_buffer_kind
from ds_ring.ring.pool import Block, Buffers
from ds_ring.ring.prepared import PreparedPass, PreparedPasses
from ds_ring.schedule.lowering import head_bytes, lower_rank
from ds_ring.schedule.steps import HeadChunk, Payload, Schedule
from ds_ring.transports.pull.places import BufferOffsets, MessageKey, place_buffers
from ds_ring.transports.pull.shared_memory import CudaShared, HostShared, Pull, share_memory

MAX_BLOCKS = 1024  # places whose tensors are kept
GROWTH = 4  # memory that was too small is replaced by 1 / GROWTH more than is needed


def make_pass(
    context: RingContext,
    prepared: Prepared,
    operands: Operands,
    finish_header_check: Callable[[], None] | None,
) -> Pass:
    """Return a ring pass with buffers in shared memory; an ordinary one for one rank or fake tensors."""
    exchange, buffers = context.exchange, None
    if isinstance(exchange, PullExchange) and not isinstance(operands.q, FakeTensor):
        buffers, finish_header_check = exchange.share(prepared, operands, finish_header_check, context.passes)
    return make_ring_pass(context, prepared, operands, finish_header_check, buffers)


class SharedBuffers(Buffers):
    """Give the buffers of a pass their places in memory that a ring shares."""

    adopts = False  # others look for all that is sent at its place

    def __init__(self, shared: HostShared | CudaShared, grown: int = 0) -> None:
        super().__init__()
        self.shared, self.grown = shared, grown  # how often too little memory was replaced
        self._blocks: dict[tuple[int, int], Block] = {}

    @property
    def held_bytes(self) -> int:
        """Return the size of this rank's shared memory."""
        return self.shared.nbytes

    def take(self, kind: BufferKind, stream: int) -> Block:
        """Return the block at the place of a buffer."""
        assert kind.place is not None, "a buffer without a place"
        key = kind.place, kind.nbytes
        if key not in self._blocks:
            if len(self._blocks) >= MAX_BLOCKS:
                self._blocks.clear()
            self._blocks[key] = Block(kind.nbytes, kind.device, storage=self.shared.storage)
        return self._blocks[key]

    def give(self, block: Block) -> None:
        """Do nothing: the schedule decides when an address is used again."""


class SharedBuffersByDevice(dict[torch.device, SharedBuffers]):
    """Hold the pools of a mesh in memory that the ring shares."""

    per_ring = True

    def process_groups(self) -> list[Any]:
        """Return what the watchdog aborts: the shared memory, as a group would be."""
        return [buffers.shared for buffers in self.values()]

    def release(self) -> None:
        """Drop all pools."""
        self.clear()


class PullExchange(Exchange):
    """Exchange the messages of ring passes by one-sided pulls, and all else as `Exchange` does."""

    _messages: Mapping[MessageKey, int] = MappingProxyType({})  # addresses of the current pass
    _device: torch.device | None = None  # of the present pass

    @property
    def _buffers(self) -> SharedBuffers | None:
        # The mesh alone keeps them: contexts that are not in use would keep memory that was replaced.
        return self.mesh.owners[SharedBuffersByDevice].get(self._device)

    def share(
        self,
        setup: Prepared,
        operands: Operands,
        finish_header_check: Callable[[], None] | None,
        passes: PreparedPasses,
    ) -> tuple[Buffers, Callable[[], None] | None]:
        """Return the buffers of a pass that begins now, and the header check if it is still to be finished.

        Collective where the ranks share no memory yet, or too little. What was shared is freed first:
        all passes of a mesh use the same memory, one after the other.

        Raises:
            RingConfigError: the ranks cannot share any; on all of them.
            RingPeerError: another rank failed during the call.
        """
        mesh, plan, (q, k, v, grad_out, _) = self.mesh, setup.plan, operands
        backward, size = grad_out is not None, head_bytes(k, v)
        lower = partial(lower_rank, backward=backward, head_bytes=size, chunk_bytes=setup.chunk_bytes)
        steps = lower(setup.rank_plan)
        prepared = passes.get(steps, k, v)
        if prepared.messages is None:
            kind_at = partial(kind_in_pass, setup.kernel, q, k, v)
            ranks = [place_buffers(lower(plan.rank(rank)), kind_at) for rank in range(mesh.ring_size)]
            give_places(prepared, steps, ranks[mesh.ring_rank], kind_at)
            prepared.messages = {
                key: place for rank_places in ranks for key, place in rank_places.messages.items()
            }
            prepared.shared_bytes = max(rank_places.nbytes for rank_places in ranks)
        self._messages, self._device, nbytes = prepared.messages, q.device, max(prepared.shared_bytes, 1)
        buffers = self._buffers
        # All ranks compute the same sizes, so all of them come here.
        if buffers is None or buffers.held_bytes < nbytes:
            if finish_header_check is not None:  # headers first: the ranks might not even make the same call
                finish_header_check()
                finish_header_check = None
            grown = 0 if buffers is None else buffers.grown + 1
            if grown > 1:  # not from a forward to a backward pass: what has grown twice may grow again
                nbytes += nbytes // GROWTH
            buffers = None
            shared = mesh.owners[SharedBuffersByDevice]
            shared.pop(q.device, None)  # freed before more is made
            counted = self.counters.bytes_sent
            buffers = SharedBuffers(share_memory(self, nbytes, q.device), grown)
            shared[q.device], self.counters.bytes_sent = buffers, counted  # of payload
        buffers.shared.begin_pass()
        return buffers, finish_header_check

    def route(self, sends: Sequence[Message], receives: Sequence[Message]) -> Route:
        """Return the route of a batch. Messages of a ring pass say what tokens they have, and are pulled.

        Raises:
            RingMismatchError: a message differs from the plan, or has another address than its receiver
                reads.
        """
        route, both = super().route(sends, receives), (*sends, *receives)
        buffers = self._buffers
        if (
            buffers is None
            or not both
            or any(letter.tokens is None or is_fake(letter.tensor) for letter in both)
        ):
            return route
        me, start = self.mesh.ring_rank, buffers.shared.storage.data_ptr()
        for message in sends:
            due = self._messages.get(_key(me, message.peer, message))
            if (there := message.tensor.data_ptr() - start) != due:
                raise RingMismatchError(
                    f"message {message.what} to ring rank {message.peer}: expected it {due} bytes behind the"
                    f" start of the shared memory, got {there}; nothing of this hop was sent. This is a fault"
                    " of ds_ring, or of code that changes it: please report it"
                )
        places = tuple(self._messages[_key(message.peer, me, message)] for message in receives)
        # One work for all messages of a sender, and one for all to a receiver.
        count, tensor = len(receives), both[0].tensor
        peers = [*dict.fromkeys(route.peers[:count]), *dict.fromkeys(route.peers[count:])]
        streams = self.streams(tensor) if tensor.is_cuda else None
        return route._replace(peers=peers, group=None, streams=streams, places=places, begin=self._begin)

    def start(
        self, route: Route, sent: Sequence[Tensor], received: Sequence[Tensor], hop: int | None = None
    ) -> Pending:
        """Start all messages of a batch."""
        pending = super().start(route, sent, received, hop)
        if route.begin is not None and route.streams is not None and (buffers := self._buffers) is not None:
            pending.group = buffers.shared  # aborted if the batch fails
        return pending

    def _begin(self, route: Route, sent: Sequence[Tensor], received: Sequence[Tensor]) -> list[Any]:
        buffers = self._buffers
        assert buffers is not None, "memory that the route was made for"
        pulls = defaultdict[int, list[Pull]](list)
        for peer, place, into in zip(route.receives, route.places, received, strict=True):
            pulls[peer].append(Pull(place, into))
        return buffers.shared.begin(list(dict.fromkeys(route.sends)), pulls)


def _key(sender: int, receiver: int, message: Message) -> MessageKey:
    assert message.tokens is not None, "a message outside a pass"
    return MessageKey.for_tokens(sender, receiver, message.what, *message.tokens)


def kind_in_pass(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, chunk: HeadChunk, payload: Payload, slots: int
) -> BufferKind:
    """Return the kind of a buffer of a pass, as `RingBuffers` makes it."""
    sums = get_accumulator_dtype(q.dtype)
    parts = k.dtype if check_parts_wait(kernel, q.dtype, sums) else sums
    first, second = select_some_heads(chunk.kv_heads, k, v)
    dtype = get_payload_dtypes(k.dtype, sums, parts)[payload]
    return make_buffer_kind(Pair(first, second), slots, payload, dtype, codec=chunk.steps.codec)


def give_places(
    prepared: PreparedPass, schedule: Schedule, places: BufferOffsets, kind_at: Callable[..., BufferKind]
) -> None:
    """Let the buffers of a pass lie where `places` says."""
    for (index, number), place in places.offsets.items():
        chunk = schedule.chunks[index]
        kind = kind_at(chunk, *chunk.steps.buffers[number])
        prepared.kinds[chunk.kv_heads.start][number] = kind._replace(place=place)
