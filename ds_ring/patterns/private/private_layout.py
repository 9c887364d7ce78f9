"""The layout "private": two chunks of the shared sequence a rank, and the private tokens that belong to them.

Rank p has chunks p and 2P - 1 - p of the shared sequence, as in zigzag, and the private tokens of both, whose
keys no other rank reads. The cuts give all chunks as many tokens as whole blocks allow.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ds_ring.errors import RingLayoutError
from ds_ring.masks.slots import IntArray
from ds_ring.patterns.private.ranges import PrivateTable
from ds_ring.schedule.choose import Candidate, describe_mix, rated
from ds_ring.schedule.layout import Layout, Mix, expand_runs
from ds_ring.schedule.pieces import PieceLayout


@dataclass(frozen=True)
class PrivateLayout(PieceLayout):
    """Put private tokens on the rank of the shared token that they belong to."""

    name = "private"

    def copy(self, first: int, tokens: int) -> PieceLayout:
        """Return the layout of `tokens` positions from `first` on as a sequence of its own."""
        bounds, owners = np.array(self.boundaries), np.array(self.owners)
        inside = (bounds[1:] > first) & (bounds[:-1] < first + tokens)
        starts = np.maximum(bounds[:-1][inside] - first, 0)
        pieces = (*starts.tolist(), tokens), tuple(owners[inside].tolist())
        return PieceLayout(tokens, self.ring_size, self.multiple_of, *pieces)


def private_table(mix: Mix) -> PrivateTable | None:
    """Return the table of the first pattern that has private tokens; None if none has."""
    primitives = (part for pattern, _ in mix for part in pattern.primitives)
    return next((part for part in primitives if isinstance(part, PrivateTable)), None)


def make_private(tokens: int, ring_size: int, multiple_of: int, mix: Mix) -> Layout:
    """Return the layout of a pattern with private tokens (alone, in a composition, or in some layers)."""
    table = private_table(mix)
    if table is None or table.tokens != tokens:
        raise RingLayoutError.wrong(
            'layout "private"', f"a pattern with private tokens, of {tokens} tokens in all",
            describe_mix(mix) if mix else "none", 'give BlockDiffusion or Drafter, or take "auto"',
        )  # fmt: skip
    chunks = 2 * ring_size
    borders = _even_borders(table, chunks)
    chunk = np.arange(chunks)
    return _beside(table, borders, np.minimum(chunk, chunks - 1 - chunk), ring_size, multiple_of)


def beside(shared: Layout, pattern: Mix) -> PrivateLayout:
    """Return the layout of a pattern with private tokens whose shared sequence has a layout already.

    Args:
        shared: of the shared sequence alone, in runs of consecutive tokens.
        pattern: with private tokens, as a mix.

    Raises:
        RingLayoutError: no private tokens, another length, or a layout with steps.
    """
    table = private_table(pattern)
    if table is None or table.shared[1] - table.shared[0] != shared.tokens:
        raise RingLayoutError.wrong(
            "beside",
            f"private tokens beside {shared.tokens} shared ones",
            describe_mix(pattern),
            "make both",
        )
    runs = [(shared.runs(rank), rank) for rank in range(shared.ring_size)]
    rows = [
        (start, rank, step * (length > 1))
        for rank_runs, rank in runs
        for start, step, length in rank_runs.tolist()
    ]
    if any(step > 1 for _, _, step in rows):
        raise RingLayoutError.wrong("beside", "runs of consecutive tokens", str(shared), 'take "zigzag"')
    starts, owners, _ = zip(*sorted(rows), strict=True)
    return _beside(
        table, np.array([*starts, shared.tokens]), np.array(owners), shared.ring_size, shared.multiple_of
    )


def _even_borders(table: PrivateTable, chunks: int) -> IntArray:
    """Cut the shared sequence so that its chunks have equally many tokens, with their private ones."""
    first, end = table.shared
    length = end - first
    at = np.zeros(length + 1, dtype=np.int64)  # private tokens of each shared one
    places = np.array(table.stretches, dtype=np.int64).reshape(-1, 3)
    if table.whole:
        np.add.at(at, places[:, 2] - first, places[:, 1])
    else:
        np.add.at(at, places[:, 2] - first, 1)
        np.add.at(at, places[:, 2] - first + places[:, 1], -1)
        at = np.cumsum(at)
    before = np.append(0, np.cumsum(1 + at[:-1]))  # tokens that belong to what is before each cut
    goals = before[-1] * np.arange(chunks + 1) // chunks
    cuts: IntArray = np.searchsorted(before, goals, side="right") - 1
    if table.whole:  # a block more, if that is nearer
        after = np.minimum(cuts + 1, length)
        cuts = np.where(before[after] - goals < goals - before[cuts], after, cuts)
    return cuts


def _beside(
    table: PrivateTable, borders: IntArray, owners: IntArray, ring_size: int, multiple_of: int
) -> PrivateLayout:
    """Return the layout for cuts of the shared sequence, from 0, and the rank of each chunk."""
    first, _ = table.shared
    owner = np.full(table.tokens, -1, dtype=np.int64)
    owner[first + borders[0] : first + borders[-1]] = np.repeat(owners, np.diff(borders))
    places = np.array(table.stretches, dtype=np.int64).reshape(-1, 3)
    runs = np.stack([places[:, 0], np.ones(len(places), dtype=np.int64), places[:, 1]], axis=1)
    within = np.zeros_like if table.whole else np.array
    steps = within(expand_runs(runs) - np.repeat(places[:, 0], places[:, 1]))
    owner[expand_runs(runs)] = owner[np.repeat(places[:, 2], places[:, 1]) + steps]
    # the others take no part: they fill the emptiest shards
    others = np.flatnonzero(owner < 0)
    load = np.bincount(owner[owner >= 0], minlength=ring_size)
    room = np.maximum(-(-table.tokens // ring_size) - load, 0)
    owner[others] = np.append(np.repeat(np.arange(ring_size), room), np.arange(len(others)) % ring_size)[
        : len(others)
    ]
    starts = np.append(0, np.flatnonzero(np.diff(owner)) + 1)
    pieces = (*starts.tolist(), table.tokens), tuple(owner[starts].tolist())
    return PrivateLayout(table.tokens, ring_size, multiple_of, *pieces)


def candidates(tokens: int, ring_size: int, multiple_of: int, mix: Mix) -> list[Candidate]:
    """Return the layout for "auto" to compare; none for patterns without private tokens."""
    table = private_table(mix)
    if table is None or table.tokens != tokens:
        return []
    return [rated(mix, make_private(tokens, ring_size, multiple_of, mix))]
