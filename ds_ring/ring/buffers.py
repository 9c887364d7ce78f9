"""Keep memory for what travels, used again from hop to hop and from call to call.

Owns the memory of messages. K and V of a token, of all heads, lie side by side, and tokens one after the
other ([slots, B, G, D + E]): so any range of tokens is one message without a copy, and messages from several
ranks can fill parts of one buffer. Kernels get views [B, G, slots, D] and [B, G, slots, E] of it.

A block is given back only after the wait of the batch that its buffers were in: until then they are in
flight, and nobody writes to them. On a GPU "after the wait" means later on the stream that waited, so a block
is only ever used by calls on the stream that it was made for. What is kept unused is at most what was in use
at once, so that calls of many different sizes do not pile up; `release` gives all of it back to the system.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ds_ring.comm.messages import Label, TokenRange
from ds_ring.comm.streams import slot_index, stream_of
from ds_ring.ring.accumulator import Accumulator
from ds_ring.ring.trace import PostedBatch, is_fake
from ds_ring.schedule.steps import (
    RESULTS,
    SHARD,
    Accumulate,
    Free,
    HeadChunk,
    MessageKey,
    Payload,
    Recv,
    Schedule,
    Send,
)

ALIGNMENT = 64  # bytes; a tensor begins at a multiple of it
MAX_PAIRS_PER_BLOCK = 32  # pairs that a block keeps


class Pair(NamedTuple):
    """K and V, or dK and dV, [B, G, slots, D] and [B, G, slots, E], which travel together.

    `memory` is what a buffer sends, token by token, that they are views of: one tensor [slots, B, G, D + E];
    or two, [slots, B, G, D] and [slots, B, G, E], of gradients as the kernel returns them and of keys that
    travel apart (`keys_apart`). It is empty for the caller's tensors.
    """

    k: Tensor
    v: Tensor
    memory: tuple[Tensor, ...] = ()


def halves(both: Tensor, head_dim: int) -> Pair:
    """Return the views of a tensor [slots, B, G, D + E], whose first part has this head dimension D."""
    first, second = both.permute(1, 2, 0, 3).tensor_split((head_dim,), dim=-1)
    return Pair(first, second, (both,))


def tokens_first(first: Tensor, second: Tensor) -> Pair | None:
    """Return tensors [B, G, slots, ...] as a buffer of two messages; None where tokens do not lie densely."""
    memory = first.permute(2, 0, 1, 3), second.permute(2, 0, 1, 3)
    return Pair(first, second, memory) if all(x.is_contiguous() for x in memory) else None


class BufferKind(NamedTuple):
    """Describe a buffer of two tensors that travel together.

    Attributes:
        shape: [slots, B, G, D + E], or [slots, B, G, D + E + 2] of bytes for `Payload.SCALED`.
        head_dim: D.
        dtype, device: of both.
        nbytes: a multiple of ALIGNMENT.
        fake: of a FakeTensorMode.
        apart: the second one lies behind the first one, and not beside it token by token.
        place: of transport "pull", bytes from the start of the memory that ranks share; else None.
    """

    shape: tuple[int, ...]
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    nbytes: int
    fake: bool
    apart: bool = False
    place: int | None = None

    def bytes_before(self, slot: int) -> tuple[int, ...]:
        """Return how many bytes of the buffer lie before this slot of each of its messages."""
        row = math.prod(self.shape[1:-1]) * self.dtype.itemsize
        if not self.apart:
            return (slot * row * self.shape[-1],)
        first = row * self.head_dim
        return slot * first, self.shape[0] * first + slot * row * (self.shape[-1] - self.head_dim)

    def pair(self, elements: Tensor) -> Pair:
        """Return the tensors in so many contiguous elements."""
        if not self.apart:
            return halves(elements.view(self.shape), self.head_dim)
        rows, width = math.prod(self.shape[:-1]), self.shape[-1]
        parts = elements.split((rows * self.head_dim, rows * (width - self.head_dim)))
        widths = self.head_dim, width - self.head_dim
        both = (part.view(*self.shape[:-1], own) for part, own in zip(parts, widths, strict=True))
        found = tokens_first(*(x.permute(1, 2, 0, 3) for x in both))
        assert found is not None, "dense as it was made"
        return found


@cache
def payload_dtypes(
    keys: torch.dtype, sums: torch.dtype | None, parts: torch.dtype | None
) -> Mapping[Payload, torch.dtype]:
    """Return the dtype of each payload: of K and V, of sums of dK and dV, and as the kernel returns those.

    A forward pass has no `sums` and no `parts`.
    """
    found = {Payload.KEYS: keys, Payload.SCALED: torch.uint8, Payload.ROUNDED: torch.bfloat16}
    backward = {Payload.GRADIENTS: sums, Payload.PARTS: parts}
    return found | {payload: dtype for payload, dtype in backward.items() if dtype is not None}


def keys_apart(like: Pair) -> bool:
    """Return whether K and V of a single K/V head travel as two messages: on the CPU, of one sample.

    The tokens of such a head lie densely in the caller's tensors, so the own shard is sent without a copy.
    A copy would be held together with the last keys of the head before: the peak of a forward pass.
    """
    return like.k.shape[0] == 1 and like.k.device.type == "cpu"


def kind_of(
    like: Pair, slots: int, payload: Payload, dtype: torch.dtype, apart: bool | None = None
) -> BufferKind:
    """Return the kind of buffers with B, G, the two head dimensions and the device of others.

    `apart` is whether its two tensors are messages of their own; None: of PARTS alone.
    """
    batch, heads, _, head_dim = like.k.shape
    scales = 2 if payload is Payload.SCALED else 0
    shape = (slots, batch, heads, head_dim + like.v.shape[3] + scales)
    nbytes = -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    apart = payload is Payload.PARTS if apart is None else apart
    return BufferKind(shape, head_dim, dtype, like.k.device, nbytes, is_fake(like.k), apart)


# [Note: float8 rows] A row of K (or V) of one token and head is rounded to float8 (e4m3fn; Micikevicius et
# al. 2022, FP8 formats) after a division by a power of two: the smallest one that brings its largest
# magnitude to at most 448. The power's exponent is kept as a byte, as in the OCP Microscaling formats (there
# for 32 elements, here for a row). The division of float32 and narrower ones is exact, so each element is
# rounded once: by at most 1/16 of its magnitude, or 2^-10 times the power. (float64 is float32 before that.)
FLOAT8, MAX_FLOAT8 = torch.float8_e4m3fn, 448.0
BIAS = 127  # of the exponents of float32
NOT_FINITE = -128  # exponent whose power is infinite
ROWS_AT_ONCE = 2048  # slots whose rows are rounded at once: what that takes stays small beside a message


def _power_of_two(exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 2^n exactly, n from -126 to 127; -inf for NOT_FINITE."""
    return ((exponents.int() + BIAS) << 23).view(torch.float32).to(dtype)


