"""Number the ranks of a world as data x ring x Ulysses, and name the neighbours on the ring.

`comm/groups.py` makes the process groups. Without an order of its own, Ulysses ranks are
neighbours in the world (their all-to-all is the heaviest traffic and should stay inside a node), then the
ring, then data parallel replicas: global_rank = (data * R + ring) * U + ulysses.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ds_ring.errors import RingMeshError, check_whole_number, shown
from ds_ring.limits import MAX_RANKS, divisors


class Coordinates(NamedTuple):
    """The coordinates of one global rank on the axes of the mesh."""

    data: int
    ring: int
    ulysses: int


@dataclass(frozen=True)
class Grid:
    """Cut a world of `world_size` ranks into data x ring x ulysses.

    Raises:
        RingMeshError: a size is not a positive int, ring x ulysses does not divide the world, or the order
            does not name every rank once.
    """

    world_size: int
    ring_size: int
    ulysses_size: int = 1
    order: tuple[int, ...] = ()  # the world's ranks by (data, ring, ulysses); empty for 0, 1, 2, ...

    def __post_init__(self) -> None:
        for name in ("world_size", "ring_size", "ulysses_size"):
            value = getattr(self, name)
            object.__setattr__(self, name, check_whole_number(value, name, RingMeshError, MAX_RANKS))
        if self.world_size % self.sequence_size:
            *others, last = map(str, divisors(self.world_size))
            choices = f"{', '.join(others)} or {last}" if others else last
            raise RingMeshError(
                f"sequence parallel size {self.sequence_size} (ring {self.ring_size} x ulysses"
                f" {self.ulysses_size}) does not divide world size {self.world_size}; use {choices}"
            )
        if self.order and sorted(self.order) != list(range(self.world_size)):
            raise RingMeshError(
                f"expected every rank of a world of {self.world_size} once, got {shown(list(self.order))}"
            )
        if self.order == tuple(range(self.world_size)):
            object.__setattr__(self, "order", ())  # one form for one numbering

    def ring_ranks_per_node(self, global_rank: int, ranks_per_node: int | None) -> int | None:
        """Return how many neighbours on the ring of a rank share a node, a divisor of the ring size.

        `ranks_per_node` consecutive ranks of the world share a node. None if that is not known (None), or if
        nodes have unequal parts of the ring.
        """
        if ranks_per_node is None:
            return None
        check_whole_number(ranks_per_node, "ranks_per_node", RingMeshError, MAX_RANKS)
        data, _, ulysses = self.coordinates(global_rank)
        ring = [self.global_rank(data, rank, ulysses) // ranks_per_node for rank in range(self.ring_size)]
        inner = ring.count(ring[0])
        first = ring[::inner]  # the node of each block of so many neighbours
        even = ring == [node for node in first for _ in range(inner)] and len(set(first)) == len(first)
        return inner if even else None

    @classmethod
    def from_groups(cls, world_size: int, sequences: Sequence[Sequence[int]], ulysses_size: int) -> Grid:
        """Return the grid whose sequences are the given groups of ranks; see `RingMesh.from_groups`.

        Raises:
            RingMeshError: the groups are no lists of one length that ulysses_size divides, or do not hold
                every rank of the world once.
        """
        ulysses_size = check_whole_number(ulysses_size, "ulysses_size", RingMeshError, MAX_RANKS)
        try:
            groups = [[operator.index(rank) for rank in ranks] for ranks in sequences]
        except TypeError as error:
            raise RingMeshError(
                f"sequences: expected lists of ranks, like [[0, 1], [2, 3]], got {shown(sequences)}"
            ) from error
        sizes = sorted({len(ranks) for ranks in groups})
        if len(sizes) != 1 or not sizes[0] or sizes[0] % ulysses_size:
            raise RingMeshError(
                f"sequences: expected groups of one length, a multiple of ulysses_size {ulysses_size}, got"
                f" groups of {sizes} ranks"
            )
        order = tuple(rank for ranks in groups for rank in ranks)
        return cls(world_size, sizes[0] // ulysses_size, ulysses_size, order)

    @cached_property
    def _places(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.order)}

    @property
    def sequence_size(self) -> int:
        """Count ranks that share one sequence: ring x ulysses (DeepSpeed's `sequence_parallel_size`)."""
        return self.ring_size * self.ulysses_size

    @property
    def data_size(self) -> int:
        """Count replicas that see different samples."""
        return self.world_size // self.sequence_size

    def coordinates(self, global_rank: int) -> Coordinates:
        """Return the place of a global rank on each axis."""
        place = self._places[global_rank] if self.order else global_rank
        rest, ulysses = divmod(place, self.ulysses_size)
        data, ring = divmod(rest, self.ring_size)
        return Coordinates(data, ring, ulysses)

    def global_rank(self, data: int, ring: int, ulysses: int) -> int:
        """Return the rank at a place: the inverse of `coordinates`; the ring index wraps around."""
        place = (data * self.ring_size + ring % self.ring_size) * self.ulysses_size + ulysses
        return self.order[place] if self.order else place

    def ring_groups(self) -> list[list[int]]:
        """Return the global ranks of every ring, in ring order."""
        step = self.ulysses_size
        return [ranks[first::step] for ranks in self.sequence_groups() for first in range(step)]

    def ulysses_groups(self) -> list[list[int]]:
        """Return the global ranks of every Ulysses group, in order."""
        size, ranks = self.ulysses_size, self.order or range(self.world_size)
        return [list(ranks[first : first + size]) for first in range(0, self.world_size, size)]

    def sequence_groups(self) -> list[list[int]]:
        """Return the global ranks that share a sequence, in order of ring_rank * U + ulysses_rank."""
        size, ranks = self.sequence_size, self.order or range(self.world_size)
        return [list(ranks[first : first + size]) for first in range(0, self.world_size, size)]

    def data_groups(self) -> list[list[int]]:
        """Return the global ranks that hold the same place of different sequences."""
        size, ranks = self.sequence_size, self.order or range(self.world_size)
        return [list(ranks[place::size]) for place in range(size)]
