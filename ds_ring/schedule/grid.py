"""World ranks <-> (data, ring, ulysses) coordinates, and neighbours on the ring.

Owns the numbering only; the process groups that follow from it are made in `runtime/mesh.py`.
Ulysses ranks are neighbours in the world (their all-to-all is the heaviest traffic and should stay inside
a node), then the ring, then data parallel replicas: global_rank = (data * R + ring) * U + ulysses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ds_ring.checked_numbers import MOST_RANKS, whole_number
from ds_ring.errors import RingMeshError


class Coordinates(NamedTuple):
    """Where one global rank stands on each axis."""

    data: int
    ring: int
    ulysses: int


def divisors(number: int) -> list[int]:
    """All positive divisors of `number`, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


def _choices(numbers: list[int]) -> str:
    texts = [str(number) for number in numbers]
    return texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + " or " + texts[-1]


@dataclass(frozen=True)
class Grid:
    """A world of `world_size` ranks cut into data x ring x ulysses.

    Raises:
        RingMeshError: a size is not a positive int, or ring x ulysses does not divide the world.
    """

    world_size: int
    ring_size: int
    ulysses_size: int = 1

    def __post_init__(self) -> None:
        for name in ("world_size", "ring_size", "ulysses_size"):
            value = getattr(self, name)
            object.__setattr__(self, name, whole_number(value, name, RingMeshError, MOST_RANKS))
        if self.world_size % self.sequence_size:
            raise RingMeshError(
                f"sequence parallel size {self.sequence_size} (ring {self.ring_size} x ulysses"
                f" {self.ulysses_size}) does not divide world size {self.world_size};"
                f" use {_choices(divisors(self.world_size))}"
            )

    @property
    def sequence_size(self) -> int:
        """Ranks that share one sequence: ring x ulysses (DeepSpeed's `sequence_parallel_size`)."""
        return self.ring_size * self.ulysses_size

    @property
    def data_size(self) -> int:
        """Replicas that see different samples."""
        return self.world_size // self.sequence_size

    def coordinates(self, global_rank: int) -> Coordinates:
        """The place of a global rank on each axis."""
        rest, ulysses = divmod(global_rank, self.ulysses_size)
        data, ring = divmod(rest, self.ring_size)
        return Coordinates(data, ring, ulysses)

    def global_rank(self, data: int, ring: int, ulysses: int) -> int:
        """Inverse of `coordinates`; the ring index wraps around."""
        return (data * self.ring_size + ring % self.ring_size) * self.ulysses_size + ulysses

    def ring_groups(self) -> list[list[int]]:
        """Global ranks of every ring, in ring order."""
        return [
            [self.global_rank(data, ring, ulysses) for ring in range(self.ring_size)]
            for data in range(self.data_size)
            for ulysses in range(self.ulysses_size)
        ]

    def ulysses_groups(self) -> list[list[int]]:
        """Global ranks of every Ulysses group, in order."""
        return [
            [self.global_rank(data, ring, ulysses) for ulysses in range(self.ulysses_size)]
            for data in range(self.data_size)
            for ring in range(self.ring_size)
        ]

    def sequence_groups(self) -> list[list[int]]:
        """Global ranks that share a sequence, in order of ring_rank * U + ulysses_rank."""
        size = self.sequence_size
        return [list(range(data * size, (data + 1) * size)) for data in range(self.data_size)]

    def data_groups(self) -> list[list[int]]:
        """Global ranks that hold the same place of different sequences."""
        size = self.sequence_size
        return [list(range(place, self.world_size, size)) for place in range(size)]