def pack_scaled(first: Tensor, second: Tensor, rows: Tensor) -> None:
    """Round K and V to float8; see [Note: float8 rows].

    Args:
        first, second: [B, G, slots, D] and [B, G, slots, E].
        rows: [slots, B, G, D + E + 2] of bytes, written to: the elements, then the exponents of both powers.
            Rows with an infinity or a NaN become infinities and NaN, of any sign.
    """
    sides = (first, 2), (second, 2), (rows, 0)
    for *tensors, into in zip(*(x.split(ROWS_AT_ONCE, dim) for x, dim in sides), strict=True):
        start = 0
        for number, x in enumerate(tensors):
            end, x = start + x.shape[3], x.permute(2, 0, 1, 3)
            x = x if x.dtype == torch.bfloat16 else x.float()
            largest = torch.linalg.vector_norm(x, math.inf, dim=3, keepdim=True)
            m, e = torch.frexp(largest.float())  # m * 2^e with 0.5 <= m < 1
            exponents = torch.where(m <= MAX_FLOAT8 / 2**9, e - 9, e - 8).clamp_(1 - BIAS, BIAS - 1)
            exponents.masked_fill_(~largest.isfinite(), NOT_FINITE)
            into[..., start:end].view(FLOAT8).copy_(x * _power_of_two(-exponents, x.dtype))
            into[..., number - 2 : number - 1 or None].copy_(exponents.to(torch.int8).view(torch.uint8))
            start = end


