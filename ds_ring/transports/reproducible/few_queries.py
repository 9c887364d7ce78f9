"""Attend from few queries, which every rank has, to a sharded cache: the bits of the pass over whole batches.

A query is put at its place in a block of queries that is otherwise zero, and the kernel computes the same
squares as `ReproduciblePass`, which are merged along the same tree. A rank adds up the nodes of the tree
that it has completely; one all-gather of those that remain lets every rank complete the tree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_ring.comm.device_tables import on_device
from ds_ring.kernels.interface import Kernel
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.slots import IntArray
from ds_ring.ops.context import RingContext
from ds_ring.ring.merge import get_accumulator_dtype, make_empty_results
from ds_ring.schedule.layout import Layout
from ds_ring.schedule.lowering import get_query_heads
from ds_ring.schedule.plan import find_head_classes
from ds_ring.transports.reproducible.blocks import (
    Partial,
    attend_square,
    cut_blocks,
    find_squares,
    has_whole_blocks,
    make_tiles,
    merged,
)
from ds_ring.transports.reproducible.trees import Node, TreeSum, nodes_left


class _QueryBlock(NamedTuple):
    """Queries of one class of heads that are in one block of the sequence.

    Attributes:
        queries: their numbers in the call; `rows`: their places in the block, of `side` tokens.
        leaves: the blocks of keys that the block may read.
    """

    heads: slice
    kv_heads: slice
    pattern: Pattern
    tokens: int
    number: int
    queries: IntArray
    rows: IntArray
    side: int
    leaves: IntArray


@dataclass(frozen=True)
class FewQueries:
    """The inputs of a forward pass; `positions` are those of the queries, int64 [Q], on the host."""

    context: RingContext
    kernel: Kernel
    scale: float
    layout: Layout
    positions: IntArray

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return (out, lse); same contract as `ReplicatedPass.forward`."""
        out, lse = make_empty_results(q, v.shape[-1], get_accumulator_dtype(q.dtype))
        blocks = list(self._blocks(q.shape[1], k.shape[1]))
        if not blocks:
            return out.to(q.dtype), lse
        here = [self._compute_nodes(block, q, k, v) for block in blocks]
        for block, total in zip(blocks, self._completed(blocks, here, v), strict=True):
            queries, rows = (on_device(index, q.device) for index in (block.queries, block.rows))
            for whole, part in zip((out, lse), total, strict=True):
                whole[:, block.heads].index_copy_(2, queries, part.index_select(2, rows))
        return out.to(q.dtype), lse

    def _blocks(self, query_heads: int, kv_heads: int) -> Iterator[_QueryBlock]:
        size = self.context.options.block_size
        numbers = self.positions // size
        for kv, pattern in find_head_classes(self.context.pattern, query_heads, kv_heads):
            heads = get_query_heads(kv, query_heads // kv_heads)
            tokens = self.layout.tokens
            if has_whole_blocks(pattern):
                tokens = -(-tokens // size) * size
            for number in np.unique(numbers).tolist():
                queries = np.flatnonzero(numbers == number)
                side = min(size, tokens - number * size)
                leaves = np.flatnonzero(find_squares(pattern, tokens, size)[number])
                rows = self.positions[queries] % size
                if not len(leaves):  # no key, and no node of a tree
                    continue
                yield _QueryBlock(heads, kv, pattern, tokens, number, queries, rows, side, leaves)

    def _keys(self, block: _QueryBlock, ring_rank: int) -> tuple[int, ...]:
        """Return the blocks of keys that a rank has, of those that a block of queries reads."""
        size, filled = self.context.options.block_size, has_whole_blocks(block.pattern)
        held = {token_block.number for token_block in cut_blocks(self.layout, ring_rank, size, filled)}
        return tuple(leaf for leaf in block.leaves.tolist() if leaf in held)

    def _nodes(self, block: _QueryBlock, ring_rank: int) -> tuple[Node, ...]:
        return nodes_left(tuple(block.leaves.tolist()), self._keys(block, ring_rank))

    def _compute_nodes(self, block: _QueryBlock, q: Tensor, k: Tensor, v: Tensor) -> dict[Node, Partial]:
        """Return the nodes of the tree that this rank has completely."""
        size, filled = self.context.options.block_size, has_whole_blocks(block.pattern)
        tree = TreeSum[Partial](block.leaves, merged)
        q_i = _placed(q[:, block.heads].index_select(2, on_device(block.queries, q.device)), block, 0.0)
        kernel, read = self.kernel.select_heads(block.heads), set(block.leaves.tolist())
        for keys in cut_blocks(self.layout, self.context.mesh.ring_rank, size, filled):
            if keys.number in read:
                tiles = make_tiles(block.pattern, block.tokens, size, block.number, keys.number)
                k_j, v_j = (keys.tokens(x[:, block.kv_heads]) for x in (k, v))
                part = attend_square(kernel, q_i, k_j, v_j, tiles, self.scale, v.shape[-1])
                tree.insert((0, keys.number), part)
        return tree.nodes

    def _completed(
        self, blocks: list[_QueryBlock], here: list[dict[Node, Partial]], v: Tensor
    ) -> list[Partial]:
        """Return out and lse of each block of queries, from the nodes of all ranks. Collective."""
        mesh, exchange = self.context.mesh, self.context.exchange
        if exchange is None or mesh.ring_group is None:
            return [next(iter(nodes.values())) for nodes in here]
        # [B, H, rows, E + 1]: the lse is one more column. Ranks have unequally many nodes.
        shapes = [
            (len(v), block.heads.stop - block.heads.start, len(block.rows), v.shape[-1] + 1)
            for block in blocks
        ]
        of_rank = [[self._nodes(block, rank) for block in blocks] for rank in range(mesh.ring_size)]
        sizes = [
            [len(nodes) * math.prod(shape) for nodes, shape in zip(block_nodes, shapes, strict=True)]
            for block_nodes in of_rank
        ]
        sent = v.new_zeros(max(map(sum, sizes)), dtype=get_accumulator_dtype(v.dtype))
        parts = [
            torch.cat([nodes[node][0], nodes[node][1].unsqueeze(-1)], dim=-1)
            .index_select(2, on_device(block.rows, v.device))
            .flatten()
            for block, nodes in zip(blocks, here, strict=True)
            for node in sorted(nodes)
        ]
        if parts:
            torch.cat(parts, out=sent[: sum(map(len, parts))])
        trees = [TreeSum[Partial](block.leaves, merged) for block in blocks]
        received = exchange.all_gather(sent, mesh.ring_group, mesh.ring_size)
        for block_nodes, lengths, flat in zip(of_rank, sizes, received, strict=True):
            of_blocks = flat[: sum(lengths)].split(lengths)
            for tree, block, shape, nodes, block_rows in zip(
                trees, blocks, shapes, block_nodes, of_blocks, strict=True
            ):
                for node, rows in zip(nodes, block_rows.view(len(nodes), *shape), strict=True):
                    out, lse = rows[..., :-1], rows[..., -1]
                    tree.insert(node, (_placed(out, block, 0.0), _placed(lse, block, -math.inf)))
        totals = [tree.total for tree in trees]
        return [total for total in totals if total is not None]


def _placed(x: Tensor, block: _QueryBlock, fill: float) -> Tensor:
    """Return rows [B, H, rows, ...] at their places in a block of queries."""
    whole = x.new_full((*x.shape[:2], block.side, *x.shape[3:]), fill)
    return whole.index_copy_(2, on_device(block.rows, x.device), x)


def make_forward(
    context: RingContext, kernel: Kernel, scale: float, layout: Layout, positions: IntArray
) -> Callable[[Tensor, Tensor, Tensor], Partial]:
    """Return the forward pass of queries at some positions over a cache of a layout."""
    return FewQueries(context, kernel, scale, layout, positions).forward
