"""The grid of a ring: which ranks exchange keys, which exchange queries, in which order. Index arithmetic.

[Note: tiles of the attention matrix]
The P ranks of a ring form a grid of a x b, P = a b. Rank (x, y) has the shard of its own tokens. It computes
the queries of the b ranks of row x over the keys of the a ranks of column y, so each pair of shards is
computed by one rank. Its K/V go to the a - 1 other ranks of its column. Its queries go to the b - 1 others of
its row, which return partial results; the backward pass returns dK/dV and dQ to their owners. So a rank
receives (a - 1) KV + (b - 1) (Q + out) instead of (P - 1) KV. Published as Mesh-Attention (arXiv 2512.20968).

A rank is in its own row and column, so the pair (r, r) is computed by rank r. All pairs of zigzag shards have
the same number of causal pairs of tokens, so every grid is balanced; README.md has other patterns.

[Note: the order of blocks]
A rank computes blocks: queries of one rank or of all of its row, over keys of one rank or of all of its
column. A message is sent one step before the first block that reads it, and a result one step after the last
block that adds to it. So the order of blocks is the whole schedule. A forward pass holds the keys of its
column while queries pass through: their partial results are complete after one block. A backward pass holds
the queries of its row with dQ, while keys pass through with dK/dV: with grouped heads that takes less memory.
Blocks of the own shard cover the messages at both ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

ALL = -1  # the queries of all ranks of a row, or the keys of all ranks of a column


class PassGrid(NamedTuple):
    """A grid of P = key_ranks x query_ranks; [Note: tiles of the attention matrix]."""

    key_ranks: int  # a: ranks of a column, whose keys meet
    query_ranks: int  # b: ranks of a row, whose queries meet
    keys_are_near: bool = True  # neighbours on the ring are in one column; else in one row

    def place(self, ring_rank: int) -> tuple[int, int]:
        """Return row x and column y of a rank."""
        if self.keys_are_near:
            column, row = divmod(ring_rank, self.key_ranks)
            return row, column
        return divmod(ring_rank, self.query_ranks)

    def rank(self, row: int, column: int) -> int:
        """Return the rank of a row and a column, which count modulo their numbers."""
        row, column = row % self.key_ranks, column % self.query_ranks
        return column * self.key_ranks + row if self.keys_are_near else row * self.query_ranks + column

    def in_column(self, ring_rank: int, distance: int) -> int:
        """Return the rank so far down the column: the one that reads this rank's keys at this distance."""
        row, column = self.place(ring_rank)
        return self.rank(row + distance, column)

    def in_row(self, ring_rank: int, distance: int) -> int:
        """Return the rank so far along the row: the one that reads this rank's queries at this distance."""
        row, column = self.place(ring_rank)
        return self.rank(row, column + distance)


class GridBlock(NamedTuple):
    """Queries and keys that one kernel call attends with, by the distance to their owners, or ALL.

    `part` is 0 for all pairs; 1 and 2 for the two parts of the own shard's, by queries.
    """

    query: int
    key: int
    part: int = 0


class Step(NamedTuple):
    """The messages that are in flight while a block is computed, by distance; None: nothing is computed."""

    queries_in: tuple[int, ...]
    keys_in: tuple[int, ...]
    queries_back: tuple[int, ...]  # partial results, or dQ
    keys_back: tuple[int, ...]  # dK and dV
    block: GridBlock | None


def order_blocks(grid: PassGrid, backward: bool) -> Iterator[GridBlock]:
    """Yield the blocks of a pass in order; see [Note: the order of blocks]."""
    a, b = grid.key_ranks, grid.query_ranks
    if backward:
        yield GridBlock(0, 0, 1)
        yield from (GridBlock(i, 0) for i in range(1, b))
        yield from (GridBlock(ALL, j) for j in range(1, a - 1))
        if a > 1:
            yield from (GridBlock(i, a - 1) for i in (*range(1, b), 0))
        yield GridBlock(0, 0, 2)
    else:
        yield from (GridBlock(0, j) for j in range(max(a - 1, 1)))
        yield from (GridBlock(i, ALL) for i in range(1, b))
        if a > 1:
            yield GridBlock(0, a - 1)


@lru_cache(maxsize=64)
def list_steps(grid: PassGrid, backward: bool) -> tuple[Step, ...]:
    """Return the steps of a pass; all ranks of a grid have the same."""
    blocks = list(order_blocks(grid, backward))
    queries, keys = (
        _uses(blocks, count, side) for count, side in ((grid.query_ranks, 0), (grid.key_ranks, 1))
    )
    steps = []
    for number in range(len(blocks) + 1):
        first, last = number + 1, number - 1
        steps.append(
            Step(
                tuple(i for i, use in queries.items() if use[0] == first),
                tuple(j for j, use in keys.items() if use[0] == first),
                tuple(i for i, use in queries.items() if use[1] == last),
                tuple(j for j, use in keys.items() if use[1] == last and backward),
                blocks[number] if number < len(blocks) else None,
            )
        )
    return tuple(steps) if any(steps[-1][:4]) else tuple(steps[:-1])


def _uses(blocks: list[GridBlock], count: int, side: int) -> dict[int, tuple[int, int]]:
    """Return the first and the last block that reads the tokens of each rank but the own one."""
    uses = {}
    for distance in range(1, count):
        using = [number for number, block in enumerate(blocks) if block[side] in (ALL, distance)]
        uses[distance] = using[0], using[-1]
    return uses