def unpack_scaled(rows: Tensor, first: Tensor, second: Tensor) -> None:
    """Write the K and V that `pack_scaled` rounded, as its arguments."""
    pieces = zip(
        *(x.split(ROWS_AT_ONCE, dim) for x, dim in ((rows, 0), (first, 2), (second, 2))), strict=True
    )
    for given, *tensors in pieces:
        start = 0
        for number, target in enumerate(tensors):
            end, target = start + target.shape[3], target.permute(2, 0, 1, 3)
            exponents = given[..., number - 2 : number - 1 or None].view(torch.int8)
            elements, start = given[..., start:end].view(FLOAT8), end
            if target.dtype == torch.float16:  # has not all of these powers; 65504 would round up to infinity
                wide, most = _power_of_two(exponents, torch.float32), torch.finfo(torch.float16).max
                found = elements.float().mul_(wide)
                target.copy_(torch.where(wide.isfinite(), found.clamp(-most, most), found))
            else:
                target.copy_(elements).mul_(_power_of_two(exponents, target.dtype))


class Block:
    """Hold uninitialised memory for the stream that was present when it was made, and the tensors there."""

    __slots__ = ("_kept", "_storage", "device", "nbytes", "stream")

    def __init__(
        self, nbytes: int, device: torch.device, stream: int = 0, storage: torch.UntypedStorage | None = None
    ) -> None:
        self.nbytes, self.device, self.stream = nbytes, device, stream
        self._kept: dict[BufferKind, Pair] = {}
        if storage is None:
            with torch.inference_mode(False):
                storage = torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()
        self._storage = storage

    def pair(self, kind: BufferKind) -> Pair:
        """Return the tensors of a kind in this memory, the same ones at every call."""
        found = self._kept.get(kind)
        if found is None:
            if len(self._kept) >= MAX_PAIRS_PER_BLOCK:
                self._kept.clear()
            # Not in inference mode, or they could not be written to in a later training step.
            with torch.inference_mode(False):
                count = math.prod(kind.shape)
                both = torch.empty(0, dtype=kind.dtype, device=self.device)
                start = (kind.place or 0) // kind.dtype.itemsize
                both = both.set_(self._storage, start, (count,), (1,))
                beside = None if kind.apart else halves(both.view(kind.shape), kind.head_dim)
                found = self._kept[kind] = beside or kind.pair(both)
        return found


class BlockKey(NamedTuple):
    """Name what free blocks are found by."""

    nbytes: int
    device: torch.device
    stream: int


class Buffers:
    """Keep free blocks by size, device and stream.

    `adopts` is whether what is sent may lie in other memory as well.
    """

    adopts = True

    def __init__(self) -> None:
        self._free: OrderedDict[BlockKey, list[Block]] = OrderedDict()
        self._lock = threading.Lock()
        self._used_bytes = self._most_bytes = 0
        self.free_bytes = 0  # that are kept, and not in use

    @property
    def held_bytes(self) -> int:
        """Return the bytes that are in use, or kept for the next use."""
        return self._used_bytes + self.free_bytes

    def take(self, kind: BufferKind, stream: int) -> Block:
        """Return a block for a buffer of this kind, for the stream of this number (`stream_of`)."""
        nbytes = kind.nbytes
        size = BlockKey(nbytes, kind.device, stream)
        with self._lock:
            block = self._pop(size) if size in self._free else None
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
            # Sizes given back longest ago stand first, and go first.
            self._free.move_to_end(size)
            self._used_bytes -= block.nbytes
            self.free_bytes += block.nbytes
            while self.free_bytes > self._most_bytes - self._used_bytes:
                self._pop(next(iter(self._free)))

    def release(self) -> None:
        """Free everything that is not in use."""
        with self._lock:
            self._free.clear()
            self.free_bytes = 0
            # The bound falls as well, or as much as before would be kept again.
            self._most_bytes = self._used_bytes

    def _pop(self, size: BlockKey) -> Block:
        free = self._free[size]
        block = free.pop()
        if not free:
            del self._free[size]
        self.free_bytes -= block.nbytes
        return block


