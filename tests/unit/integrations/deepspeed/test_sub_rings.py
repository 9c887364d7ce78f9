"""Smaller rings: who is in them, what they share, and which samples each gets (in bounds, by time)."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_ring.comm.mesh import CallCounter, RingMesh
from ds_ring.errors import RingConfigError, RingMeshError
from ds_ring.integrations.deepspeed import sub_rings
from ds_ring.integrations.deepspeed.sub_rings import (
    BatchLengths,
    Division,
    _neighbours,
    divide,
    make_sub_rings,
)
from ds_ring.memory.regions import ResultStore
from ds_ring.ops.context import ContextCache
from ds_ring.ring.observer import Observers
from ds_ring.ring.pool import Buffers
from ds_ring.schedule.grid import Grid

RINGS = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16])
LENGTHS = st.lists(st.integers(1, 5000), min_size=1, max_size=24).map(tuple)


class Machine:
    """Quadratic work that ranks share evenly, and what a ring of more than one costs beside it."""

    def __init__(self, hop: float = 50.0, token: float = 0.02) -> None:
        self.hop, self.token = hop, token

    def fixed(self, ranks: int) -> float:
        return self.hop * (ranks - 1)

    def sample(self, tokens: int, ranks: int) -> float:
        messages = self.token * tokens if ranks > 1 else 0.0
        return (tokens + tokens**2 / 1000) / ranks + messages


def seconds(lengths: tuple[int, ...], division: Division, machine: Machine, padded: bool) -> float:
    """By the definition, ring by ring."""
    slowest = 0.0
    for ring in division.rings:
        mine = [lengths[sample] for sample in ring.samples]
        rows = [max(mine)] * len(mine) if padded and mine else mine
        slowest = max(slowest, machine.fixed(ring.ranks) + sum(machine.sample(n, ring.ranks) for n in rows))
    return slowest


@given(lengths=LENGTHS, ring_size=RINGS, most=st.integers(1, 20_000), padded=st.booleans())
def test_what_every_division_has(lengths: tuple[int, ...], ring_size: int, most: int, padded: bool) -> None:
    machine = Machine()
    found = divide(BatchLengths(lengths, most, padded), ring_size, machine)
    assert sorted(sample for ring in found.rings for sample in ring.samples) == list(range(len(lengths)))
    ranks = [rank for ring in found.rings for rank in range(ring.first, ring.first + ring.ranks)]
    assert ranks == list(range(ring_size)), "disjoint blocks, in order"
    assert all(ring_size % ring.ranks == 0 == ring.first % ring.ranks for ring in found.rings)
    assert [found.of_rank(rank) for rank in range(ring_size)] == [
        ring for ring in found.rings for _ in range(ring.ranks)
    ]
    whole = Division(
        (found.rings[0]._replace(first=0, ranks=ring_size, samples=tuple(range(len(lengths)))),), 0.0
    )
    assert found.seconds == pytest.approx(seconds(lengths, found, machine, padded))
    if len(found.rings) > 1:
        for ring in found.rings:
            mine = [lengths[sample] for sample in ring.samples]
            tokens = len(mine) * max(mine, default=0) if padded else sum(mine)
            assert -(-tokens // ring.ranks) <= most
        assert found.seconds < 0.99 * seconds(lengths, whole, machine, padded)
    assert found == divide(BatchLengths(lengths, most, padded), ring_size, Machine()), (
        "the same on another rank"
    )


def best_of_all(lengths: tuple[int, ...], ring_size: int, machine: Machine) -> float:
    """The least seconds of any division of four ranks or fewer, by trying each."""
    blocks = {1: [(1,)], 2: [(2,), (1, 1)], 4: [(4,), (2, 2), (2, 1, 1), (1, 1, 1, 1)]}[ring_size]
    least = math.inf
    for sizes in blocks:
        for owners in product(range(len(sizes)), repeat=len(lengths)):
            loads = [machine.fixed(size) for size in sizes]
            for sample, owner in enumerate(owners):
                loads[owner] += machine.sample(lengths[sample], sizes[owner])
            least = min(least, max(loads))
    return least


@given(
    lengths=st.lists(st.integers(1, 4000), min_size=1, max_size=5).map(tuple),
    ring_size=st.sampled_from([2, 4]),
)
def test_close_to_the_best_there_is(lengths: tuple[int, ...], ring_size: int) -> None:
    """LPT is within a third of the best on equal machines; here the sizes are chosen as well."""
    machine = Machine()
    found = divide(BatchLengths(lengths, 10**9, False), ring_size, machine)
    assert found.seconds <= 4 / 3 * best_of_all(lengths, ring_size, machine)


def test_one_long_sample_among_short_ones() -> None:
    """It gets a ring of its own, of half the ranks; the others go one to a rank."""
    found = divide(BatchLengths((5000, 3400, 3300), 4000, False), 4, Machine(hop=100.0, token=1.0))
    assert [(ring.ranks, ring.samples) for ring in found.rings] == [(2, (0,)), (1, (1,)), (1, (2,))]


def test_a_long_sample_keeps_the_whole_ring() -> None:
    assert divide(BatchLengths((9000,), 3000, False), 4, Machine()).rings[0].ranks == 4


@pytest.mark.parametrize(("most", "sizes"), [(2, [4]), (3, [2, 2])])
def test_a_rank_holds_the_larger_half_of_an_odd_sample(most: int, sizes: list[int]) -> None:
    found = divide(BatchLengths((5, 5), most, False), 4, Machine())
    assert [ring.ranks for ring in found.rings] == sizes


def test_even_samples_go_to_single_ranks() -> None:
    found = divide(BatchLengths((1000,) * 8, 2000, True), 4, Machine())
    assert [ring.samples for ring in found.rings] == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_nothing_is_divided_where_nothing_is_gained() -> None:
    found = divide(BatchLengths((1000, 1000), 2000, False), 2, Machine(hop=0.0, token=0.0))
    assert [ring.ranks for ring in found.rings] == [2]


@pytest.mark.parametrize("lengths", [(), (5, 0)])
def test_samples_without_tokens_are_refused(lengths: tuple[int, ...]) -> None:
    with pytest.raises(RingConfigError, match="at least one token each"):
        divide(BatchLengths(lengths, 10, False), 2, Machine())


def test_neighbours_merge_all_rings_of_a_size_too() -> None:
    assert (2, 2) in _neighbours((2, 1, 1), 4) and (4,) in _neighbours((2, 2), 4)


def test_smaller_rings_are_blocks_of_the_whole_one_and_share_what_it_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two rings of four in an order of their own; checkpoints of small rings go to the host, too."""
    asked: list[Grid] = []

    def make_groups(grid: Grid, timeout: Any) -> tuple[Any, ...]:
        asked.append(grid)
        return ("ring", "ulysses", "sequence", "data", "cpu")

    monkeypatch.setattr(sub_rings, "make_groups", make_groups)
    order = (4, 5, 6, 7, 0, 1, 2, 3)
    for rank in range(8):
        mesh = RingMesh(Grid(8, 4, 1, order), rank, ranks_per_node=2)
        found = make_sub_rings(mesh)
        assert found.keys() == {1, 2, 4} and found[4] is mesh
        for size, one in found.items():
            assert one.ring_size == size and one.ring_rank == mesh.ring_rank % size
            for name in ("state", "timeouts"):
                assert getattr(one, name) is getattr(mesh, name), (size, name)
            for kind in (Buffers, ResultStore, Observers):
                assert one.owners[kind] is mesh.owners[kind], (size, kind)
            for kind in (CallCounter, ContextCache):
                assert (one.owners[kind] is mesh.owners[kind]) == (one is mesh), (size, kind)
        assert found[2].ranks_per_node == 2 and found[2].ring_group == "ring"
        assert found[1].ring_group is None and found[1].detector is None
    assert set(asked) == {Grid(8, 2, 1, order)}


def test_ulysses_ranks_are_refused() -> None:
    with pytest.raises(RingMeshError, match="expected no Ulysses ranks, got 2"):
        make_sub_rings(RingMesh(Grid(4, 2, 2), 0))
