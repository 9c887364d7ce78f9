"""Everything, and everything before: the two patterns that have no argument."""

from __future__ import annotations

from dataclasses import dataclass

from ds_ring.masks.branches import Branch
from ds_ring.masks.pattern import Head, Pattern


@dataclass(frozen=True)
class Full(Pattern):
    """Every query attends to every key."""

    def branches(self, head: Head) -> tuple[Branch, ...]:
        return (Branch(),)


@dataclass(frozen=True)
class Causal(Pattern):
    """A query attends to itself and to what came before."""

    def branches(self, head: Head) -> tuple[Branch, ...]:
        return (Branch(least=0),)
