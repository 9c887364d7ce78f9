"""Divide a ring into smaller ones for the samples of a batch: their sizes, and which samples each gets.

[Note: rings for samples]
Long samples need the memory and the time of many ranks; short ones lose both to messages there. So `divide`
cuts the ring into smaller rings of any size, blocks of consecutive ranks (`intervals.py`). This is the idea
of FlexSP (Wang et al. 2024, arXiv:2412.01523), which solves an integer program, and ByteScale (Ge et al.
2025, arXiv:2502.21231). Here the search begins with equal rings, moves ranks to the ring that is done last,
splits and merges rings, and gives samples, the longest first, to the ring that is done first (Graham 1969,
LPT). The seconds come from rates that are the same on all ranks to the bit, so all find the same division.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import NamedTuple, Protocol

import numpy as np

from ds_ring.errors import RingConfigError
from ds_ring.masks.tiles import UNBOUNDED

RingSizes = tuple[int, ...]  # ranks of each ring, descending

WORTH_IT = 0.99  # of the whole ring's seconds: a division that saves less is not taken
_STEPS = 32  # moves, splits and merges at most


class SubRing(NamedTuple):
    """A block of consecutive ring ranks, and the samples of the batch that they share."""

    first: int  # ring rank of its first member
    ranks: int
    samples: tuple[int, ...]  # ascending numbers; none for ranks that are left without


class Division(NamedTuple):
    """The rings of a batch in order of their ranks, and the seconds that the slowest should take."""

    rings: tuple[SubRing, ...]
    seconds: float

    def get_ring(self, ring_rank: int) -> SubRing:
        """Return the ring that a rank of the whole ring is in."""
        return next(ring for ring in self.rings if ring.first <= ring_rank < ring.first + ring.ranks)


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


def divide(batch: BatchLengths, ring_size: int, times: SampleSeconds, node: int = 0) -> Division:
    """Return the division of a ring's ranks that should be done first; the whole ring, where none is faster.

    `node` neighbours share a node, 0 if that is not known: rings keep inside one where they can.

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

    @cache
    def fill(sizes: RingSizes, batch: BatchLengths = batch) -> Filled | None:
        return fill_rings(batch, sizes, times, sample_seconds)

    whole = fill((ring_size,), batch._replace(most_tokens=UNBOUNDED))
    assert whole is not None
    seconds = operator.attrgetter("seconds")
    equal = (_equal(ring_size, rings) for rings in range(1, ring_size + 1))
    best = min((whole, *filter(None, map(fill, equal))), key=seconds)
    for _ in range(_STEPS):
        around = dict.fromkeys(_neighbours(best.sizes, best.slowest))
        better = min(filter(None, map(fill, around)), key=seconds, default=best)
        if better.seconds >= best.seconds:
            break
        best = better
    best = best if best.seconds < WORTH_IT * whole.seconds else whole
    rings, left = [], list(zip(best.sizes, best.held, strict=True))
    for first, size in _places(best.sizes, node):
        index = next(i for i, (ranks, _) in enumerate(left) if ranks == size)
        rings.append(SubRing(first, size, tuple(sorted(left.pop(index)[1]))))
    return Division(tuple(rings), best.seconds)


class Filled(NamedTuple):
    """Rings of some sizes with their samples, before they get places."""

    sizes: RingSizes
    held: tuple[tuple[int, ...], ...]
    slowest: int  # index of the ring that is done last
    seconds: float


def fill_rings(
    batch: BatchLengths,
    sizes: RingSizes,
    times: SampleSeconds,
    sample_seconds: Callable[[int], list[float]],
) -> Filled | None:
    """Give samples to rings of these sizes, the longest first; None where one fits none of them."""
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
    return Filled(sizes, tuple(map(tuple, held)), int(seconds.argmax()), float(seconds.max()))


def _equal(ring_size: int, rings: int) -> RingSizes:
    """Return the sizes of so many rings, which differ by one at most."""
    size, larger = divmod(ring_size, rings)
    return (size + 1,) * larger + (size,) * (rings - larger)


def _neighbours(sizes: RingSizes, slowest: int) -> Iterator[RingSizes]:
    """Yield the sizes after ranks are moved to the slowest ring, after a split, or after a merge with it."""
    mine, others = sizes[slowest], [*sizes[:slowest], *sizes[slowest + 1 :]]
    for size in dict.fromkeys(others):
        rest = list(others)
        rest.remove(size)
        moved = 1
        while moved < size:
            yield _sorted([*rest, mine + moved, size - moved])
            moved *= 2
        yield _sorted([*rest, mine + size])
        if size > 1:  # its samples move to rings that are done earlier
            yield _sorted([*rest, mine, size // 2, size - size // 2])
    for part in {1, mine // 3, mine // 2} - {0, mine}:
        yield _sorted([*others, part, mine - part])


def _sorted(sizes: Iterable[int]) -> RingSizes:
    return tuple(sorted(sizes, reverse=True))


def _places(sizes: RingSizes, node: int) -> Iterator[tuple[int, int]]:
    """Yield first rank and size of each ring; rings that fit into what is left of a node go there first."""
    left, first = sorted(sizes, reverse=True), 0
    while left:
        room = node - first % node if node else sum(left)
        size = next((size for size in left if size <= room), left[0])
        yield first, size
        left.remove(size)
        first += size
