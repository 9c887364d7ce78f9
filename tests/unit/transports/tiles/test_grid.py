"""The grid: each pair of shards on one rank, and the order of blocks."""

from __future__ import annotations

import itertools

import pytest

from ds_ring.transports.tiles.grid import ALL, GridBlock, PassGrid, list_steps, order_blocks
from ds_ring.transports.tiles.plan import list_grids

SIZES = (1, 2, 6, 12, 16)


@pytest.mark.parametrize("size", SIZES)
def test_each_pair_of_shards_is_computed_by_one_rank(size: int) -> None:
    for grid in list_grids(size):
        assert grid.key_ranks * grid.query_ranks == size
        met = [
            (grid.in_row(rank, -i), grid.in_column(rank, -j))
            for rank in range(size)
            for i in range(grid.query_ranks)
            for j in range(grid.key_ranks)
        ]
        assert sorted(met) == list(itertools.product(range(size), repeat=2))
        # the own pair of a shard is on its rank
        assert all(grid.in_row(rank, 0) == rank == grid.in_column(rank, 0) for rank in range(size))


@pytest.mark.parametrize("size", SIZES)
def test_a_distance_there_and_back_is_the_rank_itself(size: int) -> None:
    for grid, rank in itertools.product(list_grids(size), range(size)):
        for at, count in ((grid.in_row, grid.query_ranks), (grid.in_column, grid.key_ranks)):
            assert len({at(rank, distance) for distance in range(count)}) == count
            assert all(at(at(rank, distance), -distance) == rank for distance in range(count))


def test_neighbours_share_a_column_or_a_row() -> None:
    near = [PassGrid(4, 2, keys_are_near).in_column(0, 1) for keys_are_near in (True, False)]
    assert near == [1, 2]
    assert [PassGrid(4, 2, keys_are_near).in_row(0, 1) for keys_are_near in (True, False)] == [4, 1]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_blocks_are_the_tile_once_and_messages_come_before_and_return_after(
    size: int, backward: bool
) -> None:
    for grid in list_grids(size):
        counts = grid.query_ranks, grid.key_ranks
        seen: list[tuple[int, int]] = []
        for block in order_blocks(grid, backward):
            sides = (range(n) if at == ALL else (at,) for at, n in zip(block[:2], counts, strict=True))
            seen += [] if block.part == 2 else itertools.product(*sides)
        assert sorted(seen) == list(itertools.product(*map(range, counts)))

        here: list[set[int]] = [{0}, {0}]
        back: list[list[int]] = [[], []]
        for step in list_steps(grid, backward):
            for side, (block_at, count) in enumerate(
                zip((step.block or GridBlock(0, 0))[:2], counts, strict=True)
            ):
                needed = set(range(count)) if block_at == ALL else {block_at}
                assert needed <= here[side]
                assert not needed & set(back[side]), "a result has left before its last block"
            for side, arrived in enumerate((step.queries_in, step.keys_in)):
                assert not here[side] & set(arrived)
                here[side] |= set(arrived)
            back[0] += step.queries_back
            back[1] += step.keys_back
        assert here == [set(range(n)) for n in counts]
        assert sorted(back[0]) == list(range(1, counts[0]))
        assert sorted(back[1]) == (list(range(1, counts[1])) if backward else [])


@pytest.mark.parametrize("backward", [False, True])
def test_messages_travel_while_blocks_are_computed(backward: bool) -> None:
    """But for a forward pass whose keys do not travel: its last results return alone."""
    for grid in list_grids(16):
        alone = [step for step in list_steps(grid, backward) if step.block is None]
        assert len(alone) == (not backward and grid.key_ranks == 1 and grid.query_ranks > 1)
