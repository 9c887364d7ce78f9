"""Smaller rings of a mesh for short samples: their process groups, and which samples each ring gets.

[Note: rings for samples]
Long samples need the memory and the time of many ranks; short ones lose both to messages there. So `divide`
cuts the ring into smaller rings, blocks of consecutive ranks, whose groups are made once, at the start. This
is the idea of FlexSP (Wang et al. 2024, arXiv:2412.01523), which solves an integer program, and ByteScale (Ge
et al. 2025, arXiv:2502.21231). Here the search splits and merges rings, beginning with equal ones, and gives
samples, the longest first, to the ring that is done first (Graham 1969, LPT). The seconds come from rates
that are the same on all ranks to the bit, so all find the same division.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from ds_ring.comm.groups import NO_LIMIT, make_groups
from ds_ring.comm.mesh import RingMesh
from ds_ring.errors import RingConfigError, RingMeshError
from ds_ring.health.client import call_guarded
from ds_ring.limits import divisors
from ds_ring.masks.tiles import UNBOUNDED
from ds_ring.schedule.grid import Grid

_FIRST_STEP = 3  # of the guarded calls: those before are the start's (config_agreement.py, mesh.py)


def make_sub_rings(mesh: RingMesh) -> dict[int, RingMesh]:
    """Return this rank's ring of every size that divides the ring of `mesh`, itself included. Collective.

    A smaller ring is a block of consecutive ring ranks. All of them share the failure detector and the owners
    of `mesh` (buffers, host memory, observers), and are closed with it. Each has its own plans and its own
    counter of calls. Only one is used at a time.

    Raises:
        RingMeshError: Ulysses ranks share a sequence, whose heads smaller groups could not split alike.
        RingPeerError: another rank failed during the call.
    """
    if mesh.ulysses_size > 1:
        raise RingMeshError.wrong("make_sub_rings", "no Ulysses ranks", f"{mesh.ulysses_size}", "set it to 1")
    shared: dict[str, Any] = {
        "detector": mesh.detector,
        "state": mesh.state,
        "timeouts": mesh.timeouts,
    }
    found = {mesh.ring_size: mesh}
    for step, size in enumerate(divisors(mesh.ring_size)[:-1], start=_FIRST_STEP):
        if size == 1:
            found[1] = RingMesh(Grid(1, 1), 0, owners=mesh.owners.derived(), **shared | {"detector": None})
            continue
        grid = Grid(mesh.grid.world_size, size, 1, mesh.grid.order)
        what = f"the making of the process groups of rings of {size}"
        make = functools.partial(make_groups, grid, NO_LIMIT)
        groups = call_guarded(make, mesh.detector, grid, what, step, mesh.timeouts.limit("start"))
        mesh.own(groups)
        more: dict[str, Any] = {
            **shared,
            "ranks_per_node": mesh.ranks_per_node,
            "owners": mesh.owners.derived(),
        }
        found[size] = RingMesh(grid, mesh.global_rank, *groups, **more)
    return found


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
        """Return the fixed cost of a ring of so many ranks, without its samples, in seconds."""

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
        raise RingConfigError.wrong(
            "lengths", "at least one token each", list(batch.lengths)[:8], "leave out empty samples"
        )

    @cache  # `times` is called once for a length
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
