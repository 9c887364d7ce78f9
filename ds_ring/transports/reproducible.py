"""Run `transport="reproducible"`: outputs and gradients whose bits depend on neither ring size nor layout.

The attention matrix is divided into squares of `block_size` queries and keys, which begin at multiples of
`block_size` in every layout. The kernel computes each square by itself, from contiguous copies, so every
call has the same shapes on every ring. What the squares of a block of queries contribute is merged along one
binary tree over the blocks of keys. The gradient of a block of keys is summed along the same tree over the
blocks of queries: a rank adds up the nodes of the tree that it has completely, and returns those that remain
to the owner of the keys, which completes the tree.

Each owner sends its keys directly to the ranks that read them, one after the other, while squares of the last
one are computed; so a rank holds the keys of two ranks at a time. For a block of keys, it returns at
most about 2 log2(n) sums of gradients for each of its runs of n blocks; a ring passes one sum on.

Bits are equal between runs of the same kernel, on devices of one kind, with equal numbers of threads and of
Ulysses ranks. Layers other than attention are not covered: a weight's gradient is a sum over the tokens of a
rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ds_ring.comm.exchange import Exchange
from ds_ring.kernels.interface import Kernel, Operands, value_dim
from ds_ring.masks.pattern import BoundPattern
from ds_ring.masks.slots import IntArray
from ds_ring.masks.tiles import Tiles
from ds_ring.ops.context import RingContext
from ds_ring.ops.prepare import Prepared
from ds_ring.ring.merge import accumulator_dtype, empty_results, merge_
from ds_ring.schedule.layout import Layout, whole_blocks
from ds_ring.schedule.lowering import query_heads_of
from ds_ring.schedule.plan import Plan
from ds_ring.transports.owner_walk import walk_owners

T = TypeVar("T")
Node = tuple[int, int]  # level k and number i of a tree: leaves i * 2^k to (i + 1) * 2^k - 1
Square = tuple[int, int, int]  # head class, block of queries, block of keys


class TreeSum(Generic[T]):
    """Add leaves in any order along one binary tree.

    Args:
        leaves: numbers of the leaves that the whole tree has, ascending.
        add: of what is left and right; a node without leaves on one side is the other side.
    """

    def __init__(self, leaves: IntArray, add: Callable[[T, T], T]) -> None:
        self._leaves, self._add = leaves, add
        self._top = int(leaves[-1]).bit_length() if len(leaves) else 0
        self.nodes: dict[Node, T] = {}

    def insert(self, node: Node, value: T) -> None:
        """Add a leaf (0, i), or a node that is complete."""
        level, number = node
        while level < self._top:
            first = (number ^ 1) << level
            low, high = np.searchsorted(self._leaves, (first, first + (1 << level)))
            if low < high:
                other = self.nodes.pop((level, number ^ 1), None)
                if other is None:
                    break
                value = self._add(other, value) if number & 1 else self._add(value, other)
            level, number = level + 1, number >> 1
        self.nodes[level, number] = value

    @property
    def total(self) -> T | None:
        """Return the sum; None without leaves."""
        assert len(self.nodes) < 2, "leaves are missing"
        return next(iter(self.nodes.values()), None)


class _TokenBlock(NamedTuple):
    """A block of a shard: its number in the sequence, its first slot, and its tokens."""

    number: int
    slot: int
    length: int

    def tokens(self, x_BHSD: Tensor) -> Tensor:
        """Return a contiguous copy: the strides of a shard depend on the ring."""
        return x_BHSD[:, :, self.slot : self.slot + self.length].clone(memory_format=torch.contiguous_format)


@lru_cache(maxsize=256)
def _blocks(layout: Layout, ring_rank: int, size: int) -> tuple[_TokenBlock, ...]:
    found, slot = [], 0
    for start, _, length in whole_blocks(layout, size).runs(ring_rank).tolist():
        for first in range(0, length, size):
            found.append(_TokenBlock((start + first) // size, slot + first, min(size, length - first)))
        slot += length
    return tuple(found)


@lru_cache(maxsize=64)
def _squares(pattern: BoundPattern, tokens: int, size: int) -> np.ndarray:
    """Return which squares may have pairs, bool [blocks of queries, blocks of keys]: the same everywhere."""
    count = -(-tokens // size)
    found = np.zeros((count, count), dtype=bool)
    whole = np.array([[0, 1, tokens]])
    tiles = pattern.tiles(whole, whole)
    columns = (tiles.q.position, tiles.q.last_position, tiles.k.position, tiles.k.last_position)
    rows = zip(*(x.tolist() for x in (*columns, tiles.least, tiles.most)), strict=True)
    for q_first, q_last, k_first, k_last, least, most in rows:
        for block in range(q_first // size, q_last // size + 1):
            low, high = max(q_first, block * size), min(q_last, (block + 1) * size - 1)
            first, last = max(k_first, low - most), min(k_last, high - least)
            found[block, max(first, 0) // size : max(last, -1) // size + 1] |= first <= last
    return found


@lru_cache(maxsize=1 << 14)
def _tiles(pattern: BoundPattern, tokens: int, size: int, query: int, key: int) -> Tiles:
    runs = [np.array([[i * size, 1, min(size, tokens - i * size)]]) for i in (query, key)]
    return pattern.tiles(*runs)


@lru_cache(maxsize=1 << 14)
def _returned(leaves: tuple[int, ...], own: tuple[int, ...]) -> tuple[Node, ...]:
    """Return the nodes that remain where a rank has some of a tree's leaves."""
    tree = TreeSum[bool](np.array(leaves), lambda left, right: True)
    for leaf in own:
        tree.insert((0, leaf), True)
    return tuple(sorted(tree.nodes))


