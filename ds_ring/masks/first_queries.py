"""The first queries of a sequence alone: what a recomputation runs whose later results were kept."""

from __future__ import annotations

from dataclasses import dataclass

from ds_ring.masks.branches import Branch
from ds_ring.masks.partitions import in_range
from ds_ring.masks.pattern import Head, Pattern


@dataclass(frozen=True)
class FirstQueries(Pattern):
    """Let queries at positions below `count` see all keys, and later queries none.

    Attributes:
        count: of queries, at least 1.
    """

    count: int

    def branches(self, head: Head) -> tuple[Branch, ...]:
        return (Branch(queries=in_range(0, self.count)),)
