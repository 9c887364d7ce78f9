"""Divisions of a ring: sizes, places, and which samples each ring gets (in bounds, by time)."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_ring.data.dynamic_ring.sub_rings import (
    BatchLengths,
    Division,
    _neighbours,
    _places,
    divide,
    fill_rings,
)
from ds_ring.errors import RingConfigError

RINGS = st.integers(1, 16)
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
    assert [found.get_ring(rank) for rank in range(ring_size)] == [
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


def all_sizes(ranks: int, most: int) -> Iterator[tuple[int, ...]]:
    """Every division of so many ranks into rings of at most `most`."""
    for size in range(min(ranks, most), 0, -1):
        yield from ((size, *rest) for rest in all_sizes(ranks - size, size))
    if not ranks:
        yield ()


def best_of_all(lengths: tuple[int, ...], ring_size: int, machine: Machine) -> float:
    """The least seconds of any division and any way to give samples to its rings, by trying each."""
    least = math.inf
    for sizes in all_sizes(ring_size, ring_size):
        for owners in product(range(len(sizes)), repeat=len(lengths)):
            loads = [machine.fixed(size) for size in sizes]
            for sample, owner in enumerate(owners):
                loads[owner] += machine.sample(lengths[sample], sizes[owner])
            least = min(least, max(loads))
    return least


@given(lengths=st.lists(st.integers(1, 4000), min_size=1, max_size=4).map(tuple), ring_size=st.integers(2, 4))
def test_close_to_the_best_there_is(lengths: tuple[int, ...], ring_size: int) -> None:
    """LPT is within a third of the best on equal machines; here the sizes are chosen as well."""
    machine = Machine()
    found = divide(BatchLengths(lengths, 10**9, False), ring_size, machine)
    assert found.seconds <= 4 / 3 * best_of_all(lengths, ring_size, machine)


@pytest.mark.parametrize(("ring_size", "most"), [(6, 1.12), (8, 1.1), (12, 1.2)])
def test_sizes_are_close_to_the_best_sizes(ring_size: int, most: float) -> None:
    """Over draws of long-tailed lengths; the mean is within half a percent."""
    drawn, ratios = random.Random(7), []
    for _ in range(12):
        lengths = tuple(int(drawn.lognormvariate(6, 1.3)) + 1 for _ in range(drawn.choice([3, 6, 12])))
        batch, machine = BatchLengths(lengths, 10**9, False), Machine(drawn.choice([0.0, 50.0, 300.0]))
        times = {size: [machine.sample(n, size) for n in lengths] for size in range(1, ring_size + 1)}
        every = (fill_rings(batch, sizes, machine, times.get) for sizes in all_sizes(ring_size, ring_size))  # type: ignore[arg-type]
        best = min(one.seconds for one in every if one is not None)
        ratios.append(divide(batch, ring_size, machine).seconds / best)
    assert max(ratios) < most and sum(ratios) / len(ratios) < 1.02, ratios


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


@pytest.mark.parametrize("sizes", [(4,), (3, 1), (2, 1, 1), (1, 1, 1, 1), (5, 5, 3, 2, 1)])
def test_neighbours_have_as_many_ranks(sizes: tuple[int, ...]) -> None:
    for slowest in range(len(sizes)):
        around = list(_neighbours(sizes, slowest))
        assert around and all(sum(one) == sum(sizes) and min(one) > 0 for one in around)
        assert all(list(one) == sorted(one, reverse=True) for one in around)


def test_rings_keep_inside_a_node_where_they_can() -> None:
    assert list(_places((6, 5, 3, 2), 8)) == [(0, 6), (6, 2), (8, 5), (13, 3)]
    assert list(_places((6, 6, 4), 8)) == [(0, 6), (6, 6), (12, 4)], "one has to cross"
    assert list(_places((8, 16, 4, 4), 8)) == [(0, 8), (8, 4), (12, 4), (16, 16)]
    assert list(_places((3, 1), 0)) == [(0, 3), (3, 1)]
