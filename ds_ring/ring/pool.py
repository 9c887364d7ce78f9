"""Hold K with V, or dK with dV, as they travel; reuse their memory, and keep what a pass finds out once.

K and V of a token, of all heads, are adjacent in memory, and tokens follow each other ([slots, B, G, D + E]).
So any range of tokens is one message without a copy, and messages from several ranks can fill parts of one
buffer. Kernels get views [B, G, slots, D] and [B, G, slots, E].

A block is returned only after the wait of the batch that its buffers were in: until then they are in flight,
and must not be written. On a GPU "after the wait" means later on the stream that waited, so a block is used
only by calls on the stream that it was made for. The pool keeps at most as much unused memory as was in use
at one time, so that calls of many sizes do not accumulate; `release` frees all of it.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ds_ring.comm.device_tables import DeviceTables
from ds_ring.comm.messages import PostedBatch
from ds_ring.comm.streams import is_fake
from ds_ring.schedule.steps import Payload, Schedule

ALIGNMENT = 64  # bytes; a tensor begins at a multiple of it


class Pair(NamedTuple):
    """K and V, or dK and dV, [B, G, slots, D] and [B, G, slots, E], which travel together.

    `memory` has the tensors that are sent, token by token. k and v are views of them. In most buffers it is
    one tensor [slots, B, G, D + E]. It is two, [slots, B, G, D] and [slots, B, G, E], for gradients as the
    kernel returns them, and for keys that travel apart (`check_keys_apart`). The caller's tensors have none.
    """

    k: Tensor
    v: Tensor
    memory: tuple[Tensor, ...] = ()


def tokens_first(first: Tensor, second: Tensor) -> Pair | None:
    """Return tensors [B, G, slots, ...] as a buffer of two messages; None if tokens are not dense."""
    memory = first.permute(2, 0, 1, 3), second.permute(2, 0, 1, 3)
    return Pair(first, second, memory) if all(x.is_contiguous() for x in memory) else None


class BufferKind(NamedTuple):
    """Describe a buffer of two tensors that travel together.

    Attributes:
        shape: [slots, B, G, D + E].
        head_dim: D.
        dtype, device: of both.
        nbytes: a multiple of ALIGNMENT.
        fake: of a FakeTensorMode.
        apart: the second one is after the first one, not interleaved with it token by token.
    """

    shape: tuple[int, ...]
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    nbytes: int
    fake: bool
    apart: bool = False

    def pair(self, elements: Tensor) -> Pair:
        """Return the tensors in so many contiguous elements."""
        if not self.apart:
            both = elements.view(self.shape)
            first, second = both.permute(1, 2, 0, 3).tensor_split((self.head_dim,), dim=-1)
            return Pair(first, second, (both,))
        rows, width = math.prod(self.shape[:-1]), self.shape[-1]
        parts = elements.split((rows * self.head_dim, rows * (width - self.head_dim)))
        widths = self.head_dim, width - self.head_dim
        sides = (part.view(*self.shape[:-1], width) for part, width in zip(parts, widths, strict=True))
        tensors = tokens_first(*(x.permute(1, 2, 0, 3) for x in sides))
        assert tensors is not None, "dense as it was made"
        return tensors


@lru_cache(maxsize=64)
def get_payload_dtypes(
    keys: torch.dtype, sums: torch.dtype | None, parts: torch.dtype | None
) -> Mapping[Payload, torch.dtype]:
    """Return the dtype of each payload, from those of K and V, of sums of dK and dV, and of a kernel's parts.

    A forward pass has no `sums` and no `parts`.
    """
    dtypes = {Payload.KEYS: keys, Payload.ROUNDED: torch.bfloat16}
    backward = {Payload.GRADIENTS: sums, Payload.PARTS: parts}
    return dtypes | {payload: dtype for payload, dtype in backward.items() if dtype is not None}


def check_keys_apart(like: Pair) -> bool:
    """Return whether K and V of a single K/V head travel as two messages: on the CPU, of one sample.

    The tokens of such a head are dense in the caller's tensors, so the own shard is sent without a copy.
    A copy would be held together with the last keys of the head before: the peak of a forward pass.
    """
    return like.k.shape[0] == 1 and like.k.device.type == "cpu"


def make_buffer_kind(like: Pair, slots: int, dtype: torch.dtype, apart: bool) -> BufferKind:
    """Return the kind of buffers with B, G, the two head dimensions and the device of others.

    `apart` is whether its two tensors are messages of their own.
    """
    batch, heads, _, head_dim = like.k.shape
    shape = (slots, batch, heads, head_dim + like.v.shape[3])
    nbytes = -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return BufferKind(shape, head_dim, dtype, like.k.device, nbytes, is_fake(like.k), apart)


BufferKinds = dict[int, BufferKind]  # by buffer number


MAX_PAIRS_PER_BLOCK = 32


class Block:
    """Hold uninitialised memory for the stream that was present when it was made, and the tensors there."""

    __slots__ = ("_kept", "_storage", "device", "nbytes", "stream")

    def __init__(self, nbytes: int, device: torch.device, stream: int = 0) -> None:
        self.nbytes, self.device, self.stream = nbytes, device, stream
        self._kept: dict[BufferKind, Pair] = {}
        with torch.inference_mode(False):
            self._storage = torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()

    def pair(self, kind: BufferKind) -> Pair:
        """Return the tensors of a kind in this memory, the same ones at every call."""
        pair = self._kept.get(kind)
        if pair is None:
            if len(self._kept) >= MAX_PAIRS_PER_BLOCK:
                self._kept.clear()
            # Not in inference mode, or they could not be written to in a later training step.
            with torch.inference_mode(False):
                count = math.prod(kind.shape)
                both = torch.empty(0, dtype=kind.dtype, device=self.device)
                both = both.set_(self._storage, 0, (count,), (1,))
                pair = self._kept[kind] = kind.pair(both)
        return pair


class BlockKey(NamedTuple):
    """Name what free blocks are found by."""

    nbytes: int
    device: torch.device
    stream: int


class Buffers:
    """Keep free blocks by size, device and stream; `tables` has the indices of slots that messages gather."""

    def __init__(self) -> None:
        self.tables = DeviceTables()
        self._free: OrderedDict[BlockKey, list[Block]] = OrderedDict()
        self._lock = threading.Lock()
        self._used_bytes = self._most_bytes = 0
        self.free_bytes = 0  # that are kept, and not in use

    @property
    def held_bytes(self) -> int:
        """Return the bytes that are in use, or kept for the next use."""
        return self._used_bytes + self.free_bytes

    def take(self, kind: BufferKind, stream: int) -> Block:
        """Return a block for a buffer of this kind, for the stream of this number (`get_stream_number`)."""
        nbytes = kind.nbytes
        size = BlockKey(nbytes, kind.device, stream)
        with self._lock:
            block = None
            if free := self._free.get(size):
                block = free.pop()
                self.free_bytes -= nbytes
                if not free:
                    del self._free[size]
            # Counted before a new one is made: what is kept unused makes room for it.
            self._used_bytes += nbytes
            self._most_bytes = max(self._most_bytes, self._used_bytes)
            while self.free_bytes > self._most_bytes - self._used_bytes:
                self._pop(next(iter(self._free)))
        return Block(*size) if block is None else block

    def give(self, block: Block) -> None:
        """Take a block back after use; its buffers must not be in flight any more."""
        size = BlockKey(block.nbytes, block.device, block.stream)
        with self._lock:
            self._free.setdefault(size, []).append(block)
            # Evict the least recently used size first.
            self._free.move_to_end(size)
            self._used_bytes -= block.nbytes
            self.free_bytes += block.nbytes

    def release(self) -> None:
        """Free everything that is not in use."""
        with self._lock:
            self._free.clear()
            self.tables, self.free_bytes = DeviceTables(), 0
            # The bound falls as well, or as much as before would be kept again.
            self._most_bytes = self._used_bytes

    def _pop(self, size: BlockKey) -> Block:
        free = self._free[size]
        block = free.pop()
        if not free:
            del self._free[size]
        self.free_bytes -= block.nbytes
        return block


# [Note: what a pass finds out once]
# The host time of a hop is Python, so results that do not depend on the caller's tensors are kept from pass
# to pass, by schedule and shape: the routes of the messages ([Note: routes] in protocols.py) and the kinds of
# the buffers. The pool keeps the memory of the buffers and their tensors. Messages are checked when their
# route is made. `python tools/bench.py host` measures the host time of a hop.


class PreparedBatch(NamedTuple):
    """The route of a batch, as the exchange computed it, and the sizes of its messages, for traces."""

    route: Any
    posted: PostedBatch


@dataclass
class PreparedPass:
    """What is cached for one schedule and tensors of one shape.

    Attributes:
        batches: by batch number, for the batches that were posted at least once.
        kinds: buffer kinds by the first K/V head of a chunk; `RingBuffers` adds those that are missing.
    """

    batches: dict[int, PreparedBatch] = field(default_factory=dict)
    kinds: defaultdict[int, BufferKinds] = field(default_factory=lambda: defaultdict(dict))


class PreparedPasses:
    """The cached data of all passes of one exchange; an entry lives as long as its schedule."""

    def __init__(self) -> None:
        self._passes: WeakKeyDictionary[Schedule, dict[Any, PreparedPass]] = WeakKeyDictionary()

    def get(self, schedule: Schedule, k: Tensor, v: Tensor) -> PreparedPass:
        """Return the cached data for this schedule and K and V of this shape, dtype and device."""
        key = (k.shape, v.shape, k.dtype, k.device, isinstance(k, FakeTensor))
        passes = self._passes.setdefault(schedule, {})
        prepared = passes.get(key)
        if prepared is None:
            prepared = passes[key] = PreparedPass()
        return prepared