FEW_RANGES = 16  # up to this number ranges are copied as slices, above it by an index tensor

BufferKinds = dict[int, BufferKind]  # by buffer number


def _move(target: Pair, source: Pair, step: Send | Accumulate, *, add: bool = False) -> None:
    """Copy (or add) slots of a pair to those of another one, in the dtype of the target.

    The slots that a step names are the target's, of an `Accumulate`, or the source's, of a `Send`; the other
    pair has exactly so many.
    """
    sides = [(target.k, source.k, 2), (target.v, source.v, 2)]
    if target.memory and len(target.memory) == len(source.memory):
        sides = [(to, of, 0) for to, of in zip(target.memory, source.memory, strict=True)]
    gather = isinstance(step, Send)
    for to, of, dim in sides:
        if len(step.ranges) > FEW_RANGES:
            index = slot_index(step.part, to.device)
            if not gather:
                (to.index_add_ if add else to.index_copy_)(dim, index, of.to(to.dtype))
            elif to.dtype == of.dtype and to.is_contiguous():
                torch.index_select(of, dim, index, out=to)
            else:
                to.copy_(torch.index_select(of, dim, index))
            continue
        offset = 0
        for start, end in step.ranges:
            count = end - start
            at_target, at_source = (offset, start) if gather else (start, offset)
            part, given = to.narrow(dim, at_target, count), of.narrow(dim, at_source, count)
            (part.add_ if add else part.copy_)(given)
            offset += count


def _pack(rows: Tensor, keys: Pair, step: Send | Accumulate) -> None:
    """Round the slots of the shard that a step names, one after the other."""
    first, second, _ = keys
    if len(step.ranges) > FEW_RANGES:
        index = slot_index(step.part, rows.device)
        for some, into in zip(index.split(ROWS_AT_ONCE), rows.split(ROWS_AT_ONCE), strict=True):
            pack_scaled(first.index_select(2, some), second.index_select(2, some), into)
        return
    offset = 0
    for start, end in step.ranges:
        count = end - start
        given = first.narrow(2, start, count), second.narrow(2, start, count)
        pack_scaled(*given, rows.narrow(0, offset, count))
        offset += count


def some_heads(heads: slice, *tensors: Tensor) -> Sequence[Tensor]:
    """Return some heads of tensors [B, H, ...], a slice with both ends; the tensors if it is all heads."""
    if heads.stop - heads.start == tensors[0].shape[1] and heads.step in (None, 1):
        return tensors
    return [x[:, heads] for x in tensors]


