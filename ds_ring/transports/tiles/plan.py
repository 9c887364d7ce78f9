"""What each rank of a grid reads, computes, sends and returns: the plan of a tile. Index arithmetic.

Only tokens that some pair of a tile needs travel: a query that reads no key of a column is not sent there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from ds_ring.masks.joins import cut_queries, find_middle_slot
from ds_ring.masks.pattern import BoundPattern, Pattern
from ds_ring.masks.slots import IntArray, SlotRanges, count_slots, merge_progressions, no_slots
from ds_ring.masks.tiles import Axis, Tiles
from ds_ring.schedule.head_class import map_tiles_to_payload
from ds_ring.schedule.layout import Layout
from ds_ring.schedule.plan import find_head_classes, sample_origins
from ds_ring.transports.tiles.grid import ALL, GridBlock, PassGrid

UNEVEN = 0.05  # more pairs on the busiest rank than with another grid
LEAST_KEPT = 1024  # queries of the own shard whose block is kept for the end of a backward pass


class TokenBytes(NamedTuple):
    """The bytes of a token in messages: of K and V of one K/V head, and of one query head."""

    key: int
    key_back: int  # dK and dV; 0 in a forward pass
    query: int  # q; in a backward pass with dO, out and lse
    query_back: int  # partial out and lse, or dQ

    @classmethod
    def for_pass(
        cls, backward: bool, head_dim: int, value_dim: int, element: int, accumulator: int, lses: int = 1
    ) -> TokenBytes:
        """Return those of a pass.

        Args:
            backward: of a backward pass.
            head_dim, value_dim: D of q and k, E of v and out.
            element, accumulator: bytes of an element of the inputs and of an accumulator.
            lses: numbers of a query's row that travel in the accumulator's dtype: the lse, and its gradient.
        """
        both = head_dim + value_dim
        if not backward:
            return cls(both * element, 0, head_dim * element, value_dim * element + accumulator)
        query = (both + value_dim) * element + lses * accumulator
        return cls(both * element, both * accumulator, query, head_dim * accumulator)


class Reads(NamedTuple):
    """What one tile reads of each rank of its row and of its column, by distance; the own shard is whole."""

    queries: tuple[SlotRanges, ...]
    keys: tuple[SlotRanges, ...]
    pairs: int  # attended pairs per K/V head, of all query heads that share it


class Traffic(NamedTuple):
    """The work and the messages of one rank in a pass."""

    pairs: int  # attended pairs, over all query heads
    received: int  # bytes, with what other ranks return
    sent: int
    far: int  # bytes received from other nodes


@dataclass(frozen=True, eq=False)
class GridPlan:
    """The plan of a pattern on a layout and a grid, for all ranks; computed on demand."""

    layout: Layout
    grid: PassGrid
    group: int  # query heads that share a K/V head
    classes: tuple[tuple[slice, BoundPattern], ...]  # K/V heads with equal patterns
    kv_heads: int
    _reads: dict[tuple[int, int], Reads] = field(default_factory=dict, repr=False)
    _tables: dict[tuple[int, int], RankGrid] = field(default_factory=dict, repr=False)

    def table(self, number: int, ring_rank: int) -> tuple[Tiles, IntArray, IntArray]:
        """Return the tiles of a class on a rank, and where the slots of each rank of both sides begin."""
        (queries, q_first), (keys, k_first) = (self._runs(side) for side in self._sides(ring_rank))
        return self.classes[number][1].tiles(queries, keys), q_first, k_first

    def reads(self, number: int, ring_rank: int) -> Reads:
        """Return what a class reads on a rank."""
        key = number, ring_rank
        if key not in self._reads:
            tiles, *firsts = self.table(number, ring_rank)
            sides = zip((tiles.q, tiles.k), firsts, strict=True)
            side_reads = [self._read(axis, first, ring_rank) for axis, first in sides]
            # Python's integers: the product may exceed int64.
            pairs, of_all = tiles.pairs, tiles.head_in_group < 0
            count = self.group * int(pairs[of_all].sum()) + int(pairs[~of_all].sum())
            self._reads[key] = Reads(side_reads[0], side_reads[1], count)
        return self._reads[key]

    def tiles(self, number: int, ring_rank: int) -> RankGrid:
        """Return what a class does on a rank."""
        key = number, ring_rank
        if key not in self._tables:
            self._tables[key] = RankGrid.for_rank(self, number, ring_rank)
        return self._tables[key]

    def pairs(self, ring_rank: int) -> int:
        """Return the attended pairs of a rank, over all query heads."""
        heads = (len(range(self.kv_heads)[kv_heads]) for kv_heads, _ in self.classes)
        return sum(n * self.reads(number, ring_rank).pairs for number, n in enumerate(heads))

    def traffic(self, ring_rank: int, size: TokenBytes, ranks_per_node: int = 0) -> Traffic:
        """Return the work of a rank, and its messages if a token has so many bytes."""
        grid, pairs, received, sent, far = self.grid, self.pairs(ring_rank), 0, 0, 0
        node = max(ranks_per_node, 1)
        for number, (kv_heads, _) in enumerate(self.classes):
            heads = len(range(self.kv_heads)[kv_heads])
            reads = self.reads(number, ring_rank)
            for distance in range(1, grid.key_ranks):
                come = heads * count_slots(reads.keys[distance])
                peer = grid.in_column(ring_rank, distance)
                go = heads * count_slots(self.reads(number, peer).keys[distance])
                received, sent = received + come * size.key, sent + go * size.key
                received, sent = received + go * size.key_back, sent + come * size.key_back
                source = grid.in_column(ring_rank, -distance)
                far += come * size.key * (source // node != ring_rank // node)
                far += go * size.key_back * (peer // node != ring_rank // node)
            for distance in range(1, grid.query_ranks):
                come = heads * self.group * count_slots(reads.queries[distance])
                peer = grid.in_row(ring_rank, distance)
                go = heads * self.group * count_slots(self.reads(number, peer).queries[distance])
                received, sent = received + come * size.query, sent + go * size.query
                received, sent = received + go * size.query_back, sent + come * size.query_back
                source = grid.in_row(ring_rank, -distance)
                far += come * size.query * (source // node != ring_rank // node)
                far += go * size.query_back * (peer // node != ring_rank // node)
        return Traffic(pairs, received, sent, far if ranks_per_node else received)

    def read_bytes(self, ring_rank: int, size: TokenBytes, ranks_per_node: int) -> tuple[int, int]:
        """Return the bytes that a rank reads and returns from and to other nodes, and all of them.

        The sums over all ranks are those of `traffic`; this one looks at no other rank.
        """
        far, total, node = 0, 0, max(ranks_per_node, 1)
        for number, (kv_heads, _) in enumerate(self.classes):
            heads, reads = len(range(self.kv_heads)[kv_heads]), self.reads(number, ring_rank)
            sides = (
                (reads.keys, size.key + size.key_back, self.grid.in_column),
                (reads.queries, self.group * (size.query + size.query_back), self.grid.in_row),
            )
            for slots, row_bytes, source in sides:
                for distance, read in enumerate(slots[1:], 1):
                    count = heads * count_slots(read) * row_bytes
                    total += count
                    far += count * (source(ring_rank, -distance) // node != ring_rank // node)
        return far if ranks_per_node else total, total

    @cached_property
    def _shards(self) -> list[IntArray]:
        return [self.layout.runs(rank) for rank in range(self.layout.ring_size)]

    def _sides(self, ring_rank: int) -> tuple[list[int], list[int]]:
        """Return the owners of a tile's queries and of its keys, by distance."""
        grid = self.grid
        return (
            [grid.in_row(ring_rank, -distance) for distance in range(grid.query_ranks)],
            [grid.in_column(ring_rank, -distance) for distance in range(grid.key_ranks)],
        )

    def _runs(self, ranks: Sequence[int]) -> tuple[IntArray, IntArray]:
        runs = [self._shards[rank] for rank in ranks]
        counts = [int(rank_runs[:, 2].sum()) for rank_runs in runs]
        return np.concatenate(runs), np.cumsum([0, *counts[:-1]])

    def _read(self, axis: Axis, first: IntArray, owner_here: int) -> tuple[SlotRanges, ...]:
        """Return the slots of one side by the distance to their owner; all of the own shard."""
        source = np.searchsorted(first, axis.slot, side="right") - 1
        # One slot between two ranks, so that no range has tokens of both.
        apart = first + np.arange(len(first))
        ranges = no_slots()
        if len(source):
            rows = np.stack([axis.slot + source, axis.slot_step, axis.length], axis=1)
            ranges = merge_progressions(rows)
        owner = np.searchsorted(apart, ranges[:, 0], side="right") - 1
        slots = ranges - apart[owner][:, None]
        bounds = np.searchsorted(owner, np.arange(1, len(first) + 1))
        valid = self.layout.valid_tokens(owner_here)
        return np.array([[0, valid]]) if valid else no_slots(), *np.split(slots, bounds)[1:-1]


