"""The first queries of a sequence only: the mask of a recomputation that reuses the results of later ones."""

from __future__ import annotations

from dataclasses import dataclass

from ds_ring.masks.branches import Branch
from ds_ring.masks.partitions import in_range
from ds_ring.masks.pattern import Head, Pattern


@dataclass(frozen=True)
class FirstQueries(Pattern):
    """Let queries at positions below `count` attend to all keys, and later queries to none.

    Attributes:
        count: number of queries, at least 1.
    """

    count: int

    def branches(self, head: Head) -> tuple[Branch, ...]:
        return (Branch(queries=in_range(0, self.count)),)
