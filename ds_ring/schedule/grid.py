"""Number the ranks of a world as data x ring x Ulysses, and name the neighbours on the ring.

`comm/groups.py` makes the process groups. Without an order of its own, Ulysses ranks are
neighbours in the world (their all-to-all is the heaviest traffic and should stay inside a node), then the
ring, then data parallel replicas: global_rank = (data * R + ring) * U + ulysses.

[Note: rings for samples]
Long samples need the memory and the time of many ranks; short ones lose both to messages there. So `divide`
cuts the ring into smaller rings, blocks of consecutive ranks, whose groups are made once, at the start. This
is the idea of FlexSP (Wang et al. 2024, arXiv:2412.01523), which solves an integer program, and ByteScale (Ge
et al. 2025, arXiv:2502.21231). Here the search splits and merges rings, beginning with equal ones, and gives
samples, the longest first, to the ring that is done first (Graham 1969, LPT). The seconds come from rates
that are the same on all ranks to the bit, so all find the same division.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple, Protocol

import numpy as np

from ds_ring.errors import RingConfigError, RingMeshError, shown, whole_number
from ds_ring.limits import MOST_RANKS
from ds_ring.masks.tiles import UNBOUNDED


class Coordinates(NamedTuple):
    """Where one global rank stands on each axis."""

    data: int
    ring: int
    ulysses: int


def divisors(number: int) -> list[int]:
    """Return all positive divisors of `number`, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


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
            object.__setattr__(self, name, whole_number(value, name, RingMeshError, MOST_RANKS))
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
        whole_number(ranks_per_node, "ranks_per_node", RingMeshError, MOST_RANKS)
        data, _, ulysses = self.coordinates(global_rank)
        ring = [self.global_rank(data, rank, ulysses) // ranks_per_node for rank in range(self.ring_size)]
        inner = ring.count(ring[0])
        first = ring[::inner]  # the node of each block of so many neighbours
        even = ring == [node for node in first for _ in range(inner)] and len(set(first)) == len(first)
        return inner if even else None

    @classmethod
    def of_groups(cls, world_size: int, sequences: Sequence[Sequence[int]], ulysses_size: int) -> Grid:
        """Return the grid whose sequences are the given groups of ranks; see `RingMesh.from_groups`.

        Raises:
            RingMeshError: the groups are no lists of one length that ulysses_size divides, or do not hold
                every rank of the world once.
        """
        ulysses_size = whole_number(ulysses_size, "ulysses_size", RingMeshError, MOST_RANKS)
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


WORTH_IT = 0.99  # of the whole ring's seconds: a division that saves less is not taken
_STEPS = 32  # splits and merges at most


class SubRing(NamedTuple):
    """A block of consecutive ring ranks, and the samples of the batch that they share."""

    first: int  # ring rank of its first member, a multiple of `ranks`
    ranks: int
    samples: tuple[int, ...]  # ascending numbers; none for ranks that are left without


class Division(NamedTuple):
    """The rings of a batch in order of their ranks, and the seconds that the slowest should take."""

    rings: tuple[SubRing, ...]
    seconds: float

    def of_rank(self, ring_rank: int) -> SubRing:
        """Return the ring that a rank of the whole ring is in."""
        return next(one for one in self.rings if one.first <= ring_rank < one.first + one.ranks)


class SampleSeconds(Protocol):
    """Say what training on samples takes; rising with tokens."""

    def fixed(self, ranks: int) -> float:
        """Return the seconds that a ring of so many ranks costs beside its samples."""

    def sample(self, tokens: int, ranks: int) -> float:
        """Return the seconds of one sample of so many tokens on so many ranks."""


class BatchLengths(NamedTuple):
    """What is divided."""

    lengths: tuple[int, ...]  # tokens of each sample
    most_tokens: int  # of one rank; the whole ring may hold more, since it may have to
    padded: bool  # the samples of a ring are rows as long as its longest; otherwise they are packed


def divide(batch: BatchLengths, ring_size: int, times: SampleSeconds) -> Division:
    """Return the division of a ring's ranks that should be done first; the whole ring, where none is faster.

    Raises:
        RingConfigError: a batch without samples, or a sample without tokens.
    """
    if min(batch.lengths, default=0) < 1:
        raise RingConfigError(
            f"lengths: expected at least one sample, of at least one token each, got"
            f" {list(batch.lengths)[:8]}; leave empty samples out"
        )

    @cache  # a length is asked for once
    def sample_seconds(ranks: int) -> list[float]:
        known = {tokens: times.sample(tokens, ranks) for tokens in set(batch.lengths)}
        return [known[tokens] for tokens in batch.lengths]

    def fill(sizes: tuple[int, ...], batch: BatchLengths = batch) -> Division | None:
        return _filled(batch, sizes, times, sample_seconds)

    whole = fill((ring_size,), batch._replace(most_tokens=UNBOUNDED))
    assert whole is not None
    equal = [(size,) * (ring_size // size) for size in divisors(ring_size)]
    tried = {sizes: fill(sizes) for sizes in equal}
    seconds = operator.attrgetter("seconds")
    best = min((found for found in tried.values() if found), key=seconds, default=whole)
    for _ in range(_STEPS):
        sizes = tuple(sorted((one.ranks for one in best.rings), reverse=True))
        for other in _neighbours(sizes, ring_size):
            if other not in tried:
                tried[other] = fill(other)
        better = min((found for found in tried.values() if found), key=seconds, default=best)
        if better.seconds >= best.seconds:
            break
        best = better
    return best if best.seconds < WORTH_IT * whole.seconds else whole


def _filled(
    batch: BatchLengths,
    sizes: tuple[int, ...],
    times: SampleSeconds,
    sample_seconds: Callable[[int], list[float]],
) -> Division | None:
    """Give samples to rings of these sizes, the longest first; None where one fits none of them."""
    places = _places(sizes)
    if places is None:
        return None
    ranks = np.array(sizes)
    seconds = np.array([times.fixed(size) for size in sizes])
    tokens, kinds = np.zeros(len(sizes), dtype=np.int64), list(dict.fromkeys(sizes))
    of_kind = np.array([kinds.index(size) for size in sizes])
    cost = np.array([sample_seconds(size) for size in kinds])  # [kinds, samples]
    row = np.full(len(sizes), -1)  # the sample whose length the rows of a ring have
    held: list[list[int]] = [[] for _ in sizes]
    for sample in sorted(range(len(batch.lengths)), key=lambda i: (-batch.lengths[i], i)):
        as_long = np.where(row < 0, sample, row) if batch.padded else np.full(len(sizes), sample)
        after = seconds + cost[of_kind, as_long]
        length = np.array(batch.lengths)[as_long]
        fits = -(-(tokens + length) // ranks) <= batch.most_tokens
        if not fits.any():
            return None
        chosen = int(np.where(fits, after, np.inf).argmin())
        seconds[chosen], row[chosen] = after[chosen], as_long[chosen]
        tokens[chosen] += length[chosen]
        held[chosen].append(sample)
    rings = [
        SubRing(place, size, tuple(sorted(samples)))
        for place, size, samples in zip(places, sizes, held, strict=True)
    ]
    return Division(tuple(sorted(rings)), float(seconds.max()))


def _places(sizes: tuple[int, ...]) -> list[int] | None:
    """Return the first rank of each block, a multiple of its size; None where they find no room."""
    taken: set[int] = set()
    places = []
    for size in sizes:
        blocks = (set(range(first, first + size)) for first in range(0, sum(sizes) - size + 1, size))
        block = next((one for one in blocks if not one & taken), None)
        if block is None:
            return None
        taken |= block
        places.append(min(block))
    return places


def _neighbours(sizes: tuple[int, ...], ring_size: int) -> Iterator[tuple[int, ...]]:
    """Yield the sizes after one ring is split into equal parts, or equal rings are merged."""
    for size in dict.fromkeys(sizes):
        rest = list(sizes)
        rest.remove(size)
        for parts in _primes(size):
            yield tuple(sorted([*rest, *[size // parts] * parts], reverse=True))
        for parts in _primes(ring_size // size):
            if (number := sizes.count(size)) >= parts:
                others = [one for one in sizes if one != size] + [size] * (number - parts)
                yield tuple(sorted([*others, size * parts], reverse=True))


def _primes(number: int) -> list[int]:
    """Return the prime divisors of a number."""
    return [p for p in divisors(number) if p > 1 and all(p % n for n in range(2, math.isqrt(p) + 1))]
