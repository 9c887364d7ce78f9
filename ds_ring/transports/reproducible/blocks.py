"""Blocks of `block_size` tokens, and the squares of the attention matrix between two of them."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ds_ring.kernels.interface import Kernel
from ds_ring.masks.pattern import Pattern, cache_by_pattern
from ds_ring.masks.tiles import Tiles
from ds_ring.ring.merge import get_accumulator_dtype, make_empty_results, merge_
from ds_ring.schedule.layout import Layout
from ds_ring.schedule.pieces import whole_blocks

Partial = tuple[Tensor, Tensor]  # out and lse of a block of queries


class TokenBlock(NamedTuple):
    """A block of a shard: its number in the sequence, first slot, tokens, and tokens once filled up."""

    number: int
    slot: int
    length: int
    side: int

    @property
    def slots(self) -> slice:
        """Return the slots of its tokens."""
        return slice(self.slot, self.slot + self.length)

    def tokens(self, x_BHSD: Tensor) -> Tensor:
        """Return a contiguous copy, which ends with zeros: the strides of a shard depend on the ring."""
        x = x_BHSD[:, :, self.slots]
        if self.length == self.side:
            return x.clone(memory_format=torch.contiguous_format)
        return pad(x, (0, 0) * (x.ndim - 3) + (0, self.side - self.length))


def has_whole_blocks(pattern: Pattern) -> bool:
    """Return whether the last block of a sequence may be filled up: no token sees what comes after it.

    Its squares then do not depend on the length of the sequence, as a generation requires.
    """
    lengths = [primitive.only_length for primitive in pattern.primitives]
    return pattern.is_causal and not pattern.masks and lengths == [None] * len(lengths)


@lru_cache(maxsize=256)
def is_in_blocks(layout: Layout, size: int) -> bool:
    """Return whether runs begin at multiples of `size`, or follow on the ones before them in their shards."""
    for ring_rank in range(layout.ring_size):
        end = -1
        for start, step, length in layout.runs(ring_rank).tolist():
            if (step != 1 and length > 1) or (start % size and start != end):
                return False
            end = start + length
    return True


def check_blocks(layout: Layout, size: int) -> None:
    """Raise RingLayoutError for a layout that is not in blocks of `size` tokens."""
    if not is_in_blocks(layout, size):
        whole_blocks(layout, size)  # says what to do


@lru_cache(maxsize=256)
def cut_blocks(layout: Layout, ring_rank: int, size: int, whole: bool) -> tuple[TokenBlock, ...]:
    """Return the blocks of a shard whose runs begin at multiples of `size`, or follow on one another.

    Args:
        whole: fill up the last block of the sequence.
    """
    blocks: list[TokenBlock] = []
    slot = 0
    for start, _, length in layout.runs(ring_rank).tolist():
        at, end = start, start + length
        while at < end:
            taken = min(size - at % size, end - at)
            if at % size:
                last = blocks.pop()
                assert (last.number, last.slot + last.length) == (at // size, slot), "a block in two places"
                blocks.append(last._replace(length=last.length + taken))
            else:
                blocks.append(TokenBlock(at // size, slot, taken, 0))
            at, slot = at + taken, slot + taken
    return tuple(block._replace(side=size if whole else block.length) for block in blocks)


@partial(cache_by_pattern, 64)
def find_squares(pattern: Pattern, tokens: int, size: int) -> np.ndarray:
    """Return which squares may have pairs, bool [blocks of queries, blocks of keys]: the same everywhere."""
    count = -(-tokens // size)
    squares = np.zeros((count, count), dtype=bool)
    whole = np.array([[0, 1, tokens]])
    tiles = pattern.tiles(whole, whole)
    columns = (tiles.q.position, tiles.q.last_position, tiles.k.position, tiles.k.last_position)
    rows = zip(*(x.tolist() for x in (*columns, tiles.least, tiles.most)), strict=True)
    for q_first, q_last, k_first, k_last, least, most in rows:
        for block in range(q_first // size, q_last // size + 1):
            low, high = max(q_first, block * size), min(q_last, (block + 1) * size - 1)
            first, last = max(k_first, low - most), min(k_last, high - least)
            squares[block, max(first, 0) // size : max(last, -1) // size + 1] |= first <= last
    return squares


@partial(cache_by_pattern, 1 << 14)
def make_tiles(pattern: Pattern, tokens: int, size: int, query: int, key: int) -> Tiles:
    runs = [np.array([[i * size, 1, min(size, tokens - i * size)]]) for i in (query, key)]
    return pattern.tiles(*runs)


def attend_square(
    kernel: Kernel, q_i: Tensor, k_j: Tensor, v_j: Tensor, tiles: Tiles, scale: float, value_dim: int
) -> Partial:
    """Return what a block of keys contributes to a block of queries: a call of the same shape everywhere."""
    out, lse = make_empty_results(q_i, value_dim, get_accumulator_dtype(q_i.dtype))
    for part in kernel.forward(q_i, k_j, v_j, tiles, scale):
        rows, heads = part.q_rows, part.heads
        merge_(rows.select(out[:, heads]), rows.select(lse[:, heads]), part.out_BHSD, part.lse_BHS)
    return out, lse


def merged(left: Partial, right: Partial) -> Partial:
    """Merge two nodes of a tree of partial results, in place."""
    merge_(*left, *right)
    return left