class RankGrid:
    """What one class of heads does on one rank; [Note: the order of blocks] in `grid.py`.

    Attributes:
        queries, keys: the slots that this rank reads of each rank of its row and column, by distance.
        query_readers, key_readers: the own slots that the rank at each distance reads.
    """

    def __init__(
        self,
        table: Tiles,
        reads: Reads,
        query_readers: Sequence[SlotRanges],
        key_readers: Sequence[SlotRanges],
    ) -> None:
        self.queries, self.keys = reads.queries, reads.keys
        self.query_readers, self.key_readers = query_readers, key_readers
        self._table = table  # slots count through the tokens that are read, rank after rank
        self._q_first, self._k_first = (_firsts(side) for side in (reads.queries, reads.keys))
        self._blocks: dict[GridBlock, Tiles] = {}

    @classmethod
    def for_rank(cls, plan: GridPlan, number: int, ring_rank: int) -> RankGrid:
        """Return those of a class on a rank."""
        grid, reads = plan.grid, plan.reads(number, ring_rank)
        table, q_first, k_first = plan.table(number, ring_rank)
        table = _packed(table, k_first, reads.keys)
        table = _transposed(_packed(_transposed(table), q_first, reads.queries))
        queries = [
            plan.reads(number, grid.in_row(ring_rank, distance)).queries[distance]
            for distance in range(grid.query_ranks)
        ]
        keys = [
            plan.reads(number, grid.in_column(ring_rank, distance)).keys[distance]
            for distance in range(grid.key_ranks)
        ]
        return cls(table, reads, queries, keys)

    def make_block_tiles(self, block: GridBlock) -> Tiles:
        """Return the tiles of a block; slots count from the first token of what it reads on each side."""
        if block not in self._blocks:
            tiles = self._table
            if block.query != ALL:
                tiles = _transposed(_select_source(_transposed(tiles), self._q_first, block.query))
            if block.key != ALL:
                tiles = _select_source(tiles, self._k_first, block.key)
            if block.part:
                cut = find_middle_slot(tiles)
                keep = min(cut, count_slots(self.queries[0]) - cut) >= LEAST_KEPT
                if keep:
                    tiles = cut_queries(tiles, (cut,))[block.part % 2]
                elif block.part == 2:
                    tiles = tiles.rows(np.zeros(len(tiles), dtype=bool))
            self._blocks[block] = tiles
        return self._blocks[block]