class RingBuffers:
    """The buffers of one head chunk.

    Args:
        chunk: the head chunk whose steps run.
        pool: reuses the memory of buffers from hop to hop and from pass to pass.
        kinds: sizes and dtypes of the buffers. They are the same in each pass of a shape; missing ones are
            added here.
        shard: K and V of the own tokens.
        home: sums of their gradients; None in a forward pass.
        parts_dtype: of gradients as the kernel returns them (`Payload.PARTS`).
    """

    def __init__(
        self, chunk: HeadChunk, pool: Buffers, kinds: BufferKinds, shard: Pair,
        home: Accumulator | None = None, parts_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.chunk, self.home = chunk, home
        self._pool, self._kinds = pool, kinds
        # SHARD and RESULTS are the caller's tensors, which no step frees. All other buffers come from the
        # pool, including the copies made for sends.
        self._pairs = {SHARD: shard}
        self._dtypes = payload_dtypes(shard.k.dtype, None if home is None else home.dtype, parts_dtype)
        apart = pool.adopts and shard.k.shape[1] == 1 and keys_apart(shard)
        self._apart = {Payload.PARTS, Payload.KEYS} if apart else {Payload.PARTS}
        self._blocks: dict[int, Block] = {}
        self._stream: int | None = None  # found once, by the first buffer that is taken

    def pair(self, buffer: int) -> Pair:
        """Return the tensors of a buffer; those of a new buffer are uninitialised."""
        found = self._pairs.get(buffer)
        if found is None:
            payload, slots = self.chunk.steps.buffers[buffer]
            found = self._take(buffer, slots, payload)
        return found

    def arrive(self, steps: Iterable[Accumulate | Free]) -> bool:
        """Accumulate and free the messages of the batch before; return whether RESULTS are final."""
        final = returned = False
        for step in steps:
            if isinstance(step, Accumulate):
                if step.buffer == RESULTS:
                    returned = True
                elif returned and self.home is not None:  # this step may take the memory of what waits
                    self.home.merge()
                self._accumulate(step)
            elif step.buffer == RESULTS:  # the caller's memory, not the pool's
                final = True
            else:  # a send that needed no copy, and fake tensors, have no block
                self._pairs.pop(step.buffer, None)
                block = self._blocks.pop(step.buffer, None)
                if block is not None:
                    self._pool.give(block)
        # What returned waits in `home` at most until here. Its memory was given back above, but nobody takes
        # it before this (or before `finish`, if the results are final): a batch takes buffers when it posts.
        if returned and not final:
            assert self.home is not None, "gradients in a forward pass"
            self.home.merge()
        return final

    def post(self, steps: Iterable[Send | Recv], sent: list[Tensor], received: list[Tensor]) -> None:
        """Append the tensor of every send and receive to these lists, in the order of the steps."""
        for step in steps:
            if isinstance(step, Send):
                sent += self._packed(step)
            else:
                for x in self.pair(step.buffer).memory:
                    received.append(x if step.count == x.shape[0] else x.narrow(0, step.first, step.count))

    def labels(self, step: Send | Recv) -> list[Label]:
        """Return the labels of a step's messages, by which a trace and the agreement identify them."""
        tokens = TokenRange(step.origin, step.slots, self.chunk.kv_heads)
        dtype, names = self._dtypes[step.payload], step.payload.names
        messages = names.split("/") if step.payload in self._apart else [names]
        return [Label(step.peer, one, step.count, dtype, tokens) for one in messages]

    def adopt(self, buffer: int, parts: tuple[Tensor, ...] | None) -> bool:
        """Let a kernel's dK and dV [B, G, slots, ...] be a buffer, to send them without a copy, if they can.

        They can if it is one of PARTS of their dtype, each token's heads lie side by side, and the pool lets
        what is sent lie in other memory than its own.
        """
        payload = self.chunk.steps.buffers[buffer].payload
        if parts is None or payload is not Payload.PARTS or not self._pool.adopts:
            return False
        fits = {x.dtype for x in parts} == {self._dtypes[payload]}
        pair = tokens_first(*parts) if fits else None
        if pair is None:
            return False
        self._pairs[buffer] = pair
        return True

    def _take(self, buffer: int, slots: int, payload: Payload) -> Pair:
        # All pairs have the batch size, heads and head dimensions of the own shard.
        shard, kind = self._pairs[SHARD], self._kinds.get(buffer)
        if kind is None:
            apart = payload in self._apart
            kind = self._kinds[buffer] = kind_of(shard, slots, payload, self._dtypes[payload], apart)
        # Fake tensors use no memory, and a tensor of one FakeTensorMode cannot be used in another.
        if kind.fake:
            taken = kind.pair(shard.k.new_empty(math.prod(kind.shape), dtype=kind.dtype))
        else:
            if self._stream is None:
                self._stream = stream_of(kind.device)
            block = self._blocks[buffer] = self._pool.take(kind, self._stream)
            taken = block.pair(kind)
        self._pairs[buffer] = taken
        return taken

    def _packed(self, step: Send) -> Sequence[Tensor]:
        """Return what to send: copies if the slots are in several ranges, rounded, or those of the shard.

        Those of the shard are sent in place if keys travel apart.
        """
        pair, in_place = self._pairs[step.buffer], step.in_place
        if step.buffer == SHARD and len(step.ranges) == 1 and step.payload in self._apart:
            dense = tokens_first(pair.k, pair.v)
            pair, in_place = (pair, False) if dense is None else (dense, True)
        if in_place:
            start, end = step.ranges[0]
            if len(pair.memory) == 1:  # the usual case
                return (pair.memory[0].narrow(0, start, end - start),)
            return [x.narrow(0, start, end - start) for x in pair.memory]
        packed = self.pair(step.packed)
        if step.payload is Payload.SCALED and step.kept is Payload.KEYS:
            _pack(packed.memory[0], pair, step)
        else:
            _move(packed, pair, step)
        return packed.memory

    def _accumulate(self, step: Accumulate) -> None:
        """Add gradients to a buffer, or write keys into a buffer that their first part allocates."""
        if step.buffer == RESULTS:
            assert self.home is not None, "gradients in a forward pass"
            self._add_home(self.home, step)
            return
        # Keys from several ranks may fill one buffer: the first part allocates it.
        kept, payload = (self.chunk.steps.buffers[one].payload for one in (step.source, step.buffer))
        source, target = self._pairs[step.source], self.pair(step.buffer)
        if kept is Payload.KEYS and payload is Payload.SCALED:
            _pack(target.memory[0], source, step)
        elif kept is Payload.SCALED and payload is Payload.KEYS:
            unpack_scaled(source.memory[0], target.k, target.v)
        else:
            _move(target, source, step, add=payload is Payload.GRADIENTS)

    def _add_home(self, home: Accumulator, step: Accumulate) -> None:
        """Add what returned to the gradients of the own shard."""
        (first, second, _), offset = self._pairs[step.source], 0
        if len(step.ranges) > FEW_RANGES:
            dk, dv = home.so_far()
            _move(Pair(dk, dv), self._pairs[step.source], step, add=True)
            return
        for start, end in step.ranges:
            count = end - start
            home.add_slots(start, count, first.narrow(2, offset, count), second.narrow(2, offset, count))
            offset += count


# [Note: what a pass finds out once]
# The host time of a hop is Python, so whatever does not depend on the caller's tensors is kept from pass to
# pass, by schedule and shape: the routes of the messages ([Note: routes] in messages.py) and the kinds of the
# buffers. The pool keeps the memory of the buffers and their tensors. Messages are checked when their route
# is made. `python tools/bench.py host` measures the host time of a hop; tests/unit/ring/test_host_calls.py
# bounds the number of Python calls.


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
        messages, shared_bytes: of transport "pull": where the messages of all ranks lie, and the
            size of the memory of each rank; None and 0 otherwise.
    """

    batches: dict[int, PreparedBatch] = field(default_factory=dict)
    kinds: defaultdict[int, BufferKinds] = field(default_factory=lambda: defaultdict(dict))
    messages: dict[MessageKey, int] | None = None
    shared_bytes: int = 0


class PreparedPasses:
    """The cached data of all passes of one exchange; an entry lives as long as its schedule."""

    def __init__(self) -> None:
        self._passes: WeakKeyDictionary[Schedule, dict[Any, PreparedPass]] = WeakKeyDictionary()

    def of(self, schedule: Schedule, k: Tensor, v: Tensor) -> PreparedPass:
        """Return what is cached for this schedule and K and V of this shape, dtype and device."""
        key = (k.shape, v.shape, k.dtype, k.device, isinstance(k, FakeTensor))
        passes = self._passes.setdefault(schedule, {})
        found = passes.get(key)
        if found is None:
            found = passes[key] = PreparedPass()
        return found