def make_pass(
    context: RingContext, found: Prepared, operands: Operands, finish_header_check: Callable[[], None] | None
) -> ReproduciblePass:
    """Return the pass of a context."""
    return ReproduciblePass(
        found.plan, context.mesh.ring_rank, found.kernel, context.exchange, found.scale,
        context.options.block_size,
    )  # fmt: skip


@dataclass(frozen=True)
class ReproduciblePass:
    """The inputs of both passes; see `RingPass` for the shapes."""

    plan: Plan
    ring_rank: int
    kernel: Kernel
    exchange: Exchange | None
    scale: float
    size: int  # tokens of a block
    _heads: list[tuple[slice, slice]] = field(init=False, repr=False, default_factory=list)

    def __post_init__(self) -> None:
        for one in self.plan.classes:
            self._heads.append((query_heads_of(one.kv_heads, self.plan.group), one.kv_heads))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Run the forward pass; same contract as `RingPass.forward`."""
        dtype = accumulator_dtype(q.dtype)
        out, lse = empty_results(q, value_dim(self.kernel, v), dtype)
        trees: dict[tuple[int, int], TreeSum[tuple[Tensor, Tensor]]] = {}

        def merged(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            merge_(*left, *right)
            return left

        def compute(owner: int, keys: Sequence[Tensor]) -> Sequence[Tensor]:
            for (number, query, key), place, k_j, v_j in self._of_owner(owner, keys):
                heads = self._heads[number][0]
                q_i = place.tokens(q[:, heads])
                part = empty_results(q_i, out.shape[-1], dtype)
                kernel, tiles = self.kernel.of_heads(heads), self._tiles(number, query, key)
                for one in kernel.forward(q_i, k_j, v_j, tiles, self.scale):
                    rows, own = one.q_rows, one.heads
                    merge_(rows.of(part[0][:, own]), rows.of(part[1][:, own]), one.out_BHSD, one.lse_BHS)
                if (number, query) not in trees:
                    trees[number, query] = TreeSum(np.flatnonzero(self._squares(number)[query]), merged)
                trees[number, query].insert((0, key), part)
            return ()

        self._walk(k, v, compute, None)
        for block in self._blocks(self.ring_rank):
            slots = slice(block.slot, block.slot + block.length)
            for number, (heads, _) in enumerate(self._heads):
                tree = trees.get((number, block.number))
                if tree is None or tree.total is None:
                    continue
                # By a contiguous copy: the bits of `exp` depend on the memory layout.
                first = block.tokens(out[:, heads]), block.tokens(lse[:, heads])
                merge_(*first, *tree.total)
                out[:, heads, slots], lse[:, heads, slots] = first
        return out.to(q.dtype), lse

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        grad_lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return the gradients; same contract as `RingPass.backward`."""
        dtype = accumulator_dtype(q.dtype)
        totals = [torch.zeros_like(x, dtype=dtype) for x in (q, k, v)]
        of_queries: dict[tuple[int, int], TreeSum[Tensor]] = {}
        of_keys: dict[tuple[int, int], TreeSum[list[Tensor]]] = {}

        def tree_of_keys(number: int, key: int) -> TreeSum[list[Tensor]]:
            leaves = np.flatnonzero(self._squares(number)[:, key])
            return TreeSum(leaves, lambda left, right: [a + b for a, b in zip(left, right, strict=True)])

        def compute(owner: int, keys: Sequence[Tensor]) -> Sequence[Tensor]:
            sums: dict[tuple[int, int], TreeSum[list[Tensor]]] = {}
            for (number, query, key), place, k_j, v_j in self._of_owner(owner, keys):
                heads = self._heads[number][0]
                grad_i, q_i, out_i, lse_i = (place.tokens(x[:, heads]) for x in (grad_out, q, out, lse))
                grad_lse_i = None if grad_lse is None else place.tokens(grad_lse[:, heads])
                dq, dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (q_i, k_j, v_j))
                inputs = (grad_i, q_i, k_j, v_j, out_i, lse_i, self._tiles(number, query, key), self.scale)
                for one in self.kernel.of_heads(heads).backward(*inputs, grad_lse_i):
                    one.add_to(dq, dk, dv)
                if (number, query) not in of_queries:
                    leaves = np.flatnonzero(self._squares(number)[query])
                    of_queries[number, query] = TreeSum(leaves, torch.add)
                of_queries[number, query].insert((0, key), dq)
                if (number, key) not in sums:
                    sums[number, key] = tree_of_keys(number, key)
                sums[number, key].insert((0, query), [dk, dv])
            nodes = [
                sums[number, block.number].nodes[node]
                for number, block, node in self._nodes(owner, self.ring_rank)
            ]
            return [x for pair in nodes for x in pair]

        def add(reader: int, gradients: Sequence[Tensor]) -> None:
            pairs = zip(gradients[::2], gradients[1::2], strict=True)
            for (number, block, node), pair in zip(self._nodes(self.ring_rank, reader), pairs, strict=True):
                if (number, block.number) not in of_keys:
                    of_keys[number, block.number] = tree_of_keys(number, block.number)
                of_keys[number, block.number].insert(node, list(pair))

        self._walk(k, v, compute, add)
        for block in self._blocks(self.ring_rank):
            slots = slice(block.slot, block.slot + block.length)
            for number, (heads, kv) in enumerate(self._heads):
                at = number, block.number
                sum_of_queries = of_queries[at].total if at in of_queries else None
                if sum_of_queries is not None:
                    totals[0][:, heads, slots] = sum_of_queries
                if at in of_keys:
                    for x, total in zip(totals[1:], of_keys[at].total or (), strict=True):
                        x[:, kv, slots] = total
        dq, dk, dv = (total.to(x.dtype) for total, x in zip(totals, (q, k, v), strict=True))
        return dq, dk, dv

    # What travels: for each head class the blocks of keys that a rank reads, in the owner's order of slots.

    def _blocks(self, ring_rank: int) -> tuple[_TokenBlock, ...]:
        return _blocks(self.plan.layout, ring_rank, self.size)

    def _squares(self, number: int) -> np.ndarray:
        return _squares(self.plan.classes[number].pattern, self.plan.layout.tokens, self.size)

    def _tiles(self, number: int, query: int, key: int) -> Tiles:
        return _tiles(self.plan.classes[number].pattern, self.plan.layout.tokens, self.size, query, key)

    def _read(self, owner: int, reader: int) -> Iterator[tuple[int, _TokenBlock, tuple[int, ...]]]:
        """Yield head class, block of the owner's keys, and the reader's blocks of queries that read it."""
        queries = np.array([block.number for block in self._blocks(reader)], dtype=np.int64)
        for number in range(len(self._heads)):
            squares = self._squares(number)
            for block in self._blocks(owner):
                reading = queries[squares[queries, block.number]]
                if len(reading):
                    yield number, block, tuple(sorted(reading.tolist()))

    def _nodes(self, owner: int, reader: int) -> Iterator[tuple[int, _TokenBlock, Node]]:
        """Yield the sums of gradients that a reader returns to the owner of the keys."""
        for number, block, reading in self._read(owner, reader):
            leaves = np.flatnonzero(self._squares(number)[:, block.number]).tolist()
            for node in _returned(tuple(leaves), reading):
                yield number, block, node

    def _of_owner(
        self, owner: int, keys: Sequence[Tensor]
    ) -> Iterator[tuple[Square, _TokenBlock, Tensor, Tensor]]:
        """Yield the squares of this rank's queries and an owner's keys: square, queries, K and V."""
        places = {block.number: block for block in self._blocks(self.ring_rank)}
        pairs = zip(keys[::2], keys[1::2], strict=True)
        for (number, block, reading), (k_j, v_j) in zip(
            self._read(owner, self.ring_rank), pairs, strict=True
        ):
            for query in reading:
                yield (number, query, block.number), places[query], k_j, v_j

    def _walk(
        self, k: Tensor, v: Tensor, compute: Callable[[int, Sequence[Tensor]], Sequence[Tensor]],
        add: Callable[[int, Sequence[Tensor]], None] | None,
    ) -> None:  # fmt: skip
        """Call `compute` with the blocks of one owner after the other; see `walk_owners`."""
        size, rank, dtype = self.plan.ring_size, self.ring_rank, accumulator_dtype(k.dtype)

        def leaving(reader: int) -> list[Tensor]:
            at = [(self._heads[number][1], block) for number, block, _ in self._read(rank, reader)]
            return [block.tokens(x[:, kv]) for kv, block in at for x in (k, v)]

        def empty(owner: int) -> list[Tensor]:
            at = [(self._heads[number][1], block.length) for number, block, _ in self._read(owner, rank)]
            return [x.new_empty(x[:, kv, :1].expand(-1, -1, n, -1).shape) for kv, n in at for x in (k, v)]

        def empty_sums(reader: int) -> list[Tensor]:
            at = [(self._heads[number][1], block) for number, block, _ in self._nodes(rank, reader)]
            return [torch.empty_like(block.tokens(x[:, kv]), dtype=dtype) for kv, block in at for x in (k, v)]

        walk_owners(self.exchange, rank, size, leaving(rank), leaving, empty, compute, empty_sums, add)
