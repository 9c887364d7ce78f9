"""The layout of two sequences as one: queries of the first attend to keys of the second."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ds_ring.errors import RingLayoutError, RingPatternError
from ds_ring.layers.scores import BetweenSequences
from ds_ring.masks.branches import Branch, in_range
from ds_ring.masks.catalog import Full
from ds_ring.masks.pair_masks import ScoreFunction
from ds_ring.masks.pattern import Pattern, QueryHead
from ds_ring.masks.slots import IntArray
from ds_ring.patterns.documents.pattern import Documents
from ds_ring.schedule.layout import Layout


@dataclass(frozen=True)
class _QueriesToKeys(Pattern):
    """Attend from positions `first` .. `end` - 1, the queries, to the first `keys` ones."""

    keys: int
    first: int
    end: int

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        return (Branch(in_range(self.first, self.end), in_range(0, self.keys)),)


@dataclass(frozen=True)
class PairLayout(Layout):
    """Lay out two sequences as one, for attention from queries of one to keys of the other.

    Each rank has its slots of the queries' layout, then its slots of the keys' layout; where `parts` Ulysses
    ranks share a shard, each has its part of both. Positions are those of the keys, then of the queries, then
    one for each padding slot of the two layouts. In `pattern_between` only queries attend, and only to keys:
    the slots of the other sequence, and padding, are neither computed nor sent.

    With a `block` above 1 both sequences are filled up to whole blocks, on the rank of their last token. Then
    a block of queries has the same squares with keys whatever the number of queries.
    """

    queries: Layout = field(kw_only=True)
    keys: Layout = field(kw_only=True)
    parts: int = field(kw_only=True, default=1)
    block: int = field(kw_only=True, default=1)

    name = "pair"
    is_one_sequence = False

    @classmethod
    def join(cls, queries: Layout, keys: Layout, parts: int = 1, block: int = 1) -> PairLayout:
        """Return the layout of both.

        Raises:
            RingLayoutError: layouts of different numbers of ranks, or blocks on Ulysses ranks.
            RingShapeError: shards that cannot be split over the Ulysses ranks.
        """
        if queries.ring_size != keys.ring_size:
            raise RingLayoutError.wrong(
                "key_layout", f"{queries.ring_size} ranks", keys.ring_size, "make both for one ring"
            )
        if parts > 1 and block > 1:
            raise RingLayoutError.wrong(
                "key_layout", "no Ulysses ranks for passes in whole blocks", parts, "use ring_size"
            )
        for layout in (queries, keys):
            layout.part_slots(parts)  # refuses shards of other lengths
        whole = [-(-layout.local_tokens // block) * block for layout in (queries, keys)]
        return cls(
            sum(whole) * queries.ring_size, queries.ring_size, queries=queries, keys=keys, parts=parts,
            block=block,
        )  # fmt: skip

    def count_slots(self, layout: Layout) -> int:
        """Return the slots of a rank for one of the two, where Ulysses ranks share them its part."""
        return -(-layout.part_slots(self.parts) // self.block) * self.block

    def _whole(self, layout: Layout) -> int:
        return -(-layout.tokens // self.block) * self.block

    @property
    def first_query(self) -> int:
        """Return the position of the first query; that of the first key is 0."""
        return self._whole(self.keys)

    def _make_runs(self, layout: Layout, ring_rank: int) -> IntArray:
        """Return the runs of one of the two, filled up to whole blocks."""
        runs, missing = layout.runs(ring_rank), self._whole(layout) - layout.tokens
        if missing and len(runs) and runs[-1, 0] + runs[-1, 2] == layout.tokens:
            runs = runs.copy()
            runs[-1, 2] += missing
        return runs

    def runs(self, ring_rank: int) -> IntArray:
        both = (self.queries, self.first_query), (self.keys, 0)

        def fills(rank: int) -> int:
            used = sum(int(self._make_runs(layout, rank)[:, 2].sum()) for layout, _ in both)
            return self.parts * sum(self.count_slots(layout) for layout, _ in both) - used

        padding = self.first_query + self._whole(self.queries) + sum(map(fills, range(ring_rank)))
        pieces = []
        for part in range(self.parts):
            for layout, first in both:
                size, runs = self.count_slots(layout), self._make_runs(layout, ring_rank)
                # places in each run at which the part begins and ends
                before = np.cumsum(runs[:, 2]) - runs[:, 2]
                low, high = (np.clip(end * size - before, 0, runs[:, 2]) for end in (part, part + 1))
                mine = np.stack([first + runs[:, 0] + low * runs[:, 1], runs[:, 1], high - low], axis=1)
                fill = size - int((high - low).sum())
                pieces += [mine[high > low], np.array([[padding, 1, fill]])[: min(fill, 1)]]
                padding += fill
        return np.concatenate(pieces)

    def pattern_between(self, pattern: Pattern) -> Pattern:
        """Return a pattern between the two sequences as a pattern over the positions of this layout.

        Args:
            pattern: `Full`, or `Documents` with the ids of the queries, then those of the keys.

        Raises:
            RingPatternError: another one, or documents of another number of tokens.
        """
        queries, keys = self.queries.tokens, self.keys.tokens
        after_queries = self.first_query + self._whole(self.queries)
        between: Pattern = _QueriesToKeys(keys, self.first_query, after_queries)
        for part in pattern.conjuncts:
            if isinstance(part, Full):
                continue
            if not isinstance(part, Documents) or part.tokens != queries + keys:
                raise RingPatternError(
                    f"key_layout: expected the pattern Full(), or Documents with {queries + keys} ids, of the"
                    f" {queries} queries and then of the {keys} keys, got {part}; positions of two"
                    " sequences have no distance"
                )
            document_ids = np.repeat(part.ids, np.diff([*part.starts, part.tokens]))
            ids = np.full(self.tokens, -1)
            ids[:keys] = document_ids[queries:]
            ids[self.first_query : after_queries] = document_ids[queries - 1]  # what fills up the last block
            ids[self.first_query : self.first_query + queries] = document_ids[:queries]
            between = between & Documents(ids)
        return between

    def score_mod_between(self, score_mod: ScoreFunction | None) -> ScoreFunction | None:
        """Return a score_mod of positions in the two sequences as one of positions of this layout."""
        if not callable(score_mod) or isinstance(score_mod, type):  # none, or refused by name
            return score_mod
        return BetweenSequences(score_mod, self.first_query, self.queries.tokens, self.keys.tokens)

    def __str__(self) -> str:
        whole = f", in blocks of {self.block}" if self.block > 1 else ""
        return f"pair of queries in the {self.queries} and keys in the {self.keys}, {self.parts} parts{whole}"
