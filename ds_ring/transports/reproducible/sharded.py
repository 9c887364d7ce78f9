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

import numpy as np
import torch
from torch import Tensor

from ds_ring.comm.exchange import Exchange
from ds_ring.kernels.interface import Kernel, value_dim
from ds_ring.masks.tiles import Tiles
from ds_ring.ops.context import RingContext
from ds_ring.ops.prepare import Prepared
from ds_ring.ring.merge import get_accumulator_dtype, make_empty_results
from ds_ring.schedule.lowering import get_query_heads
from ds_ring.schedule.plan import Plan
from ds_ring.transports.owner_walk import walk_owners
from ds_ring.transports.reproducible.blocks import (
    Partial,
    TokenBlock,
    attend_square,
    cut_blocks,
    find_squares,
    has_whole_blocks,
    make_tiles,
    merged,
)
from ds_ring.transports.reproducible.trees import Node, TreeSum, nodes_left

Square = tuple[int, int, int]  # head class, block of queries, block of keys


def make_pass(
    context: RingContext, prepared: Prepared, finish_header_check: Callable[[], None] | None
) -> ReproduciblePass:
    """Return the pass of a context."""
    return ReproduciblePass(
        prepared.plan, context.mesh.ring_rank, prepared.kernel, context.exchange, prepared.scale,
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
        for head_class in self.plan.classes:
            self._heads.append((get_query_heads(head_class.kv_heads, self.plan.group), head_class.kv_heads))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Run the forward pass; same contract as `RingPass.forward`."""
        dtype = get_accumulator_dtype(q.dtype)
        out, lse = make_empty_results(q, value_dim(self.kernel, v), dtype)
        trees: dict[tuple[int, int], TreeSum[Partial]] = {}

        def compute(owner: int, keys: Sequence[Tensor]) -> Sequence[Tensor]:
            for (number, query, key), place, k_j, v_j in self._walk_squares(owner, keys):
                heads = self._heads[number][0]
                kernel, tiles = self.kernel.select_heads(heads), self._tiles(number, query, key)
                q_i = place.tokens(q[:, heads])
                part = attend_square(kernel, q_i, k_j, v_j, tiles, self.scale, out.shape[-1])
                if (number, query) not in trees:
                    trees[number, query] = TreeSum(np.flatnonzero(self._squares(number)[query]), merged)
                trees[number, query].insert((0, key), part)
            return ()

        self._walk(k, v, compute, None)
        for number, (heads, _) in enumerate(self._heads):
            for block in self._blocks(self.ring_rank, number):
                tree = trees.get((number, block.number))
                if tree is not None and tree.total is not None:
                    out_i, lse_i = tree.total
                    out[:, heads, block.slots] = out_i[:, :, : block.length]
                    lse[:, heads, block.slots] = lse_i[:, :, : block.length]
        return out.to(q.dtype), lse

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        grad_lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return the gradients; same contract as `RingPass.backward`."""
        dtype = get_accumulator_dtype(q.dtype)
        totals = [torch.zeros_like(x, dtype=dtype) for x in (q, k, v)]
        of_queries: dict[tuple[int, int], TreeSum[Tensor]] = {}
        of_keys: dict[tuple[int, int], TreeSum[list[Tensor]]] = {}

        def make_key_tree(number: int, key: int) -> TreeSum[list[Tensor]]:
            leaves = np.flatnonzero(self._squares(number)[:, key])
            return TreeSum(leaves, lambda left, right: [a + b for a, b in zip(left, right, strict=True)])

        def compute(owner: int, keys: Sequence[Tensor]) -> Sequence[Tensor]:
            sums: dict[tuple[int, int], TreeSum[list[Tensor]]] = {}
            for (number, query, key), place, k_j, v_j in self._walk_squares(owner, keys):
                heads = self._heads[number][0]
                grad_i, q_i, out_i, lse_i = (place.tokens(x[:, heads]) for x in (grad_out, q, out, lse))
                grad_lse_i = None if grad_lse is None else place.tokens(grad_lse[:, heads])
                dq, dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (q_i, k_j, v_j))
                inputs = (grad_i, q_i, k_j, v_j, out_i, lse_i, self._tiles(number, query, key), self.scale)
                for part in self.kernel.select_heads(heads).backward(*inputs, grad_lse_i):
                    part.add_to(dq, dk, dv)
                if (number, query) not in of_queries:
                    leaves = np.flatnonzero(self._squares(number)[query])
                    of_queries[number, query] = TreeSum(leaves, torch.add)
                of_queries[number, query].insert((0, key), dq)
                if (number, key) not in sums:
                    sums[number, key] = make_key_tree(number, key)
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
                    of_keys[number, block.number] = make_key_tree(number, block.number)
                of_keys[number, block.number].insert(node, list(pair))

        self._walk(k, v, compute, add)
        for number, (heads, kv) in enumerate(self._heads):
            for block in self._blocks(self.ring_rank, number):
                at = number, block.number
                sum_of_queries = of_queries[at].total if at in of_queries else None
                if sum_of_queries is not None:
                    totals[0][:, heads, block.slots] = sum_of_queries[:, :, : block.length]
                if at in of_keys:
                    for x, total in zip(totals[1:], of_keys[at].total or (), strict=True):
                        x[:, kv, block.slots] = total[:, :, : block.length]
        dq, dk, dv = (total.to(x.dtype) for total, x in zip(totals, (q, k, v), strict=True))
        return dq, dk, dv

    # What travels: for each head class the blocks of keys that a rank reads, in the owner's order of slots.

    def _tokens(self, number: int) -> int:
        """Return the length of the sequence for a head class, filled up to whole blocks where that may be."""
        tokens = self.plan.layout.tokens
        filled = has_whole_blocks(self.plan.classes[number].pattern)
        return -(-tokens // self.size) * self.size if filled else tokens

    def _blocks(self, ring_rank: int, number: int) -> tuple[TokenBlock, ...]:
        filled = has_whole_blocks(self.plan.classes[number].pattern)
        return cut_blocks(self.plan.layout, ring_rank, self.size, filled)

    def _squares(self, number: int) -> np.ndarray:
        return find_squares(self.plan.classes[number].pattern, self._tokens(number), self.size)

    def _tiles(self, number: int, query: int, key: int) -> Tiles:
        return make_tiles(self.plan.classes[number].pattern, self._tokens(number), self.size, query, key)

    def _read(self, owner: int, reader: int) -> Iterator[tuple[int, TokenBlock, tuple[int, ...]]]:
        """Yield head class, block of the owner's keys, and the reader's blocks of queries that read it."""
        for number in range(len(self._heads)):
            queries = np.array([block.number for block in self._blocks(reader, number)], dtype=np.int64)
            squares = self._squares(number)
            for block in self._blocks(owner, number):
                reading = queries[squares[queries, block.number]]
                if len(reading):
                    yield number, block, tuple(sorted(reading.tolist()))

    def _nodes(self, owner: int, reader: int) -> Iterator[tuple[int, TokenBlock, Node]]:
        """Yield the sums of gradients that a reader returns to the owner of the keys."""
        for number, block, reading in self._read(owner, reader):
            leaves = np.flatnonzero(self._squares(number)[:, block.number]).tolist()
            for node in nodes_left(tuple(leaves), reading):
                yield number, block, node

    def _walk_squares(
        self, owner: int, keys: Sequence[Tensor]
    ) -> Iterator[tuple[Square, TokenBlock, Tensor, Tensor]]:
        """Yield the squares of this rank's queries and an owner's keys: square, queries, K and V."""
        places = [
            {block.number: block for block in self._blocks(self.ring_rank, number)}
            for number in range(len(self._heads))
        ]
        pairs = zip(keys[::2], keys[1::2], strict=True)
        for (number, block, reading), (k_j, v_j) in zip(
            self._read(owner, self.ring_rank), pairs, strict=True
        ):
            for query in reading:
                yield (number, query, block.number), places[number][query], k_j, v_j

    def _walk(
        self, k: Tensor, v: Tensor, compute: Callable[[int, Sequence[Tensor]], Sequence[Tensor]],
        add: Callable[[int, Sequence[Tensor]], None] | None,
    ) -> None:  # fmt: skip
        """Call `compute` with the blocks of one owner after the other; see `walk_owners`."""
        size, rank, dtype = self.plan.ring_size, self.ring_rank, get_accumulator_dtype(k.dtype)

        def leaving(reader: int) -> list[Tensor]:
            at = [(self._heads[number][1], block) for number, block, _ in self._read(rank, reader)]
            return [block.tokens(x[:, kv]) for kv, block in at for x in (k, v)]

        def empty(owner: int) -> list[Tensor]:
            at = [(self._heads[number][1], block.side) for number, block, _ in self._read(owner, rank)]
            return [x.new_empty(x[:, kv, :1].expand(-1, -1, n, -1).shape) for kv, n in at for x in (k, v)]

        def empty_sums(reader: int) -> list[Tensor]:
            at = [(self._heads[number][1], block) for number, block, _ in self._nodes(rank, reader)]
            return [torch.empty_like(block.tokens(x[:, kv]), dtype=dtype) for kv, block in at for x in (k, v)]

        walk_owners(self.exchange, rank, size, leaving(rank), leaving, empty, compute, empty_sums, add)