def _firsts(slots: Sequence[SlotRanges]) -> IntArray:
    return np.cumsum([0, *map(count_slots, slots)])


def _transposed(tiles: Tiles) -> Tiles:
    """Return the table with both sides exchanged, for what cuts keys alone; distances change their sign."""
    return replace(tiles, q=tiles.k, k=tiles.q, least=-tiles.most, most=-tiles.least)


def _moved(tiles: Tiles, by: int) -> Tiles:
    return replace(tiles, k=replace(tiles.k, slot=tiles.k.slot + by))


def _packed(tiles: Tiles, first: IntArray, held: Sequence[SlotRanges]) -> Tiles:
    """Return tiles whose key slots count through the held tokens, rank after rank."""
    source = np.searchsorted(first, tiles.k.slot, side="right") - 1
    parts = [tiles.rows(np.zeros(len(tiles), dtype=bool))]
    for distance, begin in enumerate(_firsts(held)[:-1]):
        part = tiles.rows(source == distance)
        if len(part):
            part = _moved(part, -int(first[distance]))
            parts.append(_moved(map_tiles_to_payload(part, held[distance]) if distance else part, int(begin)))
    return Tiles.concat(parts)


def _select_source(tiles: Tiles, firsts: IntArray, distance: int) -> Tiles:
    """Return the tiles with the keys of one rank; their slots count from its first token."""
    begin, end = int(firsts[distance]), int(firsts[distance + 1])
    inside = (tiles.k.slot >= begin) & (tiles.k.slot < end)
    return _moved(tiles.rows(inside), -begin)


@lru_cache(maxsize=64)
def tile_plan(pattern: Pattern, layout: Layout, query_heads: int, kv_heads: int, grid: PassGrid) -> GridPlan:
    """Return the plan of a pattern on a layout and a grid, of H and G heads per rank."""
    classes = tuple((heads, bound) for heads, bound in find_head_classes(pattern, query_heads, kv_heads))
    assert all(isinstance(bound, BoundPattern) for _, bound in classes)
    return GridPlan(layout, grid, query_heads // kv_heads, classes, kv_heads)  # type: ignore[arg-type]


@lru_cache(maxsize=64)
def choose_grid(
    pattern: Pattern, layout: Layout, query_heads: int, kv_heads: int, size: TokenBytes,
    ranks_per_node: int = 0,
) -> PassGrid:  # fmt: skip
    """Return the grid of the fewest bytes among those that share the work about as evenly as any.

    Bytes are those of the busiest rank: between nodes if these are known, then in all. A large ring is
    represented by some of its ranks. Of equal grids the one with more ranks in a column is taken: with P in a
    column only keys travel, as in a ring, and the work is as even as the layout makes it.
    """
    ranks, ring = sample_origins(layout.ring_size), layout.ring_size
    node = ranks_per_node if 1 < ranks_per_node < ring else 0
    most: dict[PassGrid, int] = {}
    cost: dict[PassGrid, tuple[int, int, int]] = {}
    for grid in list_grids(ring):
        plan = tile_plan(pattern, layout, query_heads, kv_heads, grid)
        each = [plan.read_bytes(rank, size, node) for rank in ranks]
        most[grid] = max(plan.pairs(rank) for rank in ranks)
        cost[grid] = max(far for far, _ in each), max(total for _, total in each), -grid.key_ranks
    least = min(most.values())
    return min((grid for grid in cost if most[grid] <= (1 + UNEVEN) * least), key=cost.__getitem__)


def list_grids(ring_size: int) -> list[PassGrid]:
    """Return all grids of a ring; those of one row or one column once."""
    columns = [a for a in range(1, ring_size + 1) if ring_size % a == 0]
    grids = [PassGrid(a, ring_size // a, near) for a in columns for near in (True, False)]
    return [grid for grid in grids if grid.keys_are_near or 1 < grid.key_ranks < ring_size]
