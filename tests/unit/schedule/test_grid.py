"""The numbering of ranks."""

from __future__ import annotations

import pytest

from ds_ring import RingMeshError
from ds_ring.schedule.grid import Grid


def test_coordinates_and_back() -> None:
    grid = Grid(12, ring_size=3, ulysses_size=2)
    assert (grid.data_size, grid.sequence_size) == (2, 6)
    for rank in range(12):
        assert grid.global_rank(*grid.coordinates(rank)) == rank
    assert grid.ring_groups()[0] == [0, 2, 4]
    assert grid.ulysses_groups()[0] == [0, 1]
    assert grid.sequence_groups() == [list(range(6)), list(range(6, 12))]
    assert grid.data_groups()[0] == [0, 6]
    for groups in (grid.ring_groups(), grid.ulysses_groups(), grid.sequence_groups(), grid.data_groups()):
        assert sorted(rank for group in groups for rank in group) == list(range(12))


def test_the_ring_wraps() -> None:
    grid = Grid(8, ring_size=4)
    assert grid.global_rank(1, 4, 0) == 4 and grid.global_rank(1, -1, 0) == 7


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((8, 6, 1), r"sequence parallel size 6 .* does not divide world size 8; use 1, 2, 4 or 8"),
        ((8, 3, 2), r"ring 3 x ulysses 2"),
        ((8, 0, 1), r"ring_size: expected a positive integer, got 0"),
        ((8, 2, 1.5), r"ulysses_size: expected a positive integer, got 1.5"),
    ],
)
def test_grids_that_cannot_be(sizes: tuple[int, int, int], said: str) -> None:
    with pytest.raises(RingMeshError, match=said):
        Grid(*sizes)


@pytest.mark.parametrize(
    ("ring", "of_node", "found"),
    [
        ((0, 1, 2, 3, 4, 5, 6, 7), 4, 4),
        ((0, 1, 4, 5, 8, 9, 12, 13), 4, 2),
        ((0, 1, 4, 5, 6, 7), 4, None),  # unequal parts: node 1 fills two blocks of two
        ((0, 1, 4, 5, 2, 3, 6, 7), 4, None),  # each node comes twice, apart
        ((0, 1, 4, 5, 8, 9, 6, 7), 4, None),  # node 1 comes again after node 2, in blocks of equal size
        ((0, 4, 8, 12), 4, 1),
        ((0, 1, 2, 3), None, None),
    ],
)
def test_neighbours_share_a_node_where_each_node_has_one_equal_block(
    ring: tuple[int, ...], of_node: int | None, found: int | None
) -> None:
    world = 4 * len(ring)
    order = (*ring, *(rank for rank in range(world) if rank not in ring))
    grid = Grid(world, len(ring), order=order)
    assert grid.ring_ranks_per_node(ring[0], of_node) == found
