"""The layout of two sequences as one: queries of the first attend to keys of the second."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ds_ring.errors import RingLayoutError, RingPatternError
from ds_ring.masks.branches import Branch, in_range
from ds_ring.masks.catalog import Full
from ds_ring.masks.pattern import Pattern, QueryHead
from ds_ring.masks.slots import IntArray
from ds_ring.patterns.documents.pattern import Documents
from ds_ring.schedule.layout import Layout


@dataclass(frozen=True)
class _QueriesToKeys(Pattern):
    """Attend from the first `queries` positions to those from there up to `end`."""

    queries: int
    end: int

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        return (Branch(in_range(0, self.queries), in_range(self.queries, self.end)),)


@dataclass(frozen=True)
class PairLayout(Layout):
    """Lay out two sequences as one, for attention from queries of one to keys of the other.

    Each rank has its slots of the queries' layout, then its slots of the keys' layout; where `parts` Ulysses
    ranks share a shard, each has its part of both. Positions are those of the queries, then of the keys, then
    one for each padding slot of the two layouts. In `pattern_between` only queries attend, and only to keys:
    the slots of the other sequence, and padding, are neither computed nor sent.
    """

    queries: Layout = field(kw_only=True)
    keys: Layout = field(kw_only=True)
    parts: int = field(kw_only=True, default=1)

    name = "pair"

    @classmethod
    def join(cls, queries: Layout, keys: Layout, parts: int = 1) -> PairLayout:
        """Return the layout of both.

        Raises:
            RingLayoutError: layouts of different numbers of ranks.
            RingShapeError: shards that cannot be split over the Ulysses ranks.
        """
        if queries.ring_size != keys.ring_size:
            raise RingLayoutError.wrong(
                "key_layout", f"{queries.ring_size} ranks", keys.ring_size, "make both for one ring"
            )
        slots = sum(one.part_slots(parts) * parts for one in (queries, keys))
        return cls(slots * queries.ring_size, queries.ring_size, queries=queries, keys=keys, parts=parts)

    def runs(self, ring_rank: int) -> IntArray:
        pads = [
            one.local_tokens - one.valid_tokens(rank)
            for rank in range(ring_rank)
            for one in (self.queries, self.keys)
        ]
        padding = self.queries.tokens + self.keys.tokens + sum(pads)  # its first position
        found = []
        for part in range(self.parts):
            for one, first in zip((self.queries, self.keys), (0, self.queries.tokens), strict=True):
                size, runs = one.part_slots(self.parts), one.runs(ring_rank)
                # places in each run at which the part begins and ends
                before = np.cumsum(runs[:, 2]) - runs[:, 2]
                low, high = (np.clip(end * size - before, 0, runs[:, 2]) for end in (part, part + 1))
                mine = np.stack([first + runs[:, 0] + low * runs[:, 1], runs[:, 1], high - low], axis=1)
                fill = size - int((high - low).sum())
                found += [mine[high > low], np.array([[padding, 1, fill]])[: min(fill, 1)]]
                padding += fill
        return np.concatenate(found)

    def pattern_between(self, pattern: Pattern) -> Pattern:
        """Return a pattern between the two sequences as a pattern over the positions of this layout.

        Args:
            pattern: `Full`, or `Documents` with the ids of the queries, then those of the keys.

        Raises:
            RingPatternError: another one, or documents of another number of tokens.
        """
        queries, both = self.queries.tokens, self.queries.tokens + self.keys.tokens
        found: Pattern = _QueriesToKeys(queries, both)
        for part in pattern.conjuncts:
            if isinstance(part, Full):
                continue
            if not isinstance(part, Documents) or part.tokens != both:
                raise RingPatternError(
                    f"key_layout: expected the pattern Full(), or Documents with {both} ids, of the {queries}"
                    f" queries and then of the {self.keys.tokens} keys, got {part}; positions of two"
                    " sequences have no distance"
                )
            ids = np.repeat(part.ids, np.diff([*part.starts, part.tokens]))
            found = found & Documents(np.concatenate([ids, np.full(self.tokens - both, -1)]))
        return found

    def __str__(self) -> str:
        return f"pair of queries in the {self.queries} and keys in the {self.keys}, {self.parts} parts"
