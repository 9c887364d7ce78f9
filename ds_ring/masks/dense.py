"""Everything, and everything before: the two patterns that have no argument."""

from __future__ import annotations

from dataclasses import dataclass

from ds_ring.masks.branches import Branch
from ds_ring.masks.pattern import Head, Pattern


@dataclass(frozen=True)
class Full(Pattern):
    """Attend to every key from every query."""

    def branches(self, head: Head) -> tuple[Branch, ...]:
        return (Branch(),)


@dataclass(frozen=True)
class Causal(Pattern):
    """Attend to the query itself and to what came before."""

    def branches(self, head: Head) -> tuple[Branch, ...]:
        return (Branch(least=0),)
