"""Find memory for the buffers of a pass: one by one at the first pass of a shape, as one block from then on.

Owns where in the pool's memory (`buffers.py`) a buffer lies.

[Note: places known beforehand]
The steps of a schedule are the same at every pass of a shape, so its first pass shows which buffers are in
use at the same time. From the second one on a pass takes one block when it begins, and every buffer has its
place there: no hop looks for memory, and the views that a kernel reads live on from pass to pass. The largest
buffers get their places first, each the lowest that no buffer has at the same time ("greedy by size for
offset calculation": Pisarchyk and Lee 2020, arXiv:2001.03288, section 5), or else the first ones, those of
most bytes times time, or those in use longest. Where the block were larger than what was in use at once in
all of these orders, buffers are taken one by one for good: no pass takes more memory so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ds_ring.runtime.buffers import Block, BufferKind, Buffers
from ds_ring.runtime.views import Pair
from ds_ring.schedule.layout import IntArray

FOR_EVER = 1 << 62


@dataclass
class Use:
    """Say from when to when a pass used a buffer.

    Attributes:
        chunk: first K/V head of its head chunk.
        buffer: its number there.
        kind: what it is.
        begin, end: count what was taken and given back before.
    """

    chunk: int
    buffer: int
    kind: BufferKind
    begin: int
    end: int = FOR_EVER


@dataclass(frozen=True, eq=False)  # blocks keep by it what lies where
class Places:
    """Say where in one block the buffers of a pass lie.

    Attributes:
        nbytes, device: of the block.
        parts: kind of buffers and the byte where they begin: once for all buffers alike.
        chunks: by the first K/V head of a chunk and the number of a buffer, the index of its part.
    """

    nbytes: int
    device: torch.device
    parts: tuple[tuple[BufferKind, int], ...]
    chunks: dict[int, dict[int, int]]


def place(uses: Sequence[Use]) -> Places | None:
    """Return places for all buffers of a pass; None if the block were larger than what was in use at once.

    Args:
        uses: all buffers of the pass, on one device.
    """
    last = 2 * len(uses)  # nothing is counted beyond
    numbers = [(use.kind.nbytes, use.begin, min(use.end, last)) for use in uses]
    sizes, begins, ends = np.array(numbers, dtype=np.int64).T
    most = _most_in_use(sizes, begins, ends)
    by_area, by_life = sizes * (begins - ends), begins - ends
    for keys in ((begins, -sizes), (-sizes, begins), (begins, by_area), (begins, -sizes, by_life)):
        offsets = _offsets(np.lexsort(keys).tolist(), sizes, begins, ends)
        nbytes = int((offsets + sizes).max())
        if nbytes <= most:
            break
    else:
        return None
    parts: dict[tuple[BufferKind, int], int] = {}
    chunks: dict[int, dict[int, int]] = defaultdict(dict)
    for use, offset in zip(uses, offsets.tolist(), strict=True):
        chunks[use.chunk][use.buffer] = parts.setdefault((use.kind, offset), len(parts))
    return Places(nbytes, uses[0].kind.device, tuple(parts), dict(chunks))


def _offsets(order: list[int], sizes: IntArray, begins: IntArray, ends: IntArray) -> IntArray:
    """Give each buffer, in this order, the lowest place that no other has at the same time."""
    offsets = np.full(len(sizes), -1, dtype=np.int64)
    for one in order:
        beside = (offsets >= 0) & (begins < ends[one]) & (begins[one] < ends)
        offsets[one] = _lowest_gap(offsets[beside], sizes[beside], int(sizes[one]))
    return offsets


def _lowest_gap(offsets: IntArray, sizes: IntArray, size: int) -> int:
    """Return where the lowest `size` bytes begin that none of these have."""
    lowest = 0
    for index in np.argsort(offsets, kind="stable"):
        if offsets[index] - lowest >= size:
            break
        lowest = max(lowest, int(offsets[index] + sizes[index]))
    return lowest


def _most_in_use(sizes: IntArray, begins: IntArray, ends: IntArray) -> int:
    order = np.argsort(np.concatenate([begins, ends]))
    return int(np.concatenate([sizes, -sizes])[order].cumsum().max())


class PassMemory:
    """Hold the memory of one pass.

    Args:
        pool: where it comes from.
        places: what is known beforehand; None for nothing.

    Attributes:
        pairs: the tensors of all parts of the places.
        uses: buffers that were taken one by one, in this order.
    """

    def __init__(self, pool: Buffers, places: Places | None) -> None:
        self._pool, self._places = pool, places
        self._taken: dict[tuple[int, int], tuple[Block, Use]] = {}
        self._clock = 0
        self._block: Block | None = None
        self.pairs: list[Pair] = []
        self.uses: list[Use] = []
        if places is not None:
            self._block = pool.take(places.nbytes, places.device, or_larger=True)
            self.pairs = self._block.pairs(places, places.parts)

    def known(self, chunk: int) -> dict[int, Pair]:
        """Return the buffers of a chunk whose places are known beforehand, by number."""
        if self._places is None:
            return {}
        pairs, parts = self.pairs, self._places.chunks.get(chunk, {})
        return {buffer: pairs[part] for buffer, part in parts.items()}

    def take(self, chunk: int, buffer: int, kind: BufferKind, like: Pair) -> Pair:
        """Return uninitialised, contiguous tensors for a buffer that is not known; fake if `like` is."""
        # Fake tensors take no memory, and those of one FakeTensorMode cannot be used in another.
        if kind.fake:
            return Pair(*(like.first.new_empty(x, dtype=kind.dtype) for x in (kind.first, kind.second)))
        block, use = self._pool.take(kind.nbytes, kind.device), Use(chunk, buffer, kind, self._clock)
        self._taken[chunk, buffer] = block, use
        self.uses.append(use)
        self._clock += 1
        return block.pairs(kind, [(kind, 0)])[0]

    def give(self, chunk: int, buffer: int) -> None:
        """Give the memory of a buffer back that was taken."""
        found = self._taken.pop((chunk, buffer), None)
        if found is None:  # a fake one
            return
        block, use = found
        use.end, self._clock = self._clock, self._clock + 1
        self._pool.give(block)

    def end(self) -> None:
        """Give the block of the places back, after the pass."""
        if self._block is not None:
            self._pool.give(self._block)
