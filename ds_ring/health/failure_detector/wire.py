"""What ranks and the monitor process both need: the verdict, sets of ranks in messages, and shared constants.

A rank imports this file and `handshake.py` of this folder, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

Ranges = tuple[tuple[int, int], ...]  # ranks from the first to the last, both included
WARNED_PART = 0.1  # of a limit, after which a late rank is named in a warning
GRACE_S = 0.5  # a late or broken wait is judged after this, when a death that caused it is known
NOT_COMPARED = "~"  # begins the name of a group whose ranks have different numbers


class Fault(NamedTuple):
    """Name who failed, by world rank, and what was seen."""

    rank: int
    cause: str


def write_ranges(ranks: Iterable[int]) -> Ranges:
    """Write ranks as ranges: a thousand that wait for a thousand would send megabytes otherwise."""
    return merged([rank, rank] for rank in ranks)


def merged(ranges: Iterable[Sequence[int]]) -> Ranges:
    """Put ranges in order, in the one form that equal sets have."""
    result: list[tuple[int, int]] = []
    for first, last in sorted((pair[0], pair[1]) for pair in ranges):
        if result and result[-1][1] >= first - 1:
            result[-1] = (result[-1][0], max(last, result[-1][1]))
        else:
            result.append((first, last))
    return tuple(result)


@lru_cache(maxsize=4096)
def read_ranks(ranges: Ranges) -> frozenset[int]:
    """Return the ranks of some ranges; ranks of one group share one set."""
    return frozenset(rank for first, last in ranges for rank in range(first, last + 1))
